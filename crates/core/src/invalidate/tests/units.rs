//! Several units behind one queue.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Mutex;

fn two(first: Hand, second: Hand) -> Invalidator<FanOut<Hand>> {
    Invalidator::new(FanOut::new(first, [second]))
}

fn sent(hand: &Hand) -> Vec<(Ticket, Vec<Descriptor>)> {
    hand.batches.lock().unwrap().clone()
}

#[test]
fn a_batch_is_complete_when_every_unit_has_completed_it_in_whatever_order() {
    let inv = two(Hand { depth: 2, ..Hand::default() }, Hand { depth: 3, ..Hand::default() });
    let (one, other) = (inv.queue().first(), inv.queue().queues().nth(1).unwrap());
    let first = inv.request([flush(1, 1)]);
    inv.submit();
    let second = inv.request([flush(3, 1)]);
    inv.submit();
    other.completed.store(2, Ordering::SeqCst);
    assert!(!inv.is_completed(first));
    one.completed.store(1, Ordering::SeqCst);
    assert!(inv.is_completed(first) && !inv.is_completed(second));
    one.completed.store(2, Ordering::SeqCst);
    assert!(inv.is_completed(second));
    assert_eq!(sent(one), sent(other));
    assert_eq!(sent(one), [(first, blocks([(1, 0)])), (second, blocks([(3, 0)]))]);
}

/// The unit that accepted what the other one refused does not get its wait again.
#[test]
fn what_one_unit_refused_is_submitted_again() {
    let inv = two(Hand::default(), Hand { full: true.into(), ..Hand::default() });
    let (one, other) = (inv.queue().first(), inv.queue().queues().nth(1).unwrap());
    let ticket = inv.request([flush(1, 1)]);
    inv.submit();
    one.completed.store(ticket.0, Ordering::SeqCst);
    assert!(!inv.is_completed(ticket));
    assert_eq!((sent(one).len(), sent(other).len()), (1, 0));
    other.full.store(false, Ordering::SeqCst);
    assert!(!inv.is_completed(ticket));
    assert_eq!(sent(one), [(ticket, blocks([(1, 0)]))]);
    assert_eq!(sent(other), sent(one));
    other.completed.store(ticket.0, Ordering::SeqCst);
    assert!(inv.is_completed(ticket));
}

#[test]
fn units_cache_while_one_of_them_does() {
    for (one, other) in [(false, false), (false, true), (true, false), (true, true)] {
        let hand = |disabled| Hand { disabled, ..Hand::default() };
        assert_eq!(two(hand(one), hand(other)).queue().caches(), !(one && other));
    }
}

/// Only the unit that aborted begins again, with a flush of the domain.
#[test]
fn an_abort_of_one_unit_is_recovered_there() {
    let inv = two(Hand::default(), Hand::default());
    let (one, other) = (inv.queue().first(), inv.queue().queues().nth(1).unwrap());
    let ticket = inv.request([flush(1, 1)]);
    inv.submit();
    other.aborted.store(true, Ordering::SeqCst);
    one.completed.store(ticket.0, Ordering::SeqCst);
    assert!(!inv.is_completed(ticket));
    assert_eq!((sent(one).len(), sent(other).last()), (1, Some(&(ticket, vec![ALL]))));
    other.completed.store(ticket.0, Ordering::SeqCst);
    assert!(inv.is_completed(ticket));
    assert_eq!(inv.stats().resubmitted, 1);
}

/// Several units accept only as much as each of them accepts, whichever comes first.
#[test]
fn units_that_differ_are_used_within_the_limits_of_all() {
    struct Unlike(WaitLimit, u64, u32, usize, bool, bool);
    impl InvalidationQueue for Unlike {
        fn submit(&self, _: &[Descriptor], _: Option<Ticket>) -> Result<(), QueueError> {
            Ok(())
        }
        fn accepts(&self) -> usize {
            self.3
        }
        fn completed(&self) -> Ticket {
            Ticket(0)
        }
        fn limit(&self) -> WaitLimit {
            self.0
        }
        fn queue_depth(&self) -> u64 {
            self.1
        }
        fn max_order(&self) -> u32 {
            self.2
        }
        fn has_device_tlbs(&self) -> bool {
            self.4
        }
        fn caches_not_present(&self) -> bool {
            self.5
        }
    }
    let (long, many) = (WaitLimit { time_ns: 70, polls: 5 }, WaitLimit { time_ns: 7, polls: 50 });
    let one = || Unlike(long, 4, 9, 100, true, false);
    let other = || Unlike(many, 2, 18, 33, false, true);
    for queue in [FanOut::new(one(), [other()]), FanOut::new(other(), [one()])] {
        assert_eq!(queue.limit(), WaitLimit { time_ns: 70, polls: 50 });
        assert_eq!((queue.queue_depth(), queue.max_order(), queue.accepts()), (2, 9, 33));
        assert!(queue.has_device_tlbs() && queue.caches_not_present());
    }
    let alone = FanOut::new(one(), []);
    assert_eq!((alone.limit(), alone.queue_depth(), alone.max_order()), (long, 4, 9));
    assert!(alone.has_device_tlbs() && !alone.caches_not_present());
}

