//! I/O queue pairs: submission, completions, waiting, timeouts.

mod order;
mod pair;
mod retry;
mod submit;
mod wait;

pub use pair::{Queue, Vector};
