//! The source that wakes tasks which wait for a flush: one thread for a queue, from the first task
//! that waits on.

use crate::thread::with_signals_blocked;
use crate::unit::Unit;
use pinfold_core::invalidate::{InvalidationQueue, Ticket};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

/// How long the thread sleeps at most where no event is known: another thread may be submitting the
/// batch that is waited for.
const LONGEST_NS: u64 = 1_000_000;
/// And at least: another thread may be executing what is due.
const SHORTEST_NS: u64 = 1_000;

/// Wakes tasks when their flush has completed. Dropping it ends its thread.
#[derive(Debug, Default)]
pub(super) struct Timer(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    tasks: Mutex<Tasks>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Tasks {
    waiting: Vec<Task>,
    has_thread: bool,
    stopped: bool,
}

/// A task that is woken when `ticket` has completed, or at `deadline_ns`.
#[derive(Debug)]
struct Task {
    ticket: Ticket,
    deadline_ns: u64,
    waker: Waker,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Timer {
    /// Wakes `waker` as [`InvalidationQueue::wake`] says for the queues of `unit`.
    pub(super) fn wake(
        &self,
        unit: &Arc<Unit>,
        ticket: Option<Ticket>,
        deadline_ns: u64,
        waker: &Waker,
    ) {
        // The queue may accept more after the next event.
        let next_ns = || unit.next_ns().min(unit.now_ns().saturating_add(LONGEST_NS));
        let deadline_ns = if ticket.is_some() { deadline_ns } else { deadline_ns.min(next_ns()) };
        let ticket = ticket.unwrap_or(Ticket::NEVER);
        let mut tasks = self.0.lock();
        let same = |task: &&mut Task| task.ticket == ticket && task.waker.will_wake(waker);
        match tasks.waiting.iter_mut().find(same) {
            Some(task) => task.deadline_ns = deadline_ns,
            None => tasks.waiting.push(Task { ticket, deadline_ns, waker: waker.clone() }),
        }
        if !tasks.has_thread {
            let (shared, unit) = (Arc::clone(&self.0), Arc::clone(unit));
            let thread = std::thread::Builder::new().name("pinfold-flushes".into());
            tasks.has_thread =
                with_signals_blocked(|| thread.spawn(move || shared.run(&unit))).is_ok();
        }
        if !tasks.has_thread {
            // The task polls instead.
            tasks.waiting.clear();
            drop(tasks);
            return waker.wake_by_ref();
        }
        drop(tasks);
        self.0.changed.notify_one();
    }

    /// Has the thread look for what is due, because the unit has failed.
    pub(super) fn look_again(&self) {
        // With the lock, so that the thread sleeps already or has not looked yet.
        drop(self.0.lock());
        self.0.changed.notify_one();
    }
}

impl Drop for Timer {
    /// Does not join the thread: the drop may run in it, by a task that it wakes.
    fn drop(&mut self) {
        self.0.lock().stopped = true;
        self.0.changed.notify_one();
    }
}

impl Shared {
    fn run(&self, unit: &Arc<Unit>) {
        let queues = unit.queues(|_, queue| queue);
        let mut tasks = self.lock();
        while !tasks.stopped {
            if tasks.waiting.is_empty() {
                tasks = self.changed.wait(tasks).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            // Executes what is due.
            let (completed, now_ns) = (queues.completed(), unit.now_ns());
            let ended = queues.has_aborted() || queues.has_failed();
            let is_due =
                |task: &mut Task| ended || task.ticket <= completed || task.deadline_ns <= now_ns;
            let due: Vec<Task> = tasks.waiting.extract_if(.., is_due).collect();
            if due.is_empty() {
                let deadlines = tasks.waiting.iter().map(|task| task.deadline_ns);
                let next_ns = deadlines.min().unwrap_or(u64::MAX).min(match unit.next_ns() {
                    u64::MAX => now_ns.saturating_add(LONGEST_NS),
                    next_ns => next_ns,
                });
                let sleep_ns = next_ns.saturating_sub(now_ns).max(SHORTEST_NS);
                let slept = self.changed.wait_timeout(tasks, Duration::from_nanos(sleep_ns));
                tasks = slept.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            // Without the lock: a task may run where it is woken, and wait again.
            drop(tasks);
            for task in due {
                // A waker that panics keeps no other task waiting.
                let _ = catch_unwind(AssertUnwindSafe(|| task.waker.wake()));
            }
            tasks = self.lock();
        }
    }
}
