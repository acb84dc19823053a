//! Head-to-head measurements: Pinfold beside what it replaces.
//!
//! The subjects of a case run interleaved in one process, so that a ratio between them holds on a machine whose speed
//! drifts; each figure is a median with its minimum and maximum. A figure that comes out of a model says so.
//!
//! Baselines are written afresh from public descriptions; no kernel source is copied.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

pub mod baseline;
pub mod harness;
pub mod plot;
pub mod published;
pub mod record;
pub mod suite;
pub mod targets;

pub use harness::{COUNTS_RMW, Harness, Options, Turn};
pub use record::{Metric, Record, Table};
pub use suite::{BenchError, SUITES, Suite};
