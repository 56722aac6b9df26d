#!/usr/bin/env bash
# Runs the suite's tests one by one under compute-sanitizer on this machine's GPU, with our own
# kernels watched, and prints a line for each. Fails if one finds something, or does not end in time.
#
#   scripts/sanitize.sh memcheck|racecheck|initcheck|synccheck [SECONDS] [TEST...]
#
# SECONDS (120) are a test's; TEST are beginnings of names, by default those of every op. SUITE is a
# suite that has been built already; without it cargo builds one. racecheck takes up to some 80 GB of
# the host's memory for a test, so give it one test at a time.
set -euo pipefail
cd "$(dirname "$0")/.."
tool="${1:?memcheck, racecheck, initcheck or synccheck}"
seconds="${2:-120}"
shift $(($# < 2 ? $# : 2))
names=("$@")
if [ "${#names[@]}" = 0 ]; then
  names=({embedding,flash_attention,flash_attention_varlen,flash_attn,flash_decoding,generation,layer_norm,linear,quant_linear}::
    {paged_append,paged_attention,quant_schemes_cuda,residual_add,rms_norm,rope,sample}::)
fi
suite="${SUITE:-$(cargo test --release --features cuda --test suite --no-run --message-format short 2>&1 |
  sed -n 's/.*(\(.*\/suite-[0-9a-f]*\)).*/\1/p')}"
[ -x "$suite" ] || {
  echo "no suite at '$suite'"
  exit 1
}
command -v compute-sanitizer > /dev/null || {
  echo "compute-sanitizer is not on the PATH: it comes with the CUDA toolkit"
  exit 1
}

# Our kernels' names have those of their files in them, attention's those of the ops.
ours=(--kernel-name kns=flash_ --kernel-name kns=decoding_)
while read -r source; do
  ours+=(--kernel-name "kns=$(basename "$source" .cu)")
done < <(find kernels -name '*.cu')
said="$(mktemp)"
trap 'rm -f "$said"' EXIT
failed=0
for name in "${names[@]}"; do
  for test in $("$suite" --list 2> /dev/null | sed -n "s/^\($name.*\): test$/\1/p"); do
    started=$SECONDS
    code=0
    CANDLE_FUSED_REQUIRE_CUDA=1 timeout "$seconds" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "${ours[@]}" "$suite" "$test" --exact --test-threads 1 > "$said" 2>&1 || code=$?
    summary="$(grep -aE '= (RACECHECK|ERROR) SUMMARY' "$said" | sed 's/^=* *//' | tail -n 1 || true)"
    case $code in
      0) ;;
      124) summary="did not end in ${seconds} s" failed=1 ;;
      *)
        failed=1
        if grep -aq 'Target application returned an error' "$said"; then
          summary="the test failed or was killed; $summary"
        fi
        [ -n "$summary" ] || summary="$(grep -av '^$' "$said" | tail -n 1)"
        ;;
    esac
    echo "$tool $test: exit $code, $((SECONDS - started)) s, ${summary:-no summary}"
  done
done
exit $failed
