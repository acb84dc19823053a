//! Why a trace could not be read or replayed.

use crate::policy::PolicyError;
use pinfold_core::domain::BackendError;
use pinfold_core::table::TableError;
use std::io;

/// Why a trace could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file could not be read.
    #[error("cannot read the trace: {0}")]
    Read(#[source] io::Error),
    /// It is of another format.
    #[error("the trace is {found}: `{program} FILE | pinfold replay -` reads it")]
    Format {
        /// The content that was found.
        found: &'static str,
        /// The program that makes text of it.
        program: &'static str,
    },
    /// It has no line.
    #[error("the trace is empty: `pinfold replay --how` explains how to record one")]
    Empty,
    /// It maps nothing.
    #[error(
        "none of {lines} lines is an event of the DMA interface ({damaged} cannot be read, {iommu} are of the IOMMU \
         alone{}): `pinfold replay --how` explains how to record some",
        .first.as_ref().map(|first| format!("; the first bad one: {first}")).unwrap_or_default()
    )]
    NoEvents {
        /// The number of lines.
        lines: u64,
        /// The number of damaged lines.
        damaged: u64,
        /// The number of events of the IOMMU, which name no device.
        iommu: u64,
        /// The first damaged one.
        first: Option<String>,
    },
    /// It takes more memory than was allowed.
    #[error(
        "line {line}: {operations} maps and unmaps, of which {live} maps are live, take more than {} MiB; `--limit {}` reads \
         those before it, or raise --memory",
        .limit >> 20,
        .operations.saturating_sub(1)
    )]
    Memory {
        /// The line.
        line: u64,
        /// The number of maps and unmaps up to that line.
        operations: u64,
        /// The number of maps that have not been unmapped.
        live: u64,
        /// The limit in bytes.
        limit: u64,
    },
    /// The caller did not want more of it.
    #[error("reading was stopped")]
    Stopped,
    /// More devices than a machine has.
    #[error(
        "line {line}: the trace names more than {limit} devices; is it one of several machines?"
    )]
    TooManyDevices {
        /// The line.
        line: u64,
        /// The limit.
        limit: usize,
    },
}

/// Why a trace could not be replayed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// A policy failed.
    #[error("{policy}, {device}, operation {operation} of {operations}: {error}")]
    Policy {
        /// The policy.
        policy: &'static str,
        /// The device.
        device: String,
        /// The operation, counted from 1.
        operation: usize,
        /// The number of operations of the device.
        operations: usize,
        /// The error of the policy.
        error: PolicyError,
    },
    /// A policy could not be created, or its memory.
    #[error("cannot prepare the replay: {0}")]
    Prepare(#[source] PolicyError),
    /// The trace has no times.
    #[error(
        "the trace has no times in seconds, so it has no original timing: replay it with --timing fast"
    )]
    NoTimes,
    /// A thread could not be started.
    #[error("cannot start a thread for {device}: {}", pinfold::probe::threads::refusal(error))]
    NoThread {
        /// The device that it was for.
        device: String,
        /// The system's error.
        error: io::Error,
    },
    /// The caller did not want more of it.
    #[error("the replay was stopped")]
    Stopped,
    /// A thread ended early.
    #[error("the thread of a device ended before it had completed its work")]
    Thread,
}

impl ReplayError {
    /// Returns the policy, the device and the operation for which the I/O page table was too small,
    /// if that is the error.
    pub fn table_full(&self) -> Option<(&'static str, &str, usize)> {
        use BackendError::Table;
        let Self::Policy { policy, device, operation, error, .. } = self else { return None };
        let full = matches!(
            error,
            PolicyError::NoTablePages { .. }
                | PolicyError::Backend(Table(TableError::NoPages { .. }))
        );
        full.then_some((*policy, device, *operation))
    }
}
