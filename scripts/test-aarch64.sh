#!/usr/bin/env bash
# Builds the tests for aarch64 and runs those of the cores, ops and models under emulation
# (qemu-user): on a processor with dot products, on one without, and in plain Rust.
#   scripts/test-aarch64.sh
# Needs Linux. The Rust target, the C cross compiler and qemu are installed where they are missing,
# the latter two with apt-get. Build products go to $CARGO_TARGET_DIR as always.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'test-aarch64: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}

target=aarch64-unknown-linux-gnu
compiler=aarch64-linux-gnu-gcc
qemu=qemu-aarch64
sysroot=/usr/aarch64-linux-gnu

has() { command -v "$1" >/dev/null; }
if ! has $compiler || ! has $qemu || [ ! -e $sysroot/lib/libc.so.6 ]; then
  has apt-get || die "needs $compiler with its C library in $sysroot, and $qemu"
  root=()
  if [ "$(id -u)" != 0 ]; then
    has sudo || die "install gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user"
    root=(sudo)
  fi
  say "installing the cross compiler and qemu"
  {
    "${root[@]}" apt-get update -q
    DEBIAN_FRONTEND=noninteractive "${root[@]}" apt-get install -q -y --no-install-recommends \
      gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
  } >&2 || die "apt-get failed"
fi
if has rustup; then
  rustup target list --installed | grep -qx $target || rustup target add $target
fi

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$compiler
# The tests are built once and then started by hand, each time on another processor.
log="$(cargo test --release --locked --target $target -p candle-fused --lib --test suite --no-run 2>&1)" ||
  built=$?
printf '%s\n' "$log" >&2
[ "${built:-0}" = 0 ] || die "the build failed"
[[ $log != *'warning: `candle-fused`'* ]] || die "the build has warnings"
binaries="$(sed -n 's/^ *Executable .*(\(.*\))$/\1/p' <<<"$log")"
[ "$(wc -w <<<"$binaries")" = 2 ] || die "expected the library's tests and the suite, got: $binaries"
library="$(head -n 1 <<<"$binaries")"
suite="$(tail -n 1 <<<"$binaries")"

# Emulation is some twenty times slower, so that random sweeps are shorter here.
export PROPTEST_CASES=8

run() {
  say "$1, CANDLE_FUSED_SIMD=$2"
  CANDLE_FUSED_SIMD="$2" $qemu -L $sysroot -cpu "$1" "${@:3}" --quiet
}
# The library's tests go through every level that the processor has. Quantizing is plain Rust, and
# long.
cores=("$library" cpu:: --skip as_small_as_promised --skip in_parts_as_in_one)
run max dotprod "${cores[@]}"
# All of them have been through NEON by then: here it is that nothing needs more.
run cortex-a72 neon "${cores[@]}" --skip scheme_tests
# Only what the processor's code has a part in: products, norms, rotation, attention, and models of each family. Others
# know no processor, or reach the same code by another door, as paged prompts and ragged batches reach attention.
modules=(quant_linear:: quant_schemes:: dense:: linear:: rms_norm layer_norm residual_add:: rope:: flash_attention::
  flash_decoding:: paged_attention:: paged_append:: quantized_cache:: per_token:: checkpoints:: models_gguf:: golden::
  llama:: llama_gguf:: qwen:: gpt_neox:: families:: bitnet:: pool::)
# The suite needs dot products, since candle 0.11.1's quantized products, which ours are compared with, use them unasked;
# and candle cuts the lower bits of bf16 sums off on aarch64 instead of rounding them, so nothing equals its sums bit for
# bit there.
skipped=(--skip app:: --skip structure:: --skip sums_are_candles_bit_for_bit --skip unaligned_views_are_summed
  --skip the_residual_form_is_the_sum_and_its_norm)
run max dotprod "$suite" "${modules[@]}" "${skipped[@]}"
