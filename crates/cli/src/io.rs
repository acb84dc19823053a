//! `io`
pub(crate) mod engine;
pub(crate) mod report;
