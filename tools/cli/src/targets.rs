//! Targets: a file, or a namespace of a controller. A data buffer moves into a target with its
//! request and returns with the completion; in between nothing else can reach it.
//!
//! | module | contents |
//! | --- | --- |
//! | [`target`] | the [`Target`](target::Target) trait, requests and completions, the record of one I/O, errors |
//! | [`mod@file`], [`nvme`] | the two implementations |
//! | [`trimmer`] | the ranges of a file that are deallocated beside other requests |

pub(crate) mod file;
pub(crate) mod nvme;
pub(crate) mod target;
pub(crate) mod trimmer;

#[cfg(test)]
pub(crate) mod fake;
