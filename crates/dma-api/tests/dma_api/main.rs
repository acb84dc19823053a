//! A platform against its contract with `dma-api`, a model, and devices that attack freed memory.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;
mod constraints;
mod failures;
mod model;
mod streaming;
