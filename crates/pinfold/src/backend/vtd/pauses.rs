//! Wake-ups after a pause, for tasks that wait for a flush of the unit: its interrupt stays the
//! kernel's.

use crate::sys::process::Signals;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

/// The pause before a task looks again. A flush takes about a microsecond, and a sleep fifty more
/// than was asked for; a unit that never answers costs a tenth of a processor until the deadline.
const PAUSE: Duration = Duration::from_micros(50);

/// One thread, from the first task that waits on. Dropping it ends the thread.
#[derive(Debug, Default)]
pub(super) struct Pauses(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    tasks: Mutex<Tasks>,
    added: Condvar,
}

#[derive(Debug, Default)]
struct Tasks {
    waiting: Vec<Waker>,
    /// The process that the thread belongs to; 0 for none. A child of `fork` has no copy of it.
    thread_of: u32,
    stopped: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut tasks = self.lock();
        while !tasks.stopped {
            if tasks.waiting.is_empty() {
                tasks = self.added.wait(tasks).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            // Without the lock: a task may run where it is woken, and wait again.
            drop(tasks);
            std::thread::sleep(PAUSE);
            let due = std::mem::take(&mut self.lock().waiting);
            for waker in due {
                // A waker that panics keeps no other task waiting.
                let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
            }
            tasks = self.lock();
        }
    }
}

impl Pauses {
    /// Wakes `waker` after a pause; at once if no thread can be started.
    pub(super) fn wake_later(&self, waker: &Waker) {
        let mut tasks = self.0.lock();
        let process = std::process::id();
        if tasks.thread_of != process {
            // Those of the parent process are not woken here, and nothing of theirs is dropped.
            std::mem::forget(std::mem::take(&mut tasks.waiting));
            let shared = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().name("pinfold-flushes".into());
            let started = Signals::blocked_while(|| thread.spawn(move || shared.run())).is_ok();
            tasks.thread_of = if started { process } else { 0 };
        }
        if tasks.thread_of == 0 {
            drop(tasks);
            return waker.wake_by_ref();
        }
        if !tasks.waiting.iter().any(|waiting| waiting.will_wake(waker)) {
            tasks.waiting.push(waker.clone());
        }
        drop(tasks);
        self.0.added.notify_one();
    }
}

impl Drop for Pauses {
    /// Does not join the thread: the drop may run in it, by a task that it wakes.
    fn drop(&mut self) {
        self.0.lock().stopped = true;
        self.0.added.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Sender, channel};
    use std::task::Wake;
    use std::time::Instant;

    struct Sends(Sender<Instant>);

    impl Wake for Sends {
        fn wake(self: Arc<Self>) {
            let _ = self.0.send(Instant::now());
        }
    }

    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("as planned");
        }
    }

    #[test]
    fn a_task_is_woken_once_and_not_before_the_pause() {
        let (pauses, (sender, woken)) = (Pauses::default(), channel());
        let waker = Waker::from(Arc::new(Sends(sender)));
        for _ in 0..3 {
            let asked = Instant::now();
            pauses.wake_later(&Waker::from(Arc::new(Panics)));
            pauses.wake_later(&waker);
            pauses.wake_later(&waker);
            assert!(woken.recv().unwrap() - asked >= PAUSE);
        }
        drop(pauses);
        drop(waker);
        let more = woken.iter().count();
        assert!(more <= 3, "a second wake-up only where the first was over: {more}");
    }
}
