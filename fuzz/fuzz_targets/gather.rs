//! Any buffer, any part, any profile, laid out in every way: see
//! `crates/core/tests/gather/fuzzed.rs`, which is the body, and runs as a property with the other
//! tests too.
//!
//! `scripts/fuzz`, or `cargo +nightly fuzz run gather`
#![no_main]

#[path = "../../crates/core/tests/gather/controller.rs"]
#[allow(dead_code)]
mod controller;
#[path = "../../crates/core/tests/gather/fuzzed.rs"]
mod fuzzed;
#[path = "../../crates/core/tests/gather/pages.rs"]
#[allow(dead_code)]
mod pages;

libfuzzer_sys::fuzz_target!(|input: &[u8]| fuzzed::check(input));
