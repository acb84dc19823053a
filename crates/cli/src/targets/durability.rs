//! [`Durability`]: whether what was written to a file can still become durable.

use rustix::io::Errno;
use std::sync::{Arc, Mutex, PoisonError};

/// What all queues of a file know of its flushes.
///
/// The kernel reports that data could not be written back once for each open file (`errseq_t`), to whichever thread flushes next,
/// and all queues share one. From then on no flush of this run may succeed: another queue's data may be what was lost.
///
/// The lock is held during a flush. Otherwise one that runs beside the failing one could succeed before the failure is known.
#[derive(Clone, Debug, Default)]
pub(crate) struct Durability(Arc<Mutex<Option<Errno>>>);

impl Durability {
    /// Flushes, unless an earlier flush has failed.
    ///
    /// # Errors
    /// The error of the first flush that failed.
    pub(crate) fn flush(&self, flush: impl FnOnce() -> rustix::io::Result<()>) -> rustix::io::Result<()> {
        let mut failed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(errno) = *failed {
            return Err(errno);
        }
        flush().inspect_err(|errno| *failed = Some(*errno))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_failed_flush_none_of_any_queue_succeeds() {
        let (one, other) = (Durability::default(), Durability::default());
        let same = one.clone();
        assert_eq!((one.flush(|| Ok(())), same.flush(|| Ok(()))), (Ok(()), Ok(())));
        assert_eq!(one.flush(|| Err(Errno::IO)), Err(Errno::IO));
        assert_eq!(
            (same.flush(|| Ok(())), one.flush(|| Err(Errno::NOSPC))),
            (Err(Errno::IO), Err(Errno::IO))
        );
        assert_eq!(other.flush(|| Ok(())), Ok(()), "another file");
    }
}
