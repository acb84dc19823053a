//! Targets: a file, or a namespace of a controller. A data buffer moves into a target with its
//! request and returns with the completion; in between nothing else can reach it.
//!
//! | module | contents |
//! | --- | --- |
//! | [`record`] | the record of one I/O |
//! | [`target`] | the [`Target`](target::Target) trait, requests and completions |
//! | [`mod@file`], [`nvme`] | the two implementations |

pub(crate) mod durability;
pub(crate) mod error;
pub(crate) mod file;
pub(crate) mod nvme;
pub(crate) mod record;
pub(crate) mod target;

#[cfg(test)]
pub(crate) mod fake;
