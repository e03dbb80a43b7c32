#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| permafrost_fuzz::wire::check(input));
