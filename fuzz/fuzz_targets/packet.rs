//! Any bytes as a packet: nothing panics, and a mirror moves what it may move.
//!
//! `scripts/fuzz packet`, or `cargo +nightly fuzz run packet`
#![no_main]

#[path = "../../tools/xdp/tests/packets/fuzzed.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzzed::check(input));