/// The flush after a restart is refused, and no request follows: polls alone repeat it.
#[test]
fn a_restart_that_a_unit_refuses_is_repeated_by_a_poll() {
    assert_eq!(play(&[Step::Request(0), Step::Refuse(1), Step::Abort(1)], [4, 4, 4]), None);
}

/// Threads submit in turns to units of which one aborts once, and the other aborts once and refuses
/// every third submission.
#[test]
fn stress_every_unit_has_flushed_what_completed() {
    let first = Snapshot::<4>::with(usize::MAX, Some(500));
    let second = Snapshot::with(2, Some(1_501)).refusing_every(3);
    let inv = Invalidator::new(FanOut::new(first, [second]));
    crate::testing::scope(|scope| {
        for page in 0..4 {
            let inv = &inv;
            scope.spawn(move || {
                for round in 1..=3_000 {
                    for unit in inv.queue().queues() {
                        unit.cleared[page].store(round, Ordering::Relaxed);
                    }
                    inv.wait(inv.request([flush(page as u64, 1)])).unwrap();
                    for unit in inv.queue().queues() {
                        assert!(unit.flushed[page].load(Ordering::Relaxed) >= round);
                    }
                }
            });
        }
    });
    let stats = inv.stats();
    assert_eq!(stats.requested, 12_000);
    // Whether a wait was in flight then, and was submitted again, depends on the threads.
    assert!(inv.queue().queues().all(|unit| unit.has_recovered()), "{stats}");
}

/// Whichever unit dies, and whether it says so when it refuses or while it is waited for.
#[test]
fn a_dead_unit_ends_all_waits_at_once() {
    let refuses = || Hand { gone: true.into(), ..Hand::default() };
    let dies = || Hand { fails_after: Some(0), ..Hand::default() };
    for inv in [
        two(refuses(), Hand::default()),
        two(Hand::default(), refuses()),
        two(Hand::default(), dies()),
    ] {
        let ticket = inv.request([flush(1, 1)]);
        inv.submit();
        inv.queue().first().completed.store(ticket.0, Ordering::SeqCst);
        for ticket in [ticket, inv.request([flush(3, 1)])] {
            let error = inv.wait(ticket).unwrap_err();
            assert!(matches!(error, WaitError::UnitFailed { .. }), "{error}");
        }
        assert_eq!(inv.queue().first().relaxed.load(Ordering::SeqCst), 0, "nothing was waited for");
    }
}

/// A unit that carries out what it was given when it is told to, and has cached every page that is
/// ever requested.
#[derive(Default)]
struct Scripted {
    entries: usize,
    /// Whether it leaves out the flushes.
    flushes_nothing: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Result<Descriptor, Ticket>>,
    /// Pages that it has cached, with the ticket under which they were requested.
    stale: BTreeSet<(u64, u64)>,
    completed: u64,
    refuses: bool,
    aborted: bool,
}

impl State {
    fn run(&mut self, steps: usize) {
        for step in self.queue.drain(..steps.min(self.queue.len())) {
            match step {
                Ok(Descriptor::Iotlb { scope, .. }) => {
                    let hit = |page: u64| {
                        scope.range().is_none_or(|range| range.contains(Iova::new(page << 12)))
                    };
                    self.stale.retain(|(page, _)| !hit(*page));
                }
                Ok(_) => {}
                Err(ticket) => {
                    assert!(ticket.0 > self.completed, "{ticket:?} after {}", self.completed);
                    self.completed = ticket.0;
                }
            }
        }
    }
}

