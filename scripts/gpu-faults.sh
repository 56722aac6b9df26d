#!/usr/bin/env bash
# What goes wrong on a GPU, tried on this machine's: memory short at every allocation, kernels that fail, no GPU
# to be seen, threads beside threads, and a soak. Prints a line for each part and fails if one does.
#
#   scripts/gpu-faults.sh [SECONDS]      SECONDS (0) of soak, with weights that are made up
#
# SUITE and SHIM are a suite and a library in front of the driver that have been built already; without them
# cargo and cc build both. Output goes to $CANDLE_FUSED_LONG_RUN (default: target/long-run), a file for each part.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds="${1:-0}"
out="${CANDLE_FUSED_LONG_RUN:-$PWD/target/long-run}"
mkdir -p "$out"

shim="${SHIM:-}"
if [ -z "$shim" ]; then
  shim="$out/cuda_faults.so"
  "${CC:-cc}" -shared -fPIC -O2 -Wall -Wextra -o "$shim" tests/shims/cuda_faults.c -ldl
fi
suite="${SUITE:-$(cargo test --release --locked --features cuda --test suite --no-run --message-format short 2>&1 |
  sed -n 's/.*(\(.*\/suite-[0-9a-f]*\)).*/\1/p')}"
[ -x "$suite" ] || {
  echo "gpu-faults: no suite at '$suite'"
  exit 1
}
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || true

failed=0
# NAME SECONDS [VARIABLE=VALUE...] TEST...: what says `faults:` or `soak:` is shown, and the end of what failed.
part() {
  local name="$1" limit="$2" started=$SECONDS code=0 settings=()
  shift 2
  while [[ "$1" == *=* ]]; do
    settings+=("$1")
    shift
  done
  env CANDLE_FUSED_REQUIRE_CUDA=1 "${settings[@]}" timeout "$limit" \
    "$suite" "$@" --include-ignored --nocapture --test-threads 1 >"$out/gpu-$name.txt" 2>&1 || code=$?
  # A filter that finds no test is no success.
  [ "$code" != 0 ] || grep -aq '^test result: ok. [1-9]' "$out/gpu-$name.txt" || code="0, and no test"
  echo "== $name: exit $code, $((SECONDS - started)) s"
  # The first of a test stands behind the test's name.
  grep -aoE '(faults|soak): .*' "$out/gpu-$name.txt" || true
  [ "$code" = 0 ] || {
    failed=1
    tail -n 25 "$out/gpu-$name.txt"
  }
}

part no-device 60 faults::no_device::
part no-device-app 60 app::cli::without_a_gpu_the_cpu_answers
part sticky 120 faults::sticky::
part captures 60 faults::captures::
part replay 60 replay::
part recordings 120 faults::recordings::
part threads 240 faults::threads::
part out-of-memory 400 "LD_PRELOAD=$shim" faults::out_of_memory::
if [ "$seconds" != 0 ]; then
  part soak $((seconds + 240)) SOAK_DEVICE=cuda "SOAK_WEIGHTS=${SOAK_WEIGHTS:-random}" "SOAK_SECONDS=$seconds" \
    --exact soak::memory_stays_flat_and_tokens_the_same
fi
exit $failed
