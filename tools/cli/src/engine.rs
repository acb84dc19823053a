//! The engines that keep requests in flight: they move data between targets and their buffers and
//! gather statistics.
//!
//! | module | contents |
//! | --- | --- |
//! | [`worker`] | one target, its requests in flight, their statistics |
//! | [`pump`] | all bytes of one target to another, except holes |
//! | [`digest`] | the SHA-256 of what a target holds |
//! | [`workload`] | a workload on one target: requests in order or at random |
//! | [`jobs`] | a workload by several jobs, and the rates of each interval |
//! | [`verify`] | a workload that checks every byte it reads |

pub(crate) mod digest;
pub(crate) mod jobs;
pub(crate) mod pump;
pub(crate) mod verify;
pub(crate) mod worker;
pub(crate) mod workload;
