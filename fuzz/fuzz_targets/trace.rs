//! Any bytes as a trace, and as the fields of each event: nothing panics, and what is read is
//! consistent.
//!
//! `scripts/fuzz trace`, or `cargo +nightly fuzz run trace`
#![no_main]

#[path = "../../tools/replay/tests/replay/fuzzed.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzzed::check(input));
