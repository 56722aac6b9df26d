#!/usr/bin/env bash
# What deny.toml asks of the dependencies: licences, bans and sources always; advisories where their
# database can be had, which is a git repository.
#   scripts/check-dependencies.sh
# cargo-deny is compiled once, into $CANDLE_FUSED_TOOLS (default: ~/.cache/candle-fused-ci/tools).
set -euo pipefail
cd "$(dirname "$0")/.."
tools="${CANDLE_FUSED_TOOLS:-$HOME/.cache/candle-fused-ci/tools}"
export PATH="$tools/bin:$PATH"
say() { printf 'check-dependencies: %s\n' "$*"; }

if ! command -v cargo-deny >/dev/null; then
  say "compiling cargo-deny, once"
  cargo install cargo-deny --locked --quiet --root "$tools"
fi

cargo deny --locked check licenses bans sources
if said="$(timeout 30 cargo deny --locked fetch db 2>&1)"; then
  cargo deny --locked --offline check advisories
else
  [ -z "$said" ] || printf '%s\n' "$said" | tail -n 3
  say "advisories not checked: database unreachable"
fi
