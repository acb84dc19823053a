//! Head-to-head measurements: Pinfold beside what it replaces.
//!
//! The subjects of a case run interleaved in one process, so a ratio between them holds on a
//! machine whose speed drifts. Each figure is a median with its minimum and maximum; a figure that
//! comes from a model is marked.
//!
//! The baselines are written from public descriptions; no kernel source is copied.
//!
//! ```
//! use pinfold_bench::{Listing, Options, Suite};
//!
//! println!("{Listing}");
//! let suite = Suite::named("pool").ok_or("no such suite")?;
//! # if false {
//! for record in suite.run(Options { runs: 3, quick: true }, &|turn| eprintln!("{}", turn.subject))? {
//!     println!("{}", record.to_json());
//! }
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

pub mod baseline;
mod error;
pub mod harness;
pub mod plot;
pub mod policy;
pub mod published;
pub mod record;
pub mod replay;
pub mod suite;
pub mod targets;

pub use error::BenchError;
pub use harness::{COUNTS_RMW, Harness, Options, Turn};
pub use record::{Metric, Record, Table};
pub use suite::{Listing, SUITES, Suite};

/// Compiles and runs the code of the README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;
