//! The driver and the model controller against each other.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "all of it is tests, on 64-bit machines; the lints let off functions marked as tests only"
)]

mod aborts;
mod common;
mod conformance;
mod dead;
mod events;
mod faults;
mod hostile;
mod interrupts;
mod lifetimes;
mod namespaces;
mod owned;
mod roundtrip;
mod sequences;
mod sgl;
mod soft;
mod stress;
mod switch;
