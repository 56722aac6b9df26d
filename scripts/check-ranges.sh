#!/usr/bin/env bash
# Compiles the library with the newest and with the oldest dependencies that Cargo.toml allows, as a program
# would that depends on it.
#   scripts/check-ranges.sh
# Optional dependencies are left out: they need nvcc. Build products go to $CARGO_TARGET_DIR as always.
set -euo pipefail
cd "$(dirname "$0")/.."
root="$PWD"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$root/target}"
say() { printf 'check-ranges: %s\n' "$*"; }
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

# `name = "=version"` of each dependency: what its requirement says, with zeros for what it leaves open.
oldest="$(cargo metadata --no-deps --format-version 1 | python3 -c '
import json, sys
package = next(p for p in json.load(sys.stdin)["packages"] if p["name"] == "candle-fused")
for d in package["dependencies"]:
    if d["kind"] is None and not d["optional"]:
        version = d["req"].lstrip("^").split(".")
        print(d["name"], "=", "\"=" + ".".join(version + ["0"] * (3 - len(version))) + "\"")
')"
[ -n "$oldest" ]

# A package of its own that depends on the library: dev-dependencies of the latter have no say in versions.
check() {
  mkdir -p "$scratch/$1/src"
  printf 'pub use candle_fused;\n' >"$scratch/$1/src/lib.rs"
  cat >"$scratch/$1/Cargo.toml" <<TOML
[package]
name = "ranges"
version = "0.0.0"
edition = "2024"
rust-version = "$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)"

[workspace]

[dependencies]
candle-fused = { path = "$root" }
$2
TOML
  (
    cd "$scratch/$1"
    cargo check --release --quiet
    say "compiles with the $1: $(cargo tree --depth 1 --prefix none -e normal -p candle-fused |
      sed -n '2,$s/^\([a-z_0-9-]*\) v\([^ ]*\).*/\1 \2/p' | sort -u | paste -sd, | sed 's/,/, /g')"
  )
}
check newest ""
check oldest "$oldest"
