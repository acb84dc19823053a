//! The driver and the model controller against each other.

mod common;
mod roundtrip;
