#!/usr/bin/env bash
# Builds the library for wasm32-unknown-unknown and runs tests of its ops and models under wasmtime.
#   scripts/test-wasm.sh
# Needs Python 3.9 or newer with pip. The Rust target is added where it is missing; wasmtime is installed from PyPI,
# once, into $CANDLE_FUSED_TOOLS (default: ~/.cache/candle-fused-ci/tools). Build products go to $CARGO_TARGET_DIR as
# always.
set -euo pipefail
cd "$(dirname "$0")/.."
target=wasm32-unknown-unknown
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}"
say() { printf 'test-wasm: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}

if command -v rustup >/dev/null; then
  rustup target list --installed | grep -qx $target || rustup target add $target
fi

# Installed beside its place and moved there whole, so that a broken download leaves nothing.
version=50.0.1
runtime="${CANDLE_FUSED_TOOLS:-$HOME/.cache/candle-fused-ci/tools}/wasmtime-$version"
if [ ! -d "$runtime" ]; then
  say "installing wasmtime, once"
  mkdir -p "$(dirname "$runtime")"
  new="$(mktemp -d "$runtime.XXXXXX")"
  PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --only-binary :all: \
    --target "$new" "wasmtime==$version" || die "pip could not install wasmtime"
  mv -T "$new" "$runtime" 2>/dev/null || [ -d "$runtime" ] || die "$runtime cannot be written"
fi

# The versions that everything else is tested with.
cp Cargo.lock tests/wasm
log="$(cargo build --release --target $target --manifest-path tests/wasm/Cargo.toml 2>&1)" || built=$?
printf '%s\n' "$log" >&2
[ "${built:-0}" = 0 ] || die "the build failed"
[[ $log != *'warning: `candle-fused'* ]] || die "the build has warnings"
PYTHONPATH="$runtime" python3 tests/wasm/run.py "$CARGO_TARGET_DIR/$target/release/candle_fused_wasm.wasm"
