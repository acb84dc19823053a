//! The order of conflicting requests among more than two requests and two queues.

use crate::common::*;
use crate::faults::settle;
use crate::retries::{MS, poll_all, rig};
use pinfold_nvme::driver::RawCommand;
use pinfold_nvme::spec::{DsmRange, Status, nvm};
use pinfold_nvme_model::{Fault, Trigger};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// The controller asks for a retry after 2 s.
const LATER: Status = Status::NAMESPACE_NOT_READY.with_retry_delay(1);

/// Has the next I/O command fail with [`LATER`].
fn fail_next(bench: &Bench) {
    bench.model.faults().inject(Trigger::Nth(1), Fault::Fail(LATER));
}

/// A queue has a request that other queues wait for, with one behind it. Another request of this
/// queue, elsewhere, is no older for that.
#[test]
fn a_retry_is_as_old_as_what_waits_for_it_and_not_as_what_waits_elsewhere() {
    let (bench, clock) = rig();
    let mut first = bench.controller.create_queue(4).unwrap();
    let mut second = bench.controller.create_queue(4).unwrap();
    let write = |queue: &mut TestQueue, slba, seed| {
        let payload = Buffer::filled(&bench.arena, &pattern(seed, 4096));
        queue.write(1, slba, 8, payload).unwrap()
    };
    fail_next(&bench);
    let elsewhere = write(&mut first, 100, 1);
    assert!(poll_all(&bench, &mut first).is_none());
    let behind = write(&mut first, 100, 2);
    // Both are in flight before one of them is known to have failed.
    fail_next(&bench);
    let older = write(&mut second, 0, 3);
    second.ring_doorbell();
    settle(&bench);
    fail_next(&bench);
    let newer = write(&mut first, 0, 4);
    first.ring_doorbell();
    settle(&bench);
    assert!(poll_all(&bench, &mut second).is_none() && poll_all(&bench, &mut first).is_none());
    assert_eq!((first.stats().errors, second.stats().errors), (2, 1));
    clock.advance(2_000 * MS);
    assert_eq!(one(&mut first, elsewhere).1, Ok(()));
    assert_eq!(one(&mut first, behind).1, Ok(()));
    assert!(poll_all(&bench, &mut first).is_none(), "it failed last");
    assert_eq!(one(&mut second, older).1, Ok(()));
    clock.advance(MS);
    assert_eq!(one(&mut first, newer).1, Ok(()));
    let read = first.read(1, 0, 8, Buffer::new(&bench.arena, 4096)).unwrap();
    assert!(one(&mut first, read).0.bytes(4096) == pattern(4, 4096));
}

/// A command that does not name its blocks may be about any of them, the first one too.
#[test]
fn a_command_that_names_no_blocks_is_ordered_with_the_first_block() {
    let (bench, clock) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    let range = DsmRange { blocks: U32::new(1), slba: U64::new(0), ..DsmRange::default() };
    let payload = Buffer::filled(&bench.arena, range.as_bytes());
    let cdw = [0, nvm::DEALLOCATE, 0, 0, 0, 0];
    let discard = RawCommand { opcode: nvm::DATASET_MANAGEMENT, nsid: 1, cdw };
    fail_next(&bench);
    let discard = queue.raw_write(&discard, 16, payload).unwrap();
    assert!(poll_all(&bench, &mut queue).is_none());
    let bytes = pattern(1, 512);
    let write = queue.write(1, 0, 1, Buffer::filled(&bench.arena, &bytes)).unwrap();
    assert!(poll_all(&bench, &mut queue).is_none(), "it is held");
    clock.advance(2_000 * MS);
    assert_eq!(one(&mut queue, discard).1, Ok(()));
    assert_eq!(one(&mut queue, write).1, Ok(()));
    let read = queue.read(1, 0, 1, Buffer::new(&bench.arena, 512)).unwrap();
    assert!(one(&mut queue, read).0.bytes(512) == bytes);
}
