#!/usr/bin/env bash
# Instructions of one decode step behind 64 tokens and of a prompt of 512, on one thread, as
# valgrind's callgrind counts them: the same from run to run, however busy the machine is.
#   ./count.sh FILE.gguf... > table.md
# Valgrind has no AVX-512; both sides have to be built for AVX2 (see README.md). A prompt takes
# minutes.
set -euo pipefail
program="${PEERS:-${CARGO_TARGET_DIR:-$(dirname "$0")/target}/release/candle-fused-peers}"
profile="$(mktemp)"
trap 'rm -f "$profile"' EXIT

# count PEER PART FILE: millions of instructions.
count() {
  coproc side {
    exec valgrind --tool=callgrind --instr-atstart=no --toggle-collect=counted \
      --callgrind-out-file="$profile" \
      "$program" count --threads 1 --peer "$1" --part "$2" --model "$3" 2>/dev/null
  }
  local process="$side_PID" ready
  read -r ready <&"${side[0]}"
  callgrind_control --instr=on "$process" >/dev/null
  echo >&"${side[1]}"
  wait "$process"
  awk '$1 == "summary:" || $1 == "totals:" { count = $2 } END { printf "%.1f", count / 1e6 }' \
    "$profile"
}

echo "| file | part | candle-fused | llama.cpp, flash attention | llama.cpp, without | ratio to the better |"
echo "|---|---|---|---|---|---|"
for file in "$@"; do
  for part in ${PARTS:-decode prefill}; do
    ours="$(count fused "$part" "$file")"
    flash="$(count llama-flash "$part" "$file")"
    plain="$(count llama-plain "$part" "$file")"
    ratio="$(awk -v a="$ours" -v b="$flash" -v c="$plain" \
      'BEGIN { printf "%.2fx", a / (b < c ? b : c) }')"
    echo "| $(basename "$file") | $part | $ours M | $flash M | $plain M | $ratio |"
  done
done
