//! The setup of a run, from the command line to open targets and the memory stack. Impossible
//! requests are rejected here.
//!
//! | module | contents |
//! | --- | --- |
//! | [`resolve`], [`staged`] | targets before they are opened; destinations and files created for a run |
//! | [`part`] | the part of a target that `io` uses |
//! | [`stack`] | the memory that a run needs, whether it is available, and the arenas in their domain |
//! | [`open`] | open targets: controllers, their drivers, a queue for each job, checks of `--bs` and `--iodepth` |

pub(crate) mod error;
pub(crate) mod open;
#[cfg(feature = "vtd")]
mod owned;
pub(crate) mod part;
pub(crate) mod resolve;
pub(crate) mod stack;
pub(crate) mod staged;
