//! `copy`
pub(crate) mod digest;
pub(crate) mod error;
pub(crate) mod pump;
mod staged;
