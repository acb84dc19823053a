//! Any bytes as the ACPI table of the units: refused, or what they say makes sense.
//!
//! `scripts/fuzz dmar`, or `cargo +nightly fuzz run dmar`
#![no_main]

#[path = "../../crates/vtd/src/tests/dmar_fuzzed.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    fuzzed::check(input);
});
