//! The driver against the model controller.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "test code outside of test functions, on 64-bit machines"
)]

mod aborts;
mod common;
mod conformance;
#[cfg(feature = "count-rmw")]
mod counted;
mod dead;
mod events;
mod faults;
mod hostile;
mod interrupts;
mod lifetimes;
mod lying;
mod namespaces;
mod owned;
mod retries;
mod roundtrip;
mod sequences;
mod sgl;
mod small;
mod soft;
mod stress;
mod switch;
