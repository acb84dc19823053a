//! I/O queue pairs.

mod abort;
mod pair;
mod poll;
mod submit;
mod wait;

pub use pair::Queue;
pub use wait::Vector;
