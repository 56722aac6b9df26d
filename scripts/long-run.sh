#!/usr/bin/env bash
# What takes longer than a change may: run it now and then, and note what it found in docs/notes.
#   scripts/long-run.sh fuzz [SECONDS] [TARGET...]   each target for SECONDS (900)
#   scripts/long-run.sh properties [CASES]           each property with CASES (10,000)
#   scripts/long-run.sh soak [SECONDS]               prompts, stops and restarts for SECONDS (3,600)
#   scripts/long-run.sh errors                       SmolLM2's error with every block type beside candle's
#   scripts/long-run.sh sanitize                     the tests under AddressSanitizer
#   scripts/long-run.sh debug                        the tests with debug assertions and overflow checks
#   scripts/long-run.sh miri                         unit tests without SIMD or system calls under Miri
#   scripts/long-run.sh emulated                     the tests on further architectures
#   scripts/long-run.sh gpu [SECONDS]                faults on a GPU, and a soak there for SECONDS (480)
# Output goes to $CANDLE_FUSED_LONG_RUN (default: target/long-run), a file for each part.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${CANDLE_FUSED_LONG_RUN:-$PWD/target/long-run}"
mkdir -p "$out"
say() { printf 'long-run: %s\n' "$*" >&2; }

targets=(arguments chat_template checkpoint config gguf gguf_tensors quantized_file vocabulary)

# A finding is a crash, a hang or an allocation of more than 64 MB; inputs are small, so that four times
# their size is no matter. minijinja lets a template repeat a text up to 100 MB. What may take five seconds
# in a program may take thirty here: the targets are instrumented, and share the machine at the lowest
# priority. FUZZ_TIMEOUT changes that.
fuzz() {
  local seconds="${1:-900}" target failed=0 megabytes
  shift $(($# < 1 ? $# : 1))
  [ $# -gt 0 ] || set -- "${targets[@]}"
  command -v cargo-fuzz >/dev/null || cargo install cargo-fuzz --locked
  (cd fuzz && cargo +nightly fuzz build)
  for target in "$@"; do
    megabytes=64
    [ "$target" != chat_template ] || megabytes=128
    mkdir -p "$out/corpus/$target" "$out/artifacts/$target"
    # The first folder takes what is new.
    (cd fuzz && RUST_BACKTRACE=0 RAYON_NUM_THREADS=1 nice -n 19 cargo +nightly fuzz run "$target" \
      "$out/corpus/$target" "../tests/data/fuzz/$target" -- \
      -max_total_time="$seconds" -timeout="${FUZZ_TIMEOUT:-30}" -malloc_limit_mb=$megabytes -rss_limit_mb=2048 \
      -max_len=65536 -print_final_stats=1 -artifact_prefix="$out/artifacts/$target/") \
      >"$out/fuzz-$target.txt" 2>&1 || failed=1
    say "$target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$out/fuzz-$target.txt") executions," \
      "$(find "$out/artifacts/$target" -type f | wc -l) findings"
  done
  return $failed
}

properties() {
  PROPTEST_CASES="${1:-10000}" cargo test --release --locked --test suite -- properties:: \
    2>&1 | tee "$out/properties.txt"
}

soak() {
  SOAK_SECONDS="${1:-3600}" cargo test --release --locked --test suite -- \
    --ignored --exact --nocapture soak::memory_stays_flat_and_tokens_the_same 2>&1 | tee "$out/soak.txt"
}

# Leaks are not looked for: the pool's threads and candle's statics live as long as the process. Tests that start the
# examples' programs are left out, as cargo would build those without the sanitizer.
sanitize() {
  ASAN_OPTIONS=detect_leaks=0 RUSTFLAGS="-Zsanitizer=address" PROPTEST_CASES="${PROPTEST_CASES:-20}" \
    cargo +nightly test --release --locked --target x86_64-unknown-linux-gnu --lib --test suite -- \
    --skip allocations:: --skip fuzz_replay:: --skip app::cli:: --skip app::architectures:: --skip app::quantize:: \
    2>&1 | tee "$out/sanitize.txt"
}

# Of this crate: dependencies are compiled as in other builds.
debug() {
  cargo test --release --locked --lib --test suite \
    --config 'profile.release.debug-assertions=true' --config 'profile.release.overflow-checks=true' \
    --config 'profile.release.package."*".debug-assertions=false' \
    --config 'profile.release.package."*".overflow-checks=false' \
    2>&1 | tee "$out/debug.txt"
}

errors() {
  cargo test --release --locked --test suite -- --include-ignored --nocapture smollm2_error:: \
    2>&1 | tee "$out/errors.txt"
}

# The pool's threads live as long as the process. Packed matrices lie in mapped memory, which Miri has none
# of, and sweeps of values take hours there.
miri() {
  CANDLE_FUSED_SIMD=scalar CANDLE_FUSED_THREADS=2 MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-ignore-leaks" \
    cargo +nightly miri test --locked --lib -p candle-fused -- \
    --test-threads 1 nn::recipe models::balance ops::sample cpu::dense::tests::an pool::tests::a_ \
    cpu::math::tests::swiglu cpu::quantize::tests::schemes 2>&1 | tee "$out/miri.txt"
}

emulated() {
  scripts/test-aarch64.sh 2>&1 | tee "$out/aarch64.txt"
}

gpu() {
  scripts/gpu-faults.sh "${1:-480}" 2>&1 | tee "$out/gpu.txt"
}

part="${1:-}"
case "$part" in
  fuzz | properties | soak | errors | sanitize | debug | miri | emulated | gpu) shift && "$part" "$@" ;;
  *)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
