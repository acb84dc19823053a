//! On the real kernel, with real files.

mod errors;
mod lifetimes;
mod memory;
mod modes;
mod notes;
mod registered;
mod transfers;
