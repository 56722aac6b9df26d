#!/usr/bin/env bash
# Whether programs that compile with the library as it was at a commit compile with it as it is: cargo-semver-checks
# over the public API of the default features.
#   scripts/check-semver.sh [COMMIT]
# Without COMMIT it is the one named here. A break that is meant moves it on, and has its line in the changelog.
# cargo-semver-checks is compiled once (some ten minutes on two cores), into $CANDLE_FUSED_TOOLS (default:
# ~/.cache/candle-fused-ci/tools). Build products go to $CARGO_TARGET_DIR as always.
set -euo pipefail
cd "$(dirname "$0")/.."
baseline="${1:-6c7e82b}"
tools="${CANDLE_FUSED_TOOLS:-$HOME/.cache/candle-fused-ci/tools}"
export PATH="$tools/bin:$PATH"

if ! command -v cargo-semver-checks >/dev/null; then
  printf 'check-semver: compiling cargo-semver-checks, once\n'
  cargo install cargo-semver-checks --locked --quiet --root "$tools"
fi
# There is no release yet, so that versions say nothing: additions are welcome, breaks are errors.
cargo semver-checks --package candle-fused --baseline-rev "$baseline" --release-type minor --default-features
