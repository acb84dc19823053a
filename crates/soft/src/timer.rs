//! The thread that wakes tasks which wait for a flush: one for each queue, started by the first
//! task that waits for it.
//!
//! It sleeps until the next event of the timeline or the first deadline, or without a limit if
//! there is none: a submission that brings an earlier event ends its sleep
//! ([`Timer::note_submission`]).

use crate::thread::with_signals_blocked;
use crate::unit::Unit;
use pinfold_core::invalidate::{InvalidationQueue, Ticket};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

/// The shortest sleep of the thread: another thread may be executing the entries that are due.
const SHORTEST_NS: u64 = 1_000;

/// The pause before it wakes tasks for another abort of a unit that completes nothing in between:
/// requests that they submit again may be aborted again, for ever.
const ABORTED: Duration = Duration::from_millis(1);
/// The aborts for which it does not pause.
const FEW_ABORTS: u32 = 16;

/// Wakes tasks when their flush has completed. Dropping it ends its thread.
#[derive(Debug, Default)]
pub(super) struct Timer(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    tasks: Mutex<Tasks>,
    changed: Condvar,
    /// The time of the thread's next check for due events; 0 while nothing waits, so that no
    /// submission wakes it.
    looks_ns: AtomicU64,
}

/// The identity of a task: the ticket that it waits for, and the two addresses of its waker, by
/// which [`Waker::will_wake`] compares. Without a ticket it waits until the queue accepts more.
type Key = (Option<Ticket>, usize, usize);

#[derive(Debug, Default)]
struct Tasks {
    waiting: BTreeMap<Key, Task>,
    /// The deadlines of those that have one.
    deadlines: BTreeSet<(u64, Key)>,
    /// The queue's progress when the first task without a ticket came.
    seen: Accepted,
    /// The process that the thread is one of; 0 for none. A child of `fork` has no copy of it.
    thread_of: u32,
    stopped: bool,
}

#[derive(Debug)]
struct Task {
    deadline_ns: u64,
    waker: Waker,
}

/// The progress of a queue: the last completed ticket, and the number of descriptors that it
/// accepts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Accepted(Ticket, usize);

impl Accepted {
    fn by(queue: &impl InvalidationQueue) -> Self {
        Self(queue.completed(), queue.accepts())
    }

    fn is_more_than(self, before: Self) -> bool {
        self.0 > before.0 || self.1 > before.1
    }
}

impl Tasks {
    fn key(ticket: Option<Ticket>, waker: &Waker) -> Key {
        (ticket, waker.data().addr(), std::ptr::from_ref(waker.vtable()).addr())
    }

    fn has_unsubmitted(&self) -> bool {
        self.waiting.first_key_value().is_some_and(|((ticket, ..), _)| ticket.is_none())
    }

    /// Adds a task, or gives the one that is there the new deadline. O(log tasks).
    fn add(&mut self, ticket: Option<Ticket>, deadline_ns: u64, waker: &Waker) {
        let key = Self::key(ticket, waker);
        let task = Task { deadline_ns, waker: waker.clone() };
        if let Some(before) = self.waiting.insert(key, task) {
            self.deadlines.remove(&(before.deadline_ns, key));
        }
        if deadline_ns < u64::MAX {
            self.deadlines.insert((deadline_ns, key));
        }
    }

    fn remove(&mut self, key: Key, due: &mut Vec<Waker>) {
        if let Some(task) = self.waiting.remove(&key) {
            self.deadlines.remove(&(task.deadline_ns, key));
            due.push(task.waker);
        }
    }

    /// Removes the tasks that wait for a ticket up to `completed`, those without one if the queue
    /// accepts more, and those whose deadline has passed. O(log tasks) for each, and for none.
    fn take_due(&mut self, now: Accepted, now_ns: u64) -> Vec<Waker> {
        let mut due = Vec::new();
        let accepts_more = now.is_more_than(self.seen);
        let first = if accepts_more { (None, 0, 0) } else { (Some(Ticket(0)), 0, 0) };
        while let Some((&key, _)) = self.waiting.range(first..).next()
            && key.0.is_none_or(|ticket| ticket <= now.0)
        {
            self.remove(key, &mut due);
        }
        while let Some(&(deadline_ns, key)) = self.deadlines.first()
            && deadline_ns <= now_ns
        {
            self.remove(key, &mut due);
        }
        due
    }

