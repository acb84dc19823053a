//! `copy`
mod digest;
mod error;
mod pump;
mod staged;
