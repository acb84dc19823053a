//! Controllers that answer wrongly: random garbage in the completion queue, and one that replays,
//! reorders, misdirects and invents completions, across queues and resets. It ends exactly the
//! commands that it names by their queue and identifier, and nothing that the device writes is
//! trusted.

use crate::common::*;
use pinfold_core::mem::DmaMemory;
use pinfold_nvme::Registers;
use pinfold_nvme::driver::{
    CommandError, Completion, Config, Controller, Error, InFlight, Outcome,
};
use pinfold_nvme::spec::{Command, Cqe, admin, offset};
use pinfold_nvme_model::{CommandInfo, Fault, ModelConfig, ModelController, Trigger};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U16;

/// A completion as the controller may write it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Claim {
    sq_id: u16,
    cid: u16,
}

/// A queue, and the controller's side of it, which the test plays.
struct Liar {
    queue: TestQueue,
    arena: Arena,
    /// The frames of the rings: 64 submissions, 256 completions.
    sq: usize,
    cq: usize,
    submitted: usize,
    completed: usize,
    /// Requests that no true completion was written for, by their command.
    in_flight: Vec<(Claim, InFlight<Buffer>)>,
    /// The requests that may be returned.
    done: Vec<InFlight<Buffer>>,
}

impl Liar {
    fn new(bench: &Bench) -> Self {
        let before = bench.arena.0.in_use();
        let queue = bench.controller.create_queue(8).unwrap();
        let rings: Vec<_> =
            bench.arena.0.in_use().into_iter().filter(|frame| !before.contains(frame)).collect();
        // The lowest free frame is allocated first.
        let [sq, cq] = rings[..] else { panic!("{rings:?}") };
        let arena = bench.arena.clone();
        let (in_flight, done) = (Vec::new(), Vec::new());
        Self { queue, arena, sq, cq, submitted: 0, completed: 0, in_flight, done }
    }

    fn ring(&self, frame: usize) -> DmaMemory<'_> {
        self.arena.0.whole().part(frame * 4096, 4096).unwrap()
    }

    /// Submits a read, if the queue has room.
    fn submit(&mut self) {
        if self.queue.in_flight() == self.queue.depth() {
            return;
        }
        let buffer = Buffer::new(&self.arena, 4096);
        let in_flight = self.queue.read(1, 0, 8, buffer).unwrap();
        self.queue.ring_doorbell();
        let mut command = Command::default();
        let at = self.submitted % 64 * Command::BYTES;
        self.ring(self.sq).copy_to_slice(at, command.as_mut_bytes()).unwrap();
        self.submitted += 1;
        self.in_flight.push((Claim { sq_id: self.queue.id(), cid: command.cid.get() }, in_flight));
    }

    /// Writes a completion, true or not.
    fn write(&mut self, Claim { sq_id, cid }: Claim) {
        let phase = u16::from((self.completed / 256).is_multiple_of(2));
        let cqe = Cqe {
            sq_id: U16::new(sq_id),
            cid: U16::new(cid),
            status_phase: U16::new(phase),
            ..Cqe::default()
        };
        let at = self.completed % 256 * Cqe::BYTES;
        self.ring(self.cq).copy_from_slice(at, cqe.as_bytes()).unwrap();
        self.completed += 1;
        if let Some(found) =
            self.in_flight.iter().position(|(claim, _)| *claim == Claim { sq_id, cid })
        {
            self.done.push(self.in_flight.swap_remove(found).1);
        }
    }

    fn claims(&self) -> Vec<Claim> {
        self.in_flight.iter().map(|(claim, _)| *claim).collect()
    }

    /// Returns what the driver takes for completed.
    fn poll(&mut self) -> Vec<Completion> {
        std::iter::from_fn(|| self.queue.poll().unwrap()).collect()
    }
}

/// Returns a controller that completes no I/O command by itself, and the number of its "delete"
/// commands.
fn rig() -> (Bench, Arc<AtomicUsize>) {
    let config = Config { clock: Arc::new(TestClock::default()), queues: 255, ..Config::default() };
    let mut model = ModelConfig::new(namespaces(1 << 20));
    model.queues = 255;
    let bench = bench(1024, model, config);
    let deletes = Arc::new(AtomicUsize::new(0));
    let count = {
        let deletes = deletes.clone();
        move |seen: &CommandInfo| {
            let is_delete = matches!(seen.opcode, admin::DELETE_SQ | admin::DELETE_CQ);
            deletes.fetch_add(usize::from(seen.queue == 0 && is_delete), Ordering::SeqCst);
            false
        }
    };
    bench.model.faults().inject(Trigger::Matches(Box::new(count)), Fault::NeverComplete);
    let io = |seen: &CommandInfo| seen.queue != 0;
    bench.model.faults().inject(Trigger::Matches(Box::new(io)), Fault::Hold);
    (bench, deletes)
}

