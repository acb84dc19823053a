//! The timer of lazy policies.

use super::api::PolicyError;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// How long an unmap waits at most for the flush of a lazy policy.
pub(super) const LAZY_FOR: Duration = Duration::from_millis(10);

/// Calls a function every [`LAZY_FOR`], on a thread of its own, until it is dropped.
#[derive(Debug)]
pub(super) struct Timer {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Timer {
    pub(super) fn start(mut tick: impl FnMut() + Send + 'static) -> Result<Self, PolicyError> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let seen = Arc::clone(&stop);
        let work = move || {
            let (flag, wake) = &*seen;
            let mut stopped = flag.lock().unwrap_or_else(PoisonError::into_inner);
            while !*stopped {
                let waited =
                    wake.wait_timeout(stopped, LAZY_FOR).unwrap_or_else(PoisonError::into_inner);
                stopped = waited.0;
                if waited.1.timed_out() && !*stopped {
                    tick();
                }
            }
        };
        let thread = Builder::new()
            .name("flush timer".to_owned())
            .spawn(work)
            .map_err(PolicyError::NoTimer)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let (flag, wake) = &*self.stop;
        *flag.lock().unwrap_or_else(PoisonError::into_inner) = true;
        wake.notify_one();
        if let Some(thread) = self.thread.take() {
            // Fails only if a tick panicked; the policy ends in any case.
            let _ = thread.join();
        }
    }
}
