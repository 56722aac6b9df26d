#!/usr/bin/env bash
# Compiles kernels/ for every architecture with the build script itself, and prints how long that
# took and which kernels keep values in local memory (spilled registers or arrays that are indexed
# at run time). Needs nvcc and rustc, no GPU.
#
#   scripts/compile-kernels.sh
#
# CANDLE_FUSED_COMPUTE_CAP and NUM_JOBS narrow what is compiled and how many at once. All is
# compiled from nothing, unless CANDLE_FUSED_KERNEL_CACHE names a folder that has it.
set -euo pipefail
cd "$(dirname "$0")/.."
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
rustc --edition 2024 -o "$work/build" build.rs

compile() {
  env CARGO_FEATURE_CUDA=1 OUT_DIR="$work" NUM_JOBS="${NUM_JOBS:-$(nproc)}" \
    CANDLE_FUSED_COMPUTE_CAP="${CANDLE_FUSED_COMPUTE_CAP:-all}" \
    "$work/build" | grep -vE '^cargo::(rerun|rustc-env)' | tee "$work/said" || true
}
# What the processors did tells more than the clock where others are at work too.
TIMEFORMAT='kernels: %Rs, of which the processors worked %Us'
time compile
if grep -q '^cargo::error' "$work/said"; then exit 1; fi
mapfile -t sources < <(find kernels -name '*.cu')
for source in "${sources[@]}"; do
  [ -s "$work/$(basename "$source" .cu).fatbin" ] || {
    echo "$source gave no fatbin"
    exit 1
  }
done
echo "kernels: ${#sources[@]} files, $(cat "$work"/*.fatbin | wc -c) bytes"

cuobjdump="$(command -v cuobjdump || echo "${CUDA_HOME:-}/bin/cuobjdump")"
if [ -x "$cuobjdump" ]; then
  # A GPU of 8.9 would run an empty kernel, which no test on another GPU finds.
  if [ "${CANDLE_FUSED_COMPUTE_CAP:-all}" = all ]; then
    "$cuobjdump" -res-usage "$work/gemm_fp8_mma.fatbin" 2>/dev/null | awk '
      /^arch =/ { arch = $3 }
      arch == "sm_89" && match($0, /SHARED:[0-9]+/) {
        ++kernels
        if (substr($0, RSTART + 7, RLENGTH - 7) == 0) empty = 1
      }
      END { exit !kernels || empty }' || {
      echo "gemm_fp8_mma is empty in the code for 8.9"
      exit 1
    }
  fi
  for fatbin in "$work"/*.fatbin; do
    "$cuobjdump" -res-usage "$fatbin" 2>/dev/null | awk '
      /^arch =/ { arch = $3 }
      /Function/ { kernel = $2; sub(":", "", kernel) }
      match($0, /STACK:[0-9]+/) {
        stack = substr($0, RSTART + 6, RLENGTH - 6)
        if (stack > 0) found[kernel] = found[kernel] " " arch " " stack
      }
      END { for (kernel in found) print "kernels: local memory, bytes: " kernel found[kernel] }' | sort
  done
fi
