//! Which processors the threads of a run have.

use crate::error::BenchError;
use rustix::process::setpriority_process;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Returns the processors that the program may use.
pub(super) fn processors() -> Result<Vec<usize>, BenchError> {
    let allowed = sched_getaffinity(None).map_err(|errno| BenchError::Processor(errno.into()))?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect())
}

/// Keeps the calling thread on a processor, before all others there: 256 packets wait between the
/// two ends at most, so sender and receiver must run at the same time.
pub(super) fn run_on(processor: usize) -> Result<(), BenchError> {
    let mut set = CpuSet::new();
    set.set(processor);
    sched_setaffinity(None, &set).map_err(|errno| BenchError::Processor(errno.into()))?;
    // Of the calling thread alone, on Linux. Without it the figures are only rougher.
    let _ = setpriority_process(None, -20);
    Ok(())
}
