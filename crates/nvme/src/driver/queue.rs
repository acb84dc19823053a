//! I/O queue pairs: submission, completions, waiting, timeouts.

mod abort;
mod pair;
mod poll;
mod retry;
mod submit;
mod vector;
mod wait;

pub use pair::Queue;
pub use vector::Vector;