impl InvalidationQueue for Scripted {
    fn submit(&self, descriptors: &[Descriptor], wait: Option<Ticket>) -> Result<(), QueueError> {
        let mut state = self.state.lock().unwrap();
        if std::mem::take(&mut state.refuses) || state.aborted {
            return Err(QueueError::Full);
        }
        let descriptors = if self.flushes_nothing { &[] } else { descriptors };
        state.queue.extend(descriptors.iter().copied().map(Ok).chain(wait.map(Err)));
        assert!(state.queue.len() <= self.entries, "more than it accepts");
        Ok(())
    }
    fn accepts(&self) -> usize {
        self.entries - self.state.lock().unwrap().queue.len()
    }
    fn completed(&self) -> Ticket {
        Ticket(self.state.lock().unwrap().completed)
    }
    fn costs(&self) -> FlushCosts {
        FlushCosts::EXACT
    }
    fn queue_depth(&self) -> u64 {
        3
    }
    fn has_aborted(&self) -> bool {
        self.state.lock().unwrap().aborted
    }
    fn restart(&self) {
        self.state.lock().unwrap().aborted = false;
    }
    fn limit(&self) -> WaitLimit {
        WaitLimit { time_ns: u64::MAX, polls: u64::MAX }
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Request(u64),
    Submit,
    Run(usize, usize),
    Refuse(usize),
    Abort(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0u64..40).prop_map(Step::Request),
        2 => Just(Step::Submit),
        4 => (0usize..3, 1usize..5).prop_map(|(unit, steps)| Step::Run(unit, steps)),
        1 => (0usize..3).prop_map(Step::Refuse),
        1 => (0usize..3).prop_map(Step::Abort),
    ];
    prop::collection::vec(step, 1..120)
}

/// Plays `steps`. Returns the first ticket that completed while a unit had cached what it covers.
fn play(steps: &[Step], entries: [usize; 3]) -> Option<Ticket> {
    play_on(steps, entries.map(|entries| Scripted { entries, ..Scripted::default() }))
}

fn play_on(steps: &[Step], units: [Scripted; 3]) -> Option<Ticket> {
    let [first, others @ ..] = units;
    let inv = Invalidator::new(FanOut::new(first, others));
    let all: Vec<&Scripted> = inv.queue().queues().collect();
    let (mut done, mut last) = (Ticket::default(), Ticket::default());
    // The end of the run: nothing refuses or aborts any more.
    let drain = (0..900).map(|n| Step::Run(n % 3, 3));
    for step in steps.iter().copied().chain(drain) {
        match step {
            Step::Request(page) => {
                // A request submits nothing, so it is early enough to cache the page behind it.
                last = inv.request([flush(page, 1)]);
                all.iter()
                    .for_each(|unit| unit.state.lock().unwrap().stale.extend([(page, last.0)]));
            }
            Step::Submit => inv.submit(),
            Step::Run(unit, steps) => all[unit].state.lock().unwrap().run(steps),
            Step::Refuse(unit) => all[unit].state.lock().unwrap().refuses = true,
            Step::Abort(unit) => {
                let mut state = all[unit].state.lock().unwrap();
                state.queue.clear();
                state.aborted = true;
            }
        }
        while done < last && inv.is_completed(Ticket(done.0 + 1)) {
            done = Ticket(done.0 + 1);
            let is_stale = |unit: &&Scripted| {
                unit.state.lock().unwrap().stale.iter().any(|(_, of)| *of == done.0)
            };
            if all.iter().any(is_stale) {
                return Some(done);
            }
        }
    }
    assert!(done == last, "{last:?} never completes");
    None
}

proptest! {
    /// Units with queues of different lengths, at different paces, of which each refuses and aborts
    /// when it likes.
    #[test]
    fn no_ticket_completes_while_a_unit_has_cached_what_it_covers(
        steps in steps(), entries in [2usize..9, 2usize..9, 2usize..9],
    ) {
        prop_assert_eq!(play(&steps, entries), None);
    }
}

#[test]
fn flushing_the_first_unit_alone_is_found() {
    let steps = [Step::Request(1), Step::Submit];
    assert_eq!(play(&steps, [4, 4, 4]), None);
    let unit = |flushes_nothing| Scripted { entries: 4, flushes_nothing, ..Scripted::default() };
    assert_eq!(play_on(&steps, [false, true, true].map(unit)), Some(Ticket(1)));
}
