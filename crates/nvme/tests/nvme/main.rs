//! The driver and the model controller against each other.

mod common;
mod conformance;
mod faults;
mod hostile;
mod roundtrip;
mod sequences;
mod soft;
mod stress;