#[test]
fn an_old_completion_does_not_end_a_later_command() {
    let (bench, _) = rig();
    let mut liar = Liar::new(&bench);
    liar.submit();
    let first = liar.claims()[0];
    liar.write(first);
    assert_eq!(liar.poll().len(), 1);
    drop(std::mem::take(&mut liar.done));
    liar.submit();
    assert_eq!(liar.claims()[0].cid & 63, first.cid & 63, "the same slot");
    liar.write(first);
    assert_eq!((liar.poll().len(), liar.queue.stats().spurious_completions), (0, 1));
    let second = liar.claims()[0];
    liar.write(second);
    assert_eq!(liar.poll().len(), 1);
    bench.controller.reset().unwrap();
}

#[test]
fn a_completion_that_names_another_queue_ends_nothing() {
    let (bench, _) = rig();
    let (mut first, mut second) = (Liar::new(&bench), Liar::new(&bench));
    first.submit();
    second.submit();
    let Claim { sq_id, cid } = first.claims()[0];
    assert_eq!(second.claims()[0].cid, cid, "both are the first command of their queue");
    second.write(Claim { sq_id, cid });
    first.write(Claim { sq_id: second.queue.id(), cid });
    assert!(first.poll().is_empty() && second.poll().is_empty());
    assert_eq!(second.queue.stats().spurious_completions, 1);
    bench.controller.reset().unwrap();
    assert_eq!((first.poll().len(), second.poll().len()), (1, 1));
}

#[test]
fn another_queues_completion_releases_no_payload() {
    let (bench, _) = rig();
    let (mut first, mut second) = (Liar::new(&bench), Liar::new(&bench));
    first.submit();
    second.submit();
    first.write(first.claims()[0]);
    let completion = first.poll().pop().unwrap();
    let (_, other) = second.in_flight.pop().unwrap();
    assert_eq!(other.tag(), completion.tag(), "only the queue tells them apart");
    let Outcome::Foreign(other, completion) = other.finish(completion) else {
        panic!("the payload of a command in flight was released");
    };
    assert!(matches!(
        first.done.remove(0).finish(completion),
        Outcome::Completed { result: Ok(()), .. }
    ));

    // A queue that is created after a reset counts anew, too.
    bench.controller.reset().unwrap();
    let mut third = Liar::new(&bench);
    third.submit();
    let reset = second.poll().pop().unwrap();
    let (_, newer) = third.in_flight.pop().unwrap();
    let Outcome::Foreign(newer, reset) = newer.finish(reset) else {
        panic!("the payload of a command in flight was released by an earlier queue");
    };
    let Outcome::Completed { result, .. } = other.finish(reset) else { panic!() };
    assert_eq!(result, Err(CommandError::Reset));
    bench.controller.reset().unwrap();
    drop(newer);
}

#[test]
fn a_completion_kept_for_later_releases_no_later_payload() {
    let (bench, _) = rig();
    let mut liar = Liar::new(&bench);
    liar.submit();
    liar.write(liar.claims()[0]);
    let kept = liar.poll().pop().unwrap();
    liar.submit();
    let (_, later) = liar.in_flight.pop().unwrap();
    assert_eq!(later.tag(), kept.tag(), "the number is free since the completion was returned");
    let Outcome::Foreign(later, kept) = later.finish(kept) else {
        panic!("the payload of a command in flight was released");
    };
    assert!(matches!(liar.done.remove(0).finish(kept), Outcome::Completed { result: Ok(()), .. }));
    bench.controller.reset().unwrap();
    drop(later);
}

