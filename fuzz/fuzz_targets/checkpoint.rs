#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| candle_fused_fuzz::run("checkpoint", data));
