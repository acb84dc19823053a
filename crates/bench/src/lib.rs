//! Head-to-head measurements: Pinfold beside what it replaces.
//!
//! The subjects of a case run interleaved in one process, so that a ratio between them holds on a machine whose speed
//! drifts; each figure is a median with its minimum and maximum. A figure that comes out of a model says so.
//!
//! Baselines are written afresh from public descriptions; no kernel source is copied.
#![forbid(unsafe_code)]

pub mod baseline;
pub mod harness;
pub mod record;
pub mod suite;

pub use harness::{Harness, Options};
pub use record::{Metric, Record};
pub use suite::{BenchError, SUITES, run};
