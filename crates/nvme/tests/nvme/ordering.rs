//! Requests to the same blocks: what was submitted later is not carried out earlier because a
//! command of the older request is sent again.

use crate::common::*;
use crate::faults::settle;
use crate::retries::{MS, poll_all, rig};
use pinfold_nvme::driver::{CommandError, Completion, Config, InFlight, Outcome};
use pinfold_nvme::spec::Status;
use pinfold_nvme_model::{Fault, ModelConfig, Trigger};
use std::time::Duration;

/// The controller asks for a retry after 2 s.
const LATER: Status = Status::NAMESPACE_NOT_READY.with_retry_delay(1);

/// Has the next I/O command fail with `status`.
fn fail_next(bench: &Bench, status: Status) {
    bench.model.faults().inject(Trigger::Nth(1), Fault::Fail(status));
}

fn result<P>(in_flight: InFlight<P>, completion: Completion) -> Result<(), CommandError> {
    match in_flight.finish(completion) {
        Outcome::Completed { result, .. } => result,
        Outcome::TimedOut(_) => panic!("timed out"),
        Outcome::Foreign(..) => panic!("another request's completion"),
    }
}

/// A request of any kind.
enum Any {
    Data(InFlight<Buffer>),
    None(InFlight<()>),
}

impl Any {
    fn result(self, completion: Completion) -> Result<(), CommandError> {
        match self {
            Self::Data(in_flight) => result(in_flight, completion),
            Self::None(in_flight) => result(in_flight, completion),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Read,
    Write,
    Zeroes,
    Discard,
    Flush,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Read, Self::Write, Self::Zeroes, Self::Discard, Self::Flush];

    fn changes(self) -> bool {
        !matches!(self, Self::Read | Self::Flush)
    }

    fn submit(self, bench: &Bench, queue: &mut TestQueue, nsid: u32, slba: u64) -> Any {
        let bytes = if nsid == 1 { 4096 } else { 32_768 };
        let buffer = || Buffer::filled(&bench.arena, &pattern(slba + 7, bytes));
        match self {
            Self::Read => Any::Data(queue.read(nsid, slba, 8, buffer()).unwrap()),
            Self::Write => Any::Data(queue.write(nsid, slba, 8, buffer()).unwrap()),
            Self::Zeroes => Any::None(queue.write_zeroes(nsid, slba, 8).unwrap()),
            Self::Discard => Any::None(queue.discard(nsid, slba, 8).unwrap()),
            Self::Flush => Any::None(queue.flush(nsid).unwrap()),
        }
    }
}

/// Every kind of request while an older one of every kind waits for its retry.
#[test]
fn what_overlaps_a_waiting_request_is_held_back() {
    let (bench, clock) = rig();
    for older in Kind::ALL {
        for newer in Kind::ALL {
            // Blocks 100 to 107 wait.
            for (nsid, slba, overlaps) in [
                (1, 100, true),
                (1, 107, true),
                (1, 93, true),
                (1, 108, false),
                (1, 92, false),
                (2, 100, false),
            ] {
                let case = format!("{older:?}, {newer:?} of {nsid} at {slba}");
                let mut queue = bench.controller.create_queue(4).unwrap();
                fail_next(&bench, LATER);
                let first = older.submit(&bench, &mut queue, 1, 100);
                while queue.stats().errors == 0 {
                    assert!(queue.poll().unwrap().is_none());
                }
                let second = newer.submit(&bench, &mut queue, nsid, slba);
                let flush = older == Kind::Flush || newer == Kind::Flush;
                if overlaps && !flush && (older.changes() || newer.changes()) {
                    for _ in 0..3 {
                        assert!(queue.poll().unwrap().is_none());
                    }
                    assert_eq!(queue.stats().commands, 1, "{case}: overtook");
                    clock.advance(2_000 * MS);
                    let completion = queue.wait().unwrap().unwrap();
                    assert_eq!(first.result(completion), Ok(()), "{case}");
                    let completion = queue.wait().unwrap().unwrap();
                    assert_eq!(second.result(completion), Ok(()), "{case}");
                } else {
                    let completion = queue.wait().unwrap().unwrap();
                    assert_eq!(second.result(completion), Ok(()), "{case}: held back");
                    clock.advance(2_000 * MS);
                    let completion = queue.wait().unwrap().unwrap();
                    assert_eq!(first.result(completion), Ok(()), "{case}");
                }
            }
        }
    }
}

/// Writes `seed` to blocks 0 to 7 and returns the request.
fn write(bench: &Bench, queue: &mut TestQueue, seed: u64) -> InFlight<Buffer> {
    queue.write(1, 0, 8, Buffer::filled(&bench.arena, &pattern(seed, 4096))).unwrap()
}

/// Returns whether blocks 0 to 7 hold `seed`.
fn holds(bench: &Bench, queue: &mut TestQueue, seed: u64) -> bool {
    let read = queue.read(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    let (payload, result) = one(queue, read);
    assert_eq!(result, Ok(()));
    payload.bytes(4096) == pattern(seed, 4096)
}

/// Both were submitted before the first one failed.
#[test]
fn a_later_write_of_the_same_batch_is_not_reversed() {
    for status in [
        LATER,
        Status::NAMESPACE_NOT_READY,
        Status::COMMAND_INTERRUPTED,
        Status::INTERNAL_ERROR,
        Status::WRITE_FAULT,
        Status::WRITE_FAULT.with_retry_delay(1),
        Status::from_bits(0x700),
    ] {
        let (bench, clock) = rig();
        let mut queue = bench.controller.create_queue(4).unwrap();
        fail_next(&bench, status);
        let (older, newer) = (write(&bench, &mut queue, 1), write(&bench, &mut queue, 2));
        assert!(poll_all(&bench, &mut queue).is_none(), "{status}");
        clock.advance(2_000 * MS);
        assert_eq!(one(&mut queue, older).1, Ok(()), "{status}");
        assert_eq!(one(&mut queue, newer).1, Ok(()), "{status}");
        assert!(holds(&bench, &mut queue, 2), "{status}: the older write came last");
    }
}

/// The queues have the same controller, as those of a server's threads.
#[test]
fn a_write_of_another_queue_is_not_reversed() {
    let (bench, clock) = rig();
    let mut first = bench.controller.create_queue(4).unwrap();
    let mut second = bench.controller.create_queue(4).unwrap();
    fail_next(&bench, LATER);
    let older = write(&bench, &mut first, 1);
    assert!(poll_all(&bench, &mut first).is_none());
    let newer = write(&bench, &mut second, 2);
    let elsewhere = second.write(1, 8, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    assert_eq!(one(&mut second, elsewhere).1, Ok(()), "the blocks behind them are free");
    assert!(poll_all(&bench, &mut second).is_none());
    clock.advance(2_000 * MS);
    assert!(poll_all(&bench, &mut second).is_none(), "the older one has not been sent again");
    assert_eq!(one(&mut first, older).1, Ok(()));
    assert_eq!(one(&mut second, newer).1, Ok(()));
    assert!(holds(&bench, &mut first, 2), "the older write came last");
}

/// Both wait for their retries, the later one for less time.
#[test]
fn of_two_waiting_writes_of_two_queues_the_older_is_first() {
    let (bench, clock) = rig();
    let mut first = bench.controller.create_queue(4).unwrap();
    let mut second = bench.controller.create_queue(4).unwrap();
    fail_next(&bench, LATER);
    let older = write(&bench, &mut first, 1);
    first.ring_doorbell();
    settle(&bench);
    clock.advance(MS);
    fail_next(&bench, Status::NAMESPACE_NOT_READY);
    let newer = write(&bench, &mut second, 2);
    second.ring_doorbell();
    settle(&bench);
    assert!(poll_all(&bench, &mut first).is_none() && poll_all(&bench, &mut second).is_none());
    clock.advance(1_000 * MS);
    assert!(poll_all(&bench, &mut second).is_none(), "it is due, but the older one is not");
    assert_eq!(second.stats().retries, 0);
    clock.advance(1_000 * MS);
    assert_eq!(one(&mut first, older).1, Ok(()));
    clock.advance(MS);
    assert_eq!(one(&mut second, newer).1, Ok(()));
    assert!(holds(&bench, &mut first, 2), "the older write came last");
}

/// 0 to 7 wait; 4 to 11 wait for them, and 8 to 15 for those; 16 to 23 are free.
#[test]
fn a_request_waits_for_all_that_wait_before_it_and_for_no_other() {
    let (bench, clock) = rig();
    let mut queue = bench.controller.create_queue(8).unwrap();
    fail_next(&bench, LATER);
    let write = |queue: &mut TestQueue, slba, seed| {
        queue.write(1, slba, 8, Buffer::filled(&bench.arena, &pattern(seed, 4096))).unwrap()
    };
    let first = write(&mut queue, 0, 1);
    let second = write(&mut queue, 4, 2);
    let third = write(&mut queue, 8, 3);
    let free = write(&mut queue, 16, 4);
    let both = queue.read(1, 0, 24, Buffer::new(&bench.arena, 12_288)).unwrap();
    assert_eq!(one(&mut queue, free).1, Ok(()), "it passes those that are held");
    assert!(poll_all(&bench, &mut queue).is_none());
    assert_eq!(queue.stats().commands, 2);
    clock.advance(2_000 * MS);
    for write in [first, second, third] {
        assert_eq!(one(&mut queue, write).1, Ok(()));
    }
    let (payload, result) = one(&mut queue, both);
    let bytes = |seed| pattern(seed, 4096);
    let expected = [&bytes(1)[..2048], &bytes(2)[..2048], &bytes(3), &bytes(4)].concat();
    assert_eq!(
        (result, payload.bytes(12_288) == [&expected[..4096], &expected[4096..]].concat()),
        (Ok(()), true)
    );
}

#[test]
fn the_time_for_which_a_request_is_held_is_no_timeout() {
    let (bench, clock) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::NeverComplete);
    let (older, newer) = (write(&bench, &mut queue, 1), write(&bench, &mut queue, 2));
    assert!(poll_all(&bench, &mut queue).is_none());
    clock.advance(999 * MS);
    assert!(poll_all(&bench, &mut queue).is_none());
    clock.advance(MS);
    let completion = poll_all(&bench, &mut queue).unwrap();
    assert!(completion.timed_out());
    drop(older.finish(completion));
    clock.advance(999 * MS);
    assert_eq!(one(&mut queue, newer).1, Ok(()));
    assert_eq!(queue.stats().timeouts, 1);
    // From when it is sent its time counts, and no more than that.
    bench.model.faults().inject(Trigger::Nth(1), Fault::Fail(LATER));
    bench.model.faults().inject(Trigger::Nth(3), Fault::NeverComplete);
    let (older, newer) = (write(&bench, &mut queue, 3), write(&bench, &mut queue, 4));
    assert!(poll_all(&bench, &mut queue).is_none());
    clock.advance(1_500 * MS);
    assert!(poll_all(&bench, &mut queue).is_none());
    clock.advance(500 * MS);
    assert_eq!(one(&mut queue, older).1, Ok(()));
    assert!(poll_all(&bench, &mut queue).is_none());
    clock.advance(999 * MS);
    assert!(poll_all(&bench, &mut queue).is_none());
    clock.advance(MS);
    let completion = poll_all(&bench, &mut queue).unwrap();
    assert!(completion.timed_out());
    drop(newer.finish(completion));
}

/// Held until an older request has timed out, it then waits for the retry of another queue.
#[test]
fn the_limit_counts_from_when_only_another_queue_is_waited_for() {
    let (bench, clock) = rig();
    let mut first = bench.controller.create_queue(4).unwrap();
    let mut second = bench.controller.create_queue(4).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::NeverComplete);
    let lost = second.read(1, 8, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    let held = second.write(1, 0, 16, Buffer::new(&bench.arena, 8192)).unwrap();
    assert!(poll_all(&bench, &mut second).is_none());
    fail_next(&bench, LATER);
    let older = write(&bench, &mut first, 1);
    assert!(poll_all(&bench, &mut first).is_none());
    clock.advance(1_000 * MS);
    let completion = poll_all(&bench, &mut second).unwrap();
    assert!(completion.timed_out());
    drop(lost.finish(completion));
    clock.advance(10_999 * MS);
    assert!(poll_all(&bench, &mut second).is_none());
    clock.advance(MS);
    assert_eq!(one(&mut second, held).1, Err(CommandError::NotSent));
    drop(older);
}

/// Otherwise another queue with one retry after the other would keep it for ever.
#[test]
fn a_request_does_not_wait_for_younger_retries() {
    let (bench, clock) = rig();
    let mut first = bench.controller.create_queue(4).unwrap();
    let mut second = bench.controller.create_queue(4).unwrap();
    fail_next(&bench, LATER);
    let older = write(&bench, &mut first, 1);
    assert!(poll_all(&bench, &mut first).is_none());
    clock.advance(1_000 * MS);
    // It has failed, and the queue sees it only after the other request was submitted.
    fail_next(&bench, LATER);
    let younger = first.write(1, 8, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    first.ring_doorbell();
    settle(&bench);
    let waits = second.write(1, 0, 16, Buffer::new(&bench.arena, 8192)).unwrap();
    assert!(poll_all(&bench, &mut second).is_none());
    assert!(poll_all(&bench, &mut first).is_none());
    clock.advance(1_000 * MS);
    assert_eq!(one(&mut first, older).1, Ok(()));
    assert_eq!(one(&mut second, waits).1, Ok(()), "the other retry is due in a second");
    clock.advance(1_000 * MS);
    assert_eq!(one(&mut first, younger).1, Ok(()));
}

/// The first of two conflicting requests ends in every way but by being carried out.
#[test]
fn a_held_request_is_sent_however_the_older_one_ends() {
    let (bench, _) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    // A final status.
    fail_next(&bench, Status::WRITE_FAULT.do_not_retry());
    let (older, newer) = (write(&bench, &mut queue, 1), write(&bench, &mut queue, 2));
    assert_eq!(
        one(&mut queue, older).1,
        Err(CommandError::Status(Status::WRITE_FAULT.do_not_retry()))
    );
    assert_eq!(one(&mut queue, newer).1, Ok(()));
    // Its owner gives it up while it waits for the retry, and the retry of no other.
    fail_next(&bench, LATER);
    let (older, newer) = (write(&bench, &mut queue, 3), write(&bench, &mut queue, 4));
    let flush = queue.flush(1).unwrap();
    assert_eq!(one(&mut queue, flush).1, Ok(()));
    assert!(poll_all(&bench, &mut queue).is_none());
    queue.abandon_retries_of(&older);
    assert_eq!(one(&mut queue, older).1, Err(CommandError::Status(LATER)));
    assert_eq!(one(&mut queue, newer).1, Ok(()));
    assert!(holds(&bench, &mut queue, 4));
    // All are given up.
    fail_next(&bench, LATER);
    let (older, newer) = (write(&bench, &mut queue, 5), write(&bench, &mut queue, 6));
    assert!(poll_all(&bench, &mut queue).is_none());
    queue.abandon_retries();
    assert_eq!(one(&mut queue, older).1, Err(CommandError::Status(LATER)));
    assert_eq!(one(&mut queue, newer).1, Ok(()));
    assert_eq!((queue.stats().retries, queue.in_flight()), (0, 0));
    assert_eq!(bench.controller.stats().list_pages_used, 0);
}

/// Given up in each state: in flight, waiting for its retry, held, completed, of another queue.
#[test]
fn a_request_that_is_given_up_is_not_sent_again() {
    let (bench, clock) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    fail_next(&bench, LATER);
    let in_flight = write(&bench, &mut queue, 1);
    queue.ring_doorbell();
    queue.abandon_retries_of(&in_flight);
    assert_eq!(one(&mut queue, in_flight).1, Err(CommandError::Status(LATER)));
    // The tag of a request that has completed is another's now.
    fail_next(&bench, LATER);
    let done = queue.flush(2).unwrap();
    let tag = done.tag();
    let completion = {
        bench.model.faults().clear();
        queue.wait().unwrap().unwrap()
    };
    fail_next(&bench, LATER);
    let waits = write(&bench, &mut queue, 2);
    assert!(poll_all(&bench, &mut queue).is_none());
    assert_eq!(waits.tag(), tag);
    queue.abandon_retries_of(&done);
    let mut other = bench.controller.create_queue(4).unwrap();
    other.abandon_retries_of(&waits);
    let flush = other.flush(1).unwrap();
    queue.abandon_retries_of(&flush);
    assert!(poll_all(&bench, &mut queue).is_none(), "it is still in flight");
    assert_eq!((result(done, completion), one(&mut other, flush).1), (Ok(()), Ok(())));
    // The first request of the first queue, and the first of another one.
    let mut others = [(); 2].map(|()| bench.controller.create_queue(1).unwrap());
    let waiting = others.each_mut().map(|queue| {
        bench.model.faults().inject(Trigger::Nth(1), Fault::Fail(LATER));
        let flush = queue.flush(1).unwrap();
        assert!(poll_all(&bench, queue).is_none());
        flush
    });
    others[0].abandon_retries_of(&waiting[1]);
    for queue in &mut others {
        assert!(queue.poll().unwrap().is_none(), "each has a request that waits for its retry");
    }
    // One that is held is sent, but not again.
    let held = write(&bench, &mut queue, 3);
    queue.abandon_retries_of(&held);
    let last = write(&bench, &mut queue, 4);
    assert!(poll_all(&bench, &mut queue).is_none());
    clock.advance(2_000 * MS);
    bench.model.faults().inject(Trigger::Nth(2), Fault::Fail(LATER));
    assert_eq!(one(&mut queue, waits).1, Ok(()));
    assert_eq!(one(&mut queue, held).1, Err(CommandError::Status(LATER)));
    assert_eq!(one(&mut queue, last).1, Ok(()));
    assert!(holds(&bench, &mut queue, 4));
    for (queue, flush) in others.iter_mut().zip(waiting) {
        assert_eq!(one(queue, flush).1, Ok(()));
    }
}

/// A queue whose request waits is dropped, or its controller is reset: nothing is sent again.
#[test]
fn the_end_of_a_queue_ends_what_others_wait_for() {
    let (bench, _) = rig();
    let mut first = bench.controller.create_queue(4).unwrap();
    let mut second = bench.controller.create_queue(4).unwrap();
    fail_next(&bench, LATER);
    let older = write(&bench, &mut first, 1);
    assert!(poll_all(&bench, &mut first).is_none());
    let newer = write(&bench, &mut second, 2);
    assert!(poll_all(&bench, &mut second).is_none());
    drop(first);
    assert_eq!(one(&mut second, newer).1, Ok(()));
    fail_next(&bench, LATER);
    let waits = write(&bench, &mut second, 3);
    assert!(poll_all(&bench, &mut second).is_none());
    bench.controller.reset().unwrap();
    // The earlier queue has not been polled since.
    let mut third = bench.controller.create_queue(4).unwrap();
    let newer = write(&bench, &mut third, 4);
    assert_eq!(one(&mut third, newer).1, Ok(()));
    let held = one(&mut second, waits).1;
    assert_eq!(held, Err(CommandError::Reset));
    drop(older);
}

#[test]
fn a_reset_completes_what_is_held() {
    let (bench, _) = rig();
    let mut first = bench.controller.create_queue(4).unwrap();
    let mut second = bench.controller.create_queue(4).unwrap();
    fail_next(&bench, LATER);
    let (older, held) = (write(&bench, &mut first, 1), write(&bench, &mut first, 2));
    assert!(poll_all(&bench, &mut first).is_none());
    let elsewhere = write(&bench, &mut second, 3);
    assert!(poll_all(&bench, &mut second).is_none());
    bench.controller.reset().unwrap();
    assert_eq!(one(&mut first, older).1, Err(CommandError::Reset));
    assert_eq!(one(&mut first, held).1, Err(CommandError::Reset));
    assert_eq!(one(&mut second, elsewhere).1, Err(CommandError::Reset));
    assert!(first.poll().unwrap().is_none() && second.poll().unwrap().is_none());
}

/// The owner of the other queue does not poll it any more.
#[test]
fn a_request_waits_for_another_queue_for_a_limited_time() {
    let (bench, clock) = rig();
    let mut first = bench.controller.create_queue(4).unwrap();
    let mut second = bench.controller.create_queue(4).unwrap();
    fail_next(&bench, LATER);
    let older = write(&bench, &mut first, 1);
    assert!(poll_all(&bench, &mut first).is_none());
    let newer = write(&bench, &mut second, 2);
    // The limit of the retries, and of a command.
    clock.advance(10_999 * MS);
    assert!(poll_all(&bench, &mut second).is_none());
    clock.advance(MS);
    assert_eq!(one(&mut second, newer).1, Err(CommandError::NotSent));
    // A program that gives up does not wait that long.
    let newer = write(&bench, &mut second, 3);
    let behind = write(&bench, &mut second, 4);
    assert!(poll_all(&bench, &mut second).is_none());
    second.abandon_retries();
    assert_eq!(one(&mut second, newer).1, Err(CommandError::NotSent));
    assert_eq!(one(&mut second, behind).1, Err(CommandError::NotSent));
    assert_eq!((second.stats().commands, second.in_flight()), (0, 0));
    drop(older);
}

#[test]
fn a_sleep_ends_in_time_to_look_at_the_other_queue() {
    let mut model = ModelConfig::new(namespaces(1 << 20));
    (model.vectors, model.retry_delays) = (2, [1, 0, 0]);
    let bench = bench(256, model, Config::default());
    let mut first = bench.controller.create_queue(4).unwrap();
    let interrupt = bench.model.interrupt(1).unwrap();
    let vector = pinfold_nvme::driver::Vector { number: 1, interrupt };
    let mut second = bench.controller.create_queue_with(4, vector).unwrap();
    fail_next(&bench, LATER);
    let older = write(&bench, &mut first, 1);
    while first.stats().errors == 0 {
        assert!(first.poll().unwrap().is_none());
    }
    let newer = write(&bench, &mut second, 2);
    assert!(second.poll().unwrap().is_none());
    assert!(second.arm_interrupt() <= Duration::from_millis(1), "not 100 ms");
    assert_eq!(one(&mut first, older).1, Ok(()));
    assert_eq!(one(&mut second, newer).1, Ok(()));
}

/// A request of several commands, of which one waits.
#[test]
fn all_blocks_of_a_request_are_held_until_all_of_it_has_ended() {
    let (bench, clock) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    fail_next(&bench, LATER);
    let bytes = pattern(1, 4 << 20);
    let large = queue.write(1, 0, 8192, Buffer::filled(&bench.arena, &bytes)).unwrap();
    assert!(poll_all(&bench, &mut queue).is_none());
    let newer = queue.discard(1, 8191, 1).unwrap();
    assert!(poll_all(&bench, &mut queue).is_none());
    assert_eq!(queue.stats().commands, 4);
    clock.advance(2_000 * MS);
    assert_eq!(one(&mut queue, large).1, Ok(()));
    assert_eq!(one(&mut queue, newer).1, Ok(()));
    let read = queue.read(1, 8184, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    let read = one(&mut queue, read).0.bytes(4096);
    assert!(read[..3584] == bytes[(4 << 20) - 4096..(4 << 20) - 512] && read[3584..] == [0; 512]);
}

/// Polls queues for six seconds, and returns the tags that have completed well, in their order.
fn complete_all(
    bench: &Bench,
    clock: &TestClock,
    queues: &mut [&mut TestQueue],
) -> Vec<Completion> {
    let mut completions = Vec::new();
    for _ in 0..60 {
        for queue in &mut *queues {
            completions.extend(std::iter::from_fn(|| queue.poll().unwrap()));
            settle(bench);
        }
        clock.advance(100 * MS);
    }
    completions
}

/// Writes eight blocks at `slba`.
fn write_at(bench: &Bench, queue: &mut TestQueue, slba: u64, blocks: u32) -> InFlight<Buffer> {
    let bytes = blocks as usize * 512;
    queue.write(1, slba, blocks, Buffer::new(&bench.arena, bytes)).unwrap()
}

/// Asserts that exactly these have succeeded, in this order.
fn assert_order(requests: Vec<InFlight<Buffer>>, completions: Vec<Completion>) {
    assert_eq!(requests.len(), completions.len());
    for (place, (request, completion)) in requests.into_iter().zip(completions).enumerate() {
        assert_eq!(result(request, completion), Ok(()), "{place}");
    }
}

/// 0 to 7 wait for a retry, 4 to 11 for those, 8 to 15 for these. Another queue writes the last.
#[test]
fn what_waits_behind_a_retry_is_not_carried_out_after_what_others_submit_later() {
    for known_before in [0, 1, 2] {
        let (bench, clock) = rig();
        let mut first = bench.controller.create_queue(4).unwrap();
        let mut second = bench.controller.create_queue(4).unwrap();
        fail_next(&bench, LATER);
        let mut chain = vec![write_at(&bench, &mut first, 0, 8)];
        for (at, slba) in [4, 8].into_iter().enumerate() {
            if at == known_before {
                assert!(poll_all(&bench, &mut first).is_none());
            }
            chain.push(write_at(&bench, &mut first, slba, 8));
        }
        assert!(poll_all(&bench, &mut first).is_none());
        chain.push(write_at(&bench, &mut second, 12, 8));
        let free = write_at(&bench, &mut second, 16, 4);
        assert!(poll_all(&bench, &mut second).is_none(), "the free one is held in its queue");
        assert_eq!(second.stats().commands, 0, "{known_before}: overtook");
        chain.push(free);
        let completions = complete_all(&bench, &clock, &mut [&mut first, &mut second]);
        assert_order(chain, completions);
    }
}

/// The second queue waits for a retry of the first, and the third for that of the second.
#[test]
fn what_waits_for_another_queue_is_waited_for() {
    let (bench, clock) = rig();
    let mut queues = [(); 3].map(|()| bench.controller.create_queue(4).unwrap());
    let [first, second, third] = &mut queues;
    fail_next(&bench, LATER);
    let mut chain = vec![write_at(&bench, first, 0, 8)];
    assert!(poll_all(&bench, first).is_none());
    chain.push(write_at(&bench, second, 4, 8));
    // Held behind that.
    chain.push(write_at(&bench, second, 8, 8));
    chain.push(write_at(&bench, third, 12, 8));
    assert!(poll_all(&bench, second).is_none() && poll_all(&bench, third).is_none());
    assert_eq!(third.stats().commands, 0, "overtook");
    assert_order(chain, complete_all(&bench, &clock, &mut [first, second, third]));
}

/// Of the first queue, 16 to 23 fail when 0 to 23 wait for them and for 0 to 7, and 20 to 27 of the
/// second queue for those.
#[test]
fn two_queues_do_not_wait_for_each_other() {
    let (bench, clock) = rig();
    let mut first = bench.controller.create_queue(8).unwrap();
    let mut second = bench.controller.create_queue(4).unwrap();
    fail_next(&bench, LATER);
    let begin = write_at(&bench, &mut first, 0, 8);
    assert!(poll_all(&bench, &mut first).is_none());
    fail_next(&bench, LATER);
    let end = write_at(&bench, &mut first, 16, 8);
    // Behind the end only, which has not failed: no other queue waits for it.
    let between = write_at(&bench, &mut first, 12, 8);
    let all = write_at(&bench, &mut first, 0, 16);
    let other = write_at(&bench, &mut second, 8, 16);
    assert!(poll_all(&bench, &mut second).is_none());
    // Now the end has failed.
    assert!(poll_all(&bench, &mut first).is_none());
    let completions = complete_all(&bench, &clock, &mut [&mut first, &mut second]);
    assert_order(vec![begin, end, between, all, other], completions);
    assert!(poll_all(&bench, &mut first).is_none() && first.stats().retries == 2);
}
