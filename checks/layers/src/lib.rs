//! Reads the source of a crate, for the checks of layers and of unused functions.

pub mod source;
