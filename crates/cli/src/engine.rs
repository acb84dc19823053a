//! The engines that keep requests in flight: they move data between targets and their buffers and
//! gather statistics.
//!
//! | module | contents |
//! | --- | --- |
//! | [`worker`] | one target, its requests in flight, their statistics |
//! | [`pump`], [`ranges`] | all bytes of one target to another; which of them are data |
//! | [`digest`] | the SHA-256 of what a target holds |
//! | [`workload`], [`jobs`] | a workload in fio's terms, by one job and by several |
//! | [`samples`], [`distribution`] | the rates of each interval; which blocks random requests use |
//! | [`verify`], [`ledger`] | a workload that checks every byte it reads |

pub(crate) mod digest;
mod distribution;
pub(crate) mod error;
pub(crate) mod jobs;
pub(crate) mod ledger;
pub(crate) mod pump;
pub(crate) mod ranges;
pub(crate) mod samples;
pub(crate) mod verify;
pub(crate) mod worker;
pub(crate) mod workload;
