//! An NVMe driver over Pinfold, and a model controller to run it against.
#![forbid(unsafe_code)]

pub mod driver;
pub mod model;
pub mod registers;
pub mod spec;

pub use registers::Registers;
