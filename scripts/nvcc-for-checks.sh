#!/usr/bin/env bash
# nvcc for checks that link candle's kernels and run none of them: it leaves them as PTX, unoptimized, which takes a
# tenth of the time. All other sources, ours among them, are compiled as asked.
#
#   NVCC="$PWD/scripts/nvcc-for-checks.sh" cargo clippy --features cuda
set -euo pipefail
# A build script runs in the folder of its package.
if [[ ${PWD##*/} == candle-kernels-* ]]; then
  compile=
  for argument; do
    shift
    if [[ $argument =~ ^-gencode=arch=(compute_[0-9a-z]+),code=sm_ ]]; then
      argument="-gencode=arch=${BASH_REMATCH[1]},code=${BASH_REMATCH[1]}"
      compile=1
    fi
    set -- "$@" "$argument"
  done
  if [ -n "$compile" ]; then set -- -Xcicc -O0 "$@"; fi
fi
exec nvcc "$@"
