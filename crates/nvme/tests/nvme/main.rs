//! The driver against the model controller.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "test code outside of test functions, on 64-bit machines"
)]

mod aborts;
mod ages;
mod common;
mod conformance;
#[cfg(feature = "count-rmw")]
mod counted;
mod ends;
mod expired;
mod faults;
mod figures;
mod identities;
mod interrupts;
mod namespaces;
mod ordering;
mod own_payloads;
mod owned;
mod passthrough;
mod payloads;
mod records;
mod retries;
mod roundtrip;
mod soft;
mod stress;
mod untrusted;
