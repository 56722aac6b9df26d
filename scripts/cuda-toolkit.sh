#!/usr/bin/env bash
# A CUDA toolkit for machines that have none: nvcc from PyPI and libraries to link against. Needs
# Linux, Python 3.9 or newer with pip, a C compiler and cargo; neither root nor a GPU.
#
#   eval "$(scripts/cuda-toolkit.sh)"
#   cargo build --release --features cuda
#
# The first run downloads 100 MB; later ones only print the environment. What it installs is in
# $CANDLE_FUSED_CUDA (default: ~/.cache/candle-fused/cuda-13.0); remove that folder to be rid of it.
#
# The driver and the CUDA libraries themselves are not here, only stubs with their names: a program
# built this way finds the real ones where there is a GPU. Started against the stubs it sees a
# driver that answers "stub library" to every call, so no CUDA device.
#
# CUDA_COMPUTE_CAP, where it is not set, becomes 80, since candle's own kernels need one number
# where there is no GPU to ask; ours are then compiled for all architectures all the same.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'cuda-toolkit: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}

home="${CANDLE_FUSED_CUDA:-${XDG_CACHE_HOME:-$HOME/.cache}/candle-fused/cuda-13.0}"
[ "$(uname -s)" = Linux ] || die "NVIDIA's compiler is on PyPI for Linux; install the CUDA toolkit"

# Installed beside its place and moved there whole, so that a broken download leaves nothing.
if [ ! -x "$home/cuda/bin/nvcc" ]; then
  python3 -m pip --version >/dev/null 2>&1 || die "needs python3 with pip"
  mkdir -p "$home"
  new="$(mktemp -d "$home/new.XXXXXX")"
  trap 'rm -rf "$new"' EXIT
  say "installing nvcc into $home"
  PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --target "$new" \
    nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cuda-cuobjdump==13.2.78 >&2 ||
    die "pip could not install nvcc"
  cuda="$new/nvidia/cu13"
  [ -e "$cuda/bin/nvcc" ] || die "the packages have no nvidia/cu13/bin/nvcc"
  chmod +x "$cuda"/bin/* "$cuda"/nvvm/bin/*
  ln -sfn lib "$cuda/lib64"
  ln -sf libcudart.so.13 "$cuda/lib/libcudart.so"
  # Another run may have been faster.
  mv -T "$cuda" "$home/cuda" 2>/dev/null || [ -x "$home/cuda/bin/nvcc" ] ||
    die "$home/cuda cannot be written"
fi

# Stubs: every function that cudarc declares, under the libraries' real names.
version="$(awk '/^name = "cudarc"/ { getline; gsub(/[^0-9.]/, ""); print; exit }' Cargo.lock)"
[ -n "$version" ] || die "Cargo.lock has no cudarc"
stubs="$home/stubs-$version"
if [ ! -d "$stubs" ]; then
  find_cudarc() {
    find "${CARGO_HOME:-$HOME/.cargo}/registry/src" -maxdepth 2 -name "cudarc-$version" 2>/dev/null |
      head -n 1
  }
  cudarc="$(find_cudarc)"
  if [ -z "$cudarc" ]; then
    cargo fetch --locked >&2
    cudarc="$(find_cudarc)"
  fi
  [ -n "$cudarc" ] || die "cargo fetch did not bring the source of cudarc $version"
  new_stubs="$(mktemp -d "$home/new.XXXXXX")"
  trap 'rm -rf "${new:-}" "$new_stubs"' EXIT
  # module of cudarc : library : version in its name : an error that it knows
  for entry in driver:cuda:1:34 nvrtc:nvrtc:13:1 curand:curand:10:101 cublas:cublas:13:1 \
    cublaslt:cublasLt:13:1; do
    IFS=: read -r module library major error <<<"$entry"
    grep -ohE 'fn (cu|nvrtc|curand|cublas)[A-Za-z0-9_]*' "$cudarc/src/$module/sys/mod.rs" |
      awk -v error="$error" '!seen[$2]++ { print "int " $2 "(void) { return " error "; }" }' \
        >"$new_stubs/$library.c"
    [ -s "$new_stubs/$library.c" ] || die "cudarc $version declares no functions of $library"
    "${CC:-cc}" -shared -fPIC -w -fno-builtin "-Wl,-soname,lib$library.so.$major" \
      -o "$new_stubs/lib$library.so" "$new_stubs/$library.c"
    ln -s "lib$library.so" "$new_stubs/lib$library.so.$major"
  done
  mv -T "$new_stubs" "$stubs" 2>/dev/null || [ -d "$stubs" ] || die "$stubs cannot be written"
fi

print() { printf 'export %s=%q\n' "$1" "$2"; }
print CUDA_HOME "$home/cuda"
print CUDA_PATH "$home/cuda"
print CUDA_ROOT "$home/cuda"
print CUDARC_CUDA_VERSION 13000
print PATH "$home/cuda/bin:$PATH"
print LIBRARY_PATH "$stubs:$home/cuda/lib${LIBRARY_PATH:+:$LIBRARY_PATH}"
if [ -z "${CUDA_COMPUTE_CAP:-}" ]; then
  print CUDA_COMPUTE_CAP 80
  print CANDLE_FUSED_COMPUTE_CAP "${CANDLE_FUSED_COMPUTE_CAP:-all}"
fi
