//! Gather from outside: lists against a controller's walk, and the body of the fuzz target as a
//! property.

#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod bytes;
mod controller;
mod fuzzed;
mod pages;
mod prp;
mod sgl;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// A shorter form of `cargo +nightly fuzz run gather`, for systems without cargo-fuzz.
    #[test]
    fn whatever_is_gathered_is_what_went_in(input in prop::collection::vec(any::<u8>(), 0..200)) {
        fuzzed::check(&input);
    }
}