#[test]
fn an_admin_completion_that_names_another_queue_ends_nothing() {
    let config = Config {
        admin_timeout: Duration::from_secs(2),
        abort_timeout: Duration::ZERO,
        ..Config::default()
    };
    let bench = bench(64, ModelConfig::new(namespaces(1 << 20)), config);
    let seen_cid = Arc::new(AtomicUsize::new(usize::MAX));
    let identify = {
        let seen_cid = seen_cid.clone();
        move |seen: &CommandInfo| {
            let hit = seen.queue == 0 && seen.opcode == admin::IDENTIFY;
            if hit {
                seen_cid.store(seen.cid.into(), Ordering::SeqCst);
            }
            hit
        }
    };
    bench.model.faults().inject(Trigger::Matches(Box::new(identify)), Fault::NeverComplete);
    let ring = bench.model.registers().read64(offset::ACQ) - BASE;
    let ring = bench.arena.0.whole().part(usize::try_from(ring).unwrap(), 32 * Cqe::BYTES).unwrap();
    let before = bench.controller.stats().spurious_admin_completions;
    std::thread::scope(|scope| {
        let scan = scope.spawn(|| bench.controller.scan_namespaces());
        while seen_cid.load(Ordering::SeqCst) == usize::MAX {
            std::thread::yield_now();
        }
        let cid = u32::try_from(seen_cid.load(Ordering::SeqCst)).unwrap();
        // The ring has not wrapped: the next entry is the first without a phase.
        let next = (0..32).map(|entry| entry * Cqe::BYTES);
        let next = next
            .into_iter()
            .find(|at| ring.load_acquire_u32(at + 12).unwrap() >> 16 & 1 == 0)
            .unwrap();
        ring.store_release_u32(next + 8, 1 << 16).unwrap();
        ring.store_release_u32(next + 12, cid | 1 << 16).unwrap();
        let error = scan.join().unwrap().unwrap_err();
        assert_eq!(
            error,
            Error::AdminTimeout { what: "identify active namespaces", limit_ms: 2000 }
        );
    });
    assert_eq!(bench.controller.stats().spurious_admin_completions, before + 1);
}

#[test]
fn a_queue_dropped_after_a_reset_deletes_nothing() {
    let (bench, deletes) = rig();
    let before = bench.arena.0.used();
    let stale = Liar::new(&bench);
    bench.controller.reset().unwrap();
    let new = Liar::new(&bench);
    drop(stale);
    assert_eq!(
        (deletes.load(Ordering::SeqCst), bench.controller.stats().quarantined_queues),
        (0, 0)
    );
    assert_eq!(bench.arena.0.used(), before + 2, "its rings are released");
    drop(new);
    assert_eq!((deletes.load(Ordering::SeqCst), bench.arena.0.used()), (2, before));
}

/// The controller writes both entries of a ring again and again, in either phase.
#[test]
fn a_poll_reads_at_most_one_ring() {
    let mut model = ModelConfig::new(namespaces(1 << 20));
    model.mqes = 1;
    let bench = bench(64, model, Config::default());
    let before = bench.arena.0.in_use();
    let mut queue = bench.controller.create_queue(1).unwrap();
    let ring = bench.arena.0.in_use().into_iter().rfind(|frame| !before.contains(frame)).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let ring = bench.arena.0.whole().part(ring * 4096, 4096).unwrap();
            while !stop.load(Ordering::Relaxed) {
                for phase in [1 << 16, 0] {
                    for at in [12, 28] {
                        ring.store_release_u32(at, phase).unwrap();
                    }
                }
            }
        });
        let most = (0..2_000_000)
            .map(|_| {
                let before = queue.stats().spurious_completions;
                assert!(queue.poll().unwrap().is_none());
                queue.stats().spurious_completions - before
            })
            .max();
        stop.store(true, Ordering::Relaxed);
        assert!(most.is_some_and(|most| most <= 2), "{most:?} entries of a ring of 2 in one poll");
    });
}

/// The controller writes the next entries of the admin ring while the driver reads: as many as are
/// free, whenever it has read one.
#[test]
fn a_poll_reads_at_most_one_admin_ring() {
    let arena = Arena(Memory::new(64));
    let model =
        ModelController::spawn(arena.clone(), ModelConfig::new(namespaces(1 << 20))).unwrap();
    // To it the driver's doorbells are wrong. It would report that, in the place of an entry below.
    let events = Trigger::Matches(Box::new(|command| command.opcode == admin::ASYNC_EVENT));
    model.faults().inject(events, Fault::Hold);
    let controller =
        Controller::start(model.registers(), arena.clone(), Config::default()).unwrap();
    let ring = model.registers().read64(offset::ACQ) - BASE;
    let ring = arena.0.whole().part(usize::try_from(ring).unwrap(), 32 * Cqe::BYTES).unwrap();
    let spurious = || controller.stats().spurious_admin_completions;
    // The ring has not wrapped: the next entry is the first without a phase.
    let phase = |at: u64| ring.load_acquire_u32(at as usize * Cqe::BYTES + 12).unwrap() >> 16 & 1;
    let first = (0..32).find(|at| phase(*at) == 0).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut written = first;
            while !stop.load(Ordering::Relaxed) {
                while written < first + spurious() + 31 {
                    // No command has this identifier.
                    let entry = 0xffff | u32::from((written / 32).is_multiple_of(2)) << 16;
                    let at = (written % 32) as usize * Cqe::BYTES;
                    ring.store_release_u32(at + 12, entry).unwrap();
                    written += 1;
                }
            }
        });
        let mut most = 0;
        while spurious() < 20_000 {
            let before = spurious();
            assert!(controller.events().unwrap().is_empty());
            most = most.max(spurious() - before);
        }
        stop.store(true, Ordering::Relaxed);
        assert!(most <= 32, "{most} entries of a ring of 32 in a poll");
    });
}