    fn take_all(&mut self) -> Vec<Waker> {
        self.deadlines.clear();
        std::mem::take(&mut self.waiting).into_values().map(|task| task.waker).collect()
    }
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
        // Before the lock: later completions wake it.
        let seen = ticket.is_none().then(|| Accepted::by(&unit.queues(|_, queue| queue)));
        let mut tasks = self.0.lock();
        let process = std::process::id();
        if tasks.thread_of != process {
            // Those of the parent process are not woken here, and nothing of theirs is dropped.
            std::mem::forget(std::mem::take(&mut tasks.waiting));
            tasks.deadlines.clear();
        }
        if let Some(seen) = seen.filter(|_| !tasks.has_unsubmitted()) {
            tasks.seen = seen;
        }
        tasks.add(ticket, deadline_ns, waker);
        if tasks.thread_of != process {
            let (shared, unit) = (Arc::clone(&self.0), Arc::clone(unit));
            let thread = std::thread::Builder::new().name("pinfold-flushes".into());
            let started = with_signals_blocked(|| thread.spawn(move || shared.run(&unit))).is_ok();
            tasks.thread_of = if started { process } else { 0 };
        }
        if tasks.thread_of == 0 {
            // The task polls instead.
            let all = tasks.take_all();
            drop(tasks);
            return all.into_iter().for_each(Waker::wake);
        }
        drop(tasks);
        self.0.changed.notify_one();
    }

    /// Wakes the thread if the submission that has just ended brings an event earlier than its next
    /// check: one that completes a ticket of waiting tasks, or lets the queue accept requests that
    /// they gather.
    #[inline]
    pub(super) fn note_submission(&self, unit: &Unit) {
        let looks_ns = self.0.looks_ns.load(Ordering::Relaxed);
        if looks_ns != 0 && unit.next_ns() < looks_ns {
            self.look_again();
        }
    }

    /// Makes the thread check for entries that are due.
    #[cold]
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
    fn run(&self, unit: &Unit) {
        let queues = unit.queues(|_, queue| queue);
        let (mut aborts, mut before) = (0u32, Ticket(0));
        let mut tasks = self.lock();
        while !tasks.stopped {
            if tasks.waiting.is_empty() {
                self.looks_ns.store(0, Ordering::Relaxed);
                tasks = self.changed.wait(tasks).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            // From here on a submission that this does not see ends the sleep: it takes the lock of
            // its unit after `see_submissions`, and reads `looks_ns` behind that.
            self.looks_ns.store(u64::MAX, Ordering::Relaxed);
            unit.see_submissions();
            // Before the check for completions: another thread may execute due events between the
            // two, and the check that finds them after all is the one at this time.
            let event_ns = unit.next_ns();
            // Executes due events.
            let (accepted, now_ns) = (Accepted::by(&queues), unit.now_ns());
            let aborted = queues.has_aborted();
            if accepted.0 > before {
                (aborts, before) = (0, accepted.0);
            }
            aborts = aborts.saturating_add(aborted.into());
            let due = if aborted || queues.has_failed() {
                tasks.take_all()
            } else {
                tasks.take_due(accepted, now_ns)
            };
            if due.is_empty() {
                tasks = self.sleep(tasks, event_ns, now_ns);
                continue;
            }
            // Without the lock: a task may run where it is woken, and wait again.
            drop(tasks);
            if aborted && aborts > FEW_ABORTS {
                std::thread::sleep(ABORTED);
            }
            for waker in due {
                // A waker that panics keeps no other task waiting.
                let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
            }
            tasks = self.lock();
        }
    }

    /// Sleeps until the next event at `event_ns`, the first deadline, or a call.
    fn sleep<'t>(
        &self,
        tasks: MutexGuard<'t, Tasks>,
        event_ns: u64,
        now_ns: u64,
    ) -> MutexGuard<'t, Tasks> {
        let deadline_ns = tasks.deadlines.first().map_or(u64::MAX, |(deadline_ns, _)| *deadline_ns);
        let next_ns = event_ns.min(deadline_ns);
        if next_ns == u64::MAX {
            return self.changed.wait(tasks).unwrap_or_else(PoisonError::into_inner);
        }
        self.looks_ns.store(next_ns, Ordering::Relaxed);
        let sleep_ns = next_ns.saturating_sub(now_ns).max(SHORTEST_NS);
        let slept = self.changed.wait_timeout(tasks, Duration::from_nanos(sleep_ns));
        slept.unwrap_or_else(PoisonError::into_inner).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Wake;

    struct Named(&'static str, Mutex<Vec<&'static str>>);

    impl Wake for Named {
        fn wake(self: Arc<Self>) {
            self.1.lock().unwrap().push(self.0);
        }
    }

    fn waker() -> Waker {
        Waker::from(Arc::new(Named("", Mutex::default())))
    }

    /// Returns how many are due.
    fn due(tasks: &mut Tasks, completed: u64, accepts: usize, now_ns: u64) -> usize {
        tasks.take_due(Accepted(Ticket(completed), accepts), now_ns).len()
    }

    #[test]
    fn a_task_is_due_by_its_ticket_or_its_deadline() {
        let mut tasks = Tasks::default();
        let (one, other) = (waker(), waker());
        for (ticket, deadline_ns) in [(3, 100), (4, 200), (5, u64::MAX)] {
            tasks.add(Some(Ticket(ticket)), deadline_ns, &one);
        }
        tasks.add(Some(Ticket(4)), u64::MAX, &other);
        assert_eq!(due(&mut tasks, 2, 0, 99), 0);
        assert_eq!(due(&mut tasks, 3, 0, 99), 1, "by its ticket");
        assert_eq!(due(&mut tasks, 3, 0, 199), 0, "its deadline went with it");
        assert_eq!(due(&mut tasks, 3, 0, 200), 1, "by its deadline");
        assert_eq!(due(&mut tasks, 3, 0, u64::MAX - 1), 0, "without one, never");
        assert_eq!(due(&mut tasks, 5, 0, 200), 2);
        assert!(tasks.waiting.is_empty() && tasks.deadlines.is_empty());
    }

    /// A task that is polled again waits once, with the later deadline.
    #[test]
    fn a_task_that_waits_again_has_its_new_deadline() {
        let mut tasks = Tasks::default();
        let waker = waker();
        tasks.add(Some(Ticket(1)), 100, &waker);
        tasks.add(Some(Ticket(1)), 200, &waker);
        assert_eq!((tasks.waiting.len(), tasks.deadlines.len()), (1, 1));
        assert_eq!(due(&mut tasks, 0, 0, 150), 0);
        tasks.add(Some(Ticket(1)), u64::MAX, &waker);
        assert_eq!((due(&mut tasks, 0, 0, 1000), tasks.waiting.len()), (0, 1));
        tasks.add(Some(Ticket(1)), 50, &waker);
        assert_eq!(tasks.take_all().len(), 1);
        assert!(tasks.deadlines.is_empty());
    }

    /// Without a ticket a task waits until the queue completes or accepts more than before.
    #[test]
    fn a_task_without_a_ticket_is_due_when_the_queue_accepts_more() {
        for (completed, accepts) in [(8, 2), (7, 3)] {
            let mut tasks = Tasks { seen: Accepted(Ticket(7), 2), ..Tasks::default() };
            let (one, other) = (waker(), waker());
            tasks.add(None, u64::MAX, &one);
            tasks.add(Some(Ticket(9)), u64::MAX, &other);
            assert!(tasks.has_unsubmitted());
            assert_eq!(due(&mut tasks, 7, 2, 0), 0);
            assert_eq!(due(&mut tasks, 7, 1, 0), 0);
            assert_eq!(due(&mut tasks, completed, accepts, 0), 1);
            assert!(!tasks.has_unsubmitted());
        }
    }
}
