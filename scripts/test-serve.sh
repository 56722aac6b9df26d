#!/usr/bin/env bash
# Starts the server on SmolLM2, and has the official openai package and a headless Chromium talk to it.
#   scripts/test-serve.sh
# Needs Python 3.10 or newer with pip. Packages from PyPI are installed once, into $CANDLE_FUSED_TOOLS (default:
# ~/.cache/candle-fused-ci/tools), Chromium and its driver with apt-get where they are missing. Build products go to
# $CARGO_TARGET_DIR as always.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}"
say() { printf 'test-serve: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}

has() { command -v "$1" >/dev/null; }
if ! has chromium || ! has chromedriver; then
  has apt-get || die "needs chromium and chromedriver; there is no apt-get to install them with"
  root=()
  if [ "$(id -u)" != 0 ]; then
    has sudo || die "needs chromium and chromedriver; install Debian's chromium and chromium-driver as root"
    root=(sudo)
  fi
  say "installing chromium"
  {
    "${root[@]}" apt-get update -q
    DEBIAN_FRONTEND=noninteractive "${root[@]}" apt-get install -q -y --no-install-recommends \
      chromium chromium-driver
  } >&2 || die "apt-get could not install chromium and chromium-driver"
  has chromium && has chromedriver || die "apt-get installed no chromium and chromedriver"
fi

# Installed beside its place and moved there whole, so that a broken download leaves nothing.
openai=3.57.0
selenium=4.51.0
clients="${CANDLE_FUSED_TOOLS:-$HOME/.cache/candle-fused-ci/tools}/openai-$openai-selenium-$selenium"
if [ ! -d "$clients" ]; then
  say "installing openai and selenium, once"
  mkdir -p "$(dirname "$clients")"
  new="$(mktemp -d "$clients.XXXXXX")"
  PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-warn-conflicts \
    --only-binary :all: --target "$new" "openai==$openai" "selenium==$selenium" ||
    die "pip could not install openai and selenium"
  mv -T "$new" "$clients" 2>/dev/null || [ -d "$clients" ] || die "$clients cannot be written"
fi

cargo build --release --locked -p candle-fused-serve

scratch="$(mktemp -d)"
log="$scratch/log"
server=
cleanup() {
  [ -z "$server" ] || kill "$server" 2>/dev/null || true
  rm -rf "$scratch"
}
trap cleanup EXIT
key="$(python3 -c 'import secrets; print(secrets.token_hex(16))')"
CANDLE_FUSED_API_KEY="$key" "$CARGO_TARGET_DIR/release/candle-fused-serve" \
  --port 0 --sequences 4 --max-queue 4 2>"$log" &
server=$!
# The model may have to be fetched first.
while ! url="$(sed -n 's/^listening on //p' "$log")" || [ -z "$url" ]; do
  kill -0 "$server" 2>/dev/null || die "the server did not start: $(cat "$log")"
  sleep 0.2
done
cat "$log" >&2

export PYTHONPATH="$clients" NO_PROXY=127.0.0.1 no_proxy=127.0.0.1
python3 serve/tests/openai_client.py "$url" "$key"
python3 serve/tests/page.py "$url" "$key"

kill -TERM "$server"
ended=0
wait "$server" || ended=$?
server=
[ "$ended" = 0 ] || die "the server ended with status $ended: $(cat "$log")"
say "all passed"