#[derive(Clone, Debug)]
enum Op {
    Submit(usize),
    /// True, in any order.
    Complete(usize, prop::sample::Index),
    /// Any completion of before, of any queue.
    Replay(usize, prop::sample::Index),
    /// A command of another queue.
    Misdirect(usize, usize, prop::sample::Index),
    /// A command of this queue, in another one's name.
    Misname(usize, u16, prop::sample::Index),
    Invent(usize, u16, u16),
    Reset,
    DropStale,
}

fn op() -> impl Strategy<Value = Op> {
    let queue = || 0usize..2;
    let index = any::<prop::sample::Index>;
    prop_oneof![
        6 => queue().prop_map(Op::Submit),
        4 => (queue(), index()).prop_map(|(queue, pick)| Op::Complete(queue, pick)),
        3 => (queue(), index()).prop_map(|(queue, pick)| Op::Replay(queue, pick)),
        2 => (queue(), queue(), index()).prop_map(|(to, from, pick)| Op::Misdirect(to, from, pick)),
        2 => (queue(), 0u16..4, index()).prop_map(|(queue, name, pick)| Op::Misname(queue, name, pick)),
        2 => (queue(), 0u16..4, 0u16..1024).prop_map(|(queue, sq_id, cid)| Op::Invent(queue, sq_id, cid)),
        1 => Just(Op::Reset),
        1 => Just(Op::DropStale),
    ]
}

/// Finishes what a queue reports: exactly what was completed truly, and with `expected`.
fn settle(liar: &mut Liar, other: &mut Liar, expected: &Result<(), CommandError>) {
    for completion in liar.poll() {
        let tag = completion.tag();
        // The other queue's request with this number does not leave by it.
        let same = other.in_flight.iter().position(|(_, in_flight)| in_flight.tag() == tag);
        let completion = match same {
            None => completion,
            Some(same) => {
                let (claim, in_flight) = other.in_flight.swap_remove(same);
                let Outcome::Foreign(in_flight, completion) = in_flight.finish(completion) else {
                    panic!("another queue's payload was released");
                };
                other.in_flight.push((claim, in_flight));
                completion
            }
        };
        let found = liar.done.iter().position(|in_flight| in_flight.tag() == tag);
        let in_flight =
            liar.done.swap_remove(found.expect("a command that was not completed has ended"));
        let Outcome::Completed { result, .. } = in_flight.finish(completion) else {
            panic!("not its own")
        };
        assert_eq!(result, *expected);
    }
    assert!(liar.done.is_empty(), "a completed command has not ended");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_lying_controller_ends_exactly_the_commands_it_names(ops in proptest::collection::vec(op(), 1..120)) {
        let (bench, deletes) = rig();
        let before = bench.arena.0.used();
        let mut queues = [Liar::new(&bench), Liar::new(&bench)];
        let mut stale: Vec<Liar> = Vec::new();
        let mut history: Vec<Claim> = Vec::new();
        for op in ops {
            let pick = |claims: &[Claim], pick: prop::sample::Index| {
                (!claims.is_empty()).then(|| claims[pick.index(claims.len())])
            };
            let claim = match op {
                Op::Submit(queue) => {
                    queues[queue].submit();
                    None
                }
                Op::Complete(queue, at) => pick(&queues[queue].claims(), at).map(|claim| (queue, claim)),
                Op::Replay(queue, at) => pick(&history, at).map(|claim| (queue, claim)),
                Op::Misdirect(to, from, at) => pick(&queues[from].claims(), at).map(|claim| (to, claim)),
                Op::Misname(queue, sq_id, at) => {
                    pick(&queues[queue].claims(), at).map(|claim| (queue, Claim { sq_id, ..claim }))
                }
                Op::Invent(queue, sq_id, cid) => Some((queue, Claim { sq_id, cid })),
                Op::Reset => {
                    bench.controller.reset().unwrap();
                    let new = [Liar::new(&bench), Liar::new(&bench)];
                    let [mut first, mut second] = std::mem::replace(&mut queues, new);
                    for liar in [&mut first, &mut second] {
                        liar.done.extend(liar.in_flight.drain(..).map(|(_, in_flight)| in_flight));
                    }
                    for (old, new) in [(&mut first, 0), (&mut second, 1)] {
                        settle(old, &mut queues[new], &Err(CommandError::Reset));
                    }
                    stale.extend([first, second]);
                    None
                }
                Op::DropStale => {
                    stale.clear();
                    None
                }
            };
            if let Some((queue, claim)) = claim {
                queues[queue].write(claim);
                history.push(claim);
            }
            let [first, second] = &mut queues;
            settle(first, second, &Ok(()));
            settle(second, first, &Ok(()));
        }
        drop(stale);
        prop_assert_eq!(deletes.load(Ordering::SeqCst), 0, "a stale queue was deleted");
        bench.controller.reset().unwrap();
        drop(queues);
        let stats = bench.controller.stats();
        prop_assert_eq!((bench.arena.0.used(), stats.quarantined_permanently, stats.quarantined_queues), (before, 0, 0));
    }
}

