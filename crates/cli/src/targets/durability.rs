//! [`Durability`]: whether what was written to a file can still become durable; [`Flusher`]: a thread that makes it so.

use pinfold_nvme::EventFd;
use rustix::io::{Errno, retry_on_intr};
use std::fs::File;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};

/// What all queues of a file know of its flushes.
///
/// The kernel reports that data could not be written back once for each open file (`errseq_t`), to
/// whichever thread flushes next, and all queues share one. From then on no flush of this run may
/// succeed: another queue's data may be what was lost.
///
/// The lock is held during a flush. Otherwise one that runs beside the failing one could succeed
/// before the failure is known.
#[derive(Clone, Debug, Default)]
pub(crate) struct Durability(Arc<Mutex<Option<Errno>>>);

impl Durability {
    /// Flushes, unless an earlier flush has failed. One that a signal has interrupted is begun
    /// again.
    ///
    /// # Errors
    /// The error of the first flush that failed.
    pub(crate) fn flush(
        &self,
        flush: impl FnMut() -> rustix::io::Result<()>,
    ) -> rustix::io::Result<()> {
        let mut failed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(errno) = *failed {
            return Err(errno);
        }
        retry_on_intr(flush).inspect_err(|errno| *failed = Some(*errno))
    }
}

/// A thread that flushes a file beside the requests of an event loop. Requests for a flush that
/// arrive during one share the next.
#[derive(Debug)]
pub(crate) struct Flusher<R> {
    start: Sender<()>,
    results: Receiver<rustix::io::Result<()>>,
    /// Those that the present flush completes.
    running: Vec<R>,
    /// Those that came later: it may have begun before what they have to make durable was written.
    waiting: Vec<R>,
}

impl<R> Flusher<R> {
    /// Starts the thread; it signals `wake` after each flush, and ends when this is dropped.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn new(
        file: File,
        durability: Durability,
        wake: Arc<EventFd>,
    ) -> std::io::Result<Self> {
        let ((start, starts), (sender, results)) = (channel(), channel());
        std::thread::Builder::new().name("flush".into()).spawn(move || {
            for () in starts {
                if sender.send(durability.flush(|| rustix::fs::fdatasync(&file))).is_err() {
                    return;
                }
                wake.signal();
            }
        })?;
        Ok(Self { start, results, running: Vec::new(), waiting: Vec::new() })
    }

    /// Has `request` completed by a flush that begins after this.
    pub(crate) fn push(&mut self, request: R) {
        self.waiting.push(request);
        self.begin();
    }

    fn begin(&mut self) {
        if self.running.is_empty() && !self.waiting.is_empty() {
            std::mem::swap(&mut self.running, &mut self.waiting);
            // It fails if the thread has panicked; then no result arrives either.
            let _ = self.start.send(());
        }
    }

    /// Passes each request whose flush has ended to `each`, with the outcome; waits for one if
    /// `wait` is set.
    pub(crate) fn take(&mut self, wait: bool, mut each: impl FnMut(R, rustix::io::Result<()>)) {
        if self.running.is_empty() {
            return;
        }
        let result = match wait {
            true => self.results.recv().unwrap_or(Err(Errno::IO)),
            false => match self.results.try_recv() {
                Ok(result) => result,
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => Err(Errno::IO),
            },
        };
        self.running.drain(..).for_each(|request| each(request, result));
        self.begin();
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
        let mut interrupted = [Err(Errno::INTR), Err(Errno::INTR), Ok(())].into_iter();
        assert_eq!(
            one.flush(|| interrupted.next().unwrap()),
            Ok(()),
            "it is repeated, and poisons no other"
        );
        assert_eq!(one.flush(|| Err(Errno::IO)), Err(Errno::IO));
        assert_eq!(
            (same.flush(|| Ok(())), one.flush(|| Err(Errno::NOSPC))),
            (Err(Errno::IO), Err(Errno::IO))
        );
        assert_eq!(other.flush(|| Ok(())), Ok(()), "another file");
    }
}
