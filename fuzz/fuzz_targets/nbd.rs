//! Any bytes as a connection, whole and in pieces: nothing panics, and both have the same replies
//! and requests.
//!
//! `scripts/fuzz nbd`, or `cargo +nightly fuzz run nbd`
#![no_main]

#[path = "../../tools/nbd/tests/protocol/fuzzed.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzzed::check(input));