/// Returns an entry as a hostile device may write it: garbage, or nearly right.
fn entry() -> impl Strategy<Value = [u8; 16]> {
    let near = (0u16..70, 0u16..4, 0u16..80, 0u16..3, any::<u16>()).prop_map(
        |(place, generation, head, sq, status)| {
            let mut bytes = [0; 16];
            bytes[8..10].copy_from_slice(&head.to_le_bytes());
            bytes[10..12].copy_from_slice(&sq.to_le_bytes());
            bytes[12..14].copy_from_slice(&(generation << 6 | place).to_le_bytes());
            bytes[14..].copy_from_slice(&(status | 1).to_le_bytes());
            bytes
        },
    );
    prop_oneof![any::<[u8; 16]>(), near]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn garbage_in_the_completion_queue_is_counted_and_loses_nothing(
        entries in proptest::collection::vec(entry(), 1..64),
        requests in 1usize..12,
        blocks in 1u32..200,
    ) {
        let clock = TestClock::default();
        let config = Config {
            timeout: Duration::from_secs(1), abort_timeout: Duration::ZERO,
            clock: Arc::new(clock.clone()),
            max_transfer_bytes: 32 << 10,
            ..Config::default()
        };
        let bench = bench(2048, ModelConfig::new(namespaces(1 << 20)), config);
        let before = bench.arena.0.used();
        let mut queue = bench.controller.create_queue(16).unwrap();
        prop_assert_eq!(bench.arena.0.used(), before + 2);
        // The two rings are a frame each, and the newest.
        let ring = bench.arena.0.whole().part((before + 1) * 4096, 4096).unwrap();
        bench.model.faults().inject(Trigger::Every(1), Fault::NeverComplete);
        let mut flying: Vec<_> = (0..requests)
            .map(|_| queue.write(1, 0, blocks, Buffer::new(&bench.arena, blocks as usize * 512)).unwrap())
            .collect();
        queue.ring_doorbell();
        for (i, entry) in entries.iter().enumerate() {
            ring.copy_from_slice(i * 16, entry).unwrap();
        }
        let mut held = Vec::new();
        let mut seen = 0;
        for round in 0..400 {
            if round == 200 {
                clock.advance(2_000_000_000);
            }
            if round == 300 {
                bench.controller.reset().unwrap();
            }
            let Some(completion) = queue.poll().unwrap() else { continue };
            seen += 1;
            let at = flying.iter().position(|f| f.tag() == completion.tag()).unwrap();
            match flying.swap_remove(at).finish(completion) {
                Outcome::Completed { result, .. } => prop_assert_ne!(result, Err(CommandError::NotSent)),
                Outcome::TimedOut(quarantined) => held.push(quarantined),
                Outcome::Foreign(..) => prop_assert!(false, "a request was reported twice"),
            }
        }
        prop_assert_eq!(seen, requests);
        prop_assert!(flying.is_empty());
        for quarantined in held {
            prop_assert!(quarantined.recover().is_ok());
        }
        let stats = queue.stats();
        prop_assert!(stats.completions + stats.late_completions <= stats.commands);
        drop(queue);
        let stats = bench.controller.stats();
        prop_assert_eq!((stats.quarantined_permanently, stats.quarantined, stats.list_pages_used), (0, 0, 0));
    }
}
