//! Commands of the program's own: what they move, what is refused, in which order and how often they
//! are sent.

use crate::common::*;
use crate::retries::{MS, poll_all, rig};
use pinfold_nvme::driver::{CommandError, Config, Error, RawCommand, Reject};
use pinfold_nvme::spec::{DsmRange, Status, admin, feature, nvm};
use pinfold_nvme_model::{CommandInfo, Fault, ModelConfig, Trigger};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// `opcode` for blocks of 512 bytes of namespace 1.
fn raw(opcode: u8, slba: u32, blocks: u32) -> RawCommand {
    RawCommand { opcode, nsid: 1, cdw: [slba, 0, blocks - 1, 0, 0, 0] }
}

fn small() -> Bench {
    bench(512, ModelConfig::new(namespaces(1 << 20)), Config::default())
}

#[test]
fn commands_with_and_without_data_do_what_they_say() {
    let bench = small();
    let mut queue = bench.controller.create_queue(4).unwrap();
    let bytes = pattern(1, 8192);
    let payload = Buffer::filled(&bench.arena, &bytes);
    let write = queue.raw_write(&raw(nvm::WRITE, 8, 16), 8192, payload).unwrap();
    assert_eq!(one(&mut queue, write).1, Ok(()));
    let read = |queue: &mut TestQueue| {
        let payload = Buffer::new(&bench.arena, 8192);
        let read = queue.raw_read(&raw(nvm::READ, 8, 16), 8192, payload).unwrap();
        let (payload, result) = one(queue, read);
        assert_eq!(result, Ok(()));
        payload.bytes(8192)
    };
    assert!(read(&mut queue) == bytes);
    let zeroes = queue.raw(&raw(nvm::WRITE_ZEROES, 8, 8)).unwrap();
    assert_eq!(one(&mut queue, zeroes).1, Ok(()));
    let expected = [vec![0; 4096], bytes[4096..].to_vec()].concat();
    assert!(read(&mut queue) == expected);
    // Data that are no blocks.
    let range = DsmRange { blocks: U32::new(8), slba: U64::new(16), ..DsmRange::default() };
    let discard = RawCommand {
        opcode: nvm::DATASET_MANAGEMENT,
        nsid: 1,
        cdw: [0, nvm::DEALLOCATE, 0, 0, 0, 0],
    };
    let payload = Buffer::filled(&bench.arena, range.as_bytes());
    let discard = queue.raw_write(&discard, 16, payload).unwrap();
    assert_eq!(one(&mut queue, discard).1, Ok(()));
    assert!(read(&mut queue) == [0; 8192]);
    // The controller's own answer to a command that it does not know is returned.
    let compare = raw(nvm::COMPARE, 0, 1);
    let compare = queue.raw_write(&compare, 512, Buffer::new(&bench.arena, 4096)).unwrap();
    let result = one(&mut queue, compare).1;
    assert!(
        matches!(result, Err(CommandError::Status(status)) if status.code() == Status::INVALID_OPCODE)
    );
}

#[test]
fn what_does_not_fit_its_payload_is_refused() {
    let bench = small();
    let mut queue = bench.controller.create_queue(4).unwrap();
    let payload = || Buffer::new(&bench.arena, 8192);
    let size = 1 << 11;
    let limit = bench.controller.identify().max_transfer_bytes;
    let read = |queue: &mut TestQueue, command: RawCommand, bytes| {
        queue.raw_read(&command, bytes, payload()).unwrap_err().reason
    };
    let length = |needed, bytes| Reject::CommandLength { needed, bytes, limit };
    for bytes in [0, 512, 4095, 4097, 8192] {
        assert_eq!(read(&mut queue, raw(nvm::READ, 0, 8), bytes), length(4096, bytes));
    }
    assert_eq!(
        read(&mut queue, raw(nvm::READ, size - 1, 2), 1024),
        Reject::OutOfRange { nsid: 1, slba: 2047, blocks: 2, size: 2048 }
    );
    let (needed, has) = (16384, 8192);
    assert_eq!(
        read(&mut queue, raw(nvm::READ, 0, 32), 16384),
        Reject::PayloadTooShort { needed, has }
    );
    // One whose length the driver does not know: some bytes, of the payload, in one command.
    let vendor = raw(0x82, 0, 1);
    assert_eq!(read(&mut queue, vendor, 0), length(1, 0));
    assert_eq!(read(&mut queue, vendor, 8193), Reject::PayloadTooShort { needed: 8193, has });
    let long = u64::from(limit) + 1;
    assert_eq!(read(&mut queue, vendor, long), length(long, long));
    // The wrong way, or without a payload.
    let refused = |opcode| Reject::Direction { opcode };
    assert_eq!(read(&mut queue, raw(nvm::WRITE, 0, 1), 512), refused(nvm::WRITE));
    assert_eq!(read(&mut queue, raw(nvm::VERIFY, 0, 1), 512), refused(nvm::VERIFY));
    let write = queue.raw_write(&raw(nvm::READ, 0, 1), 512, payload()).unwrap_err();
    assert_eq!(write.reason, refused(nvm::READ));
    for opcode in [nvm::READ, nvm::WRITE] {
        assert_eq!(queue.raw(&raw(opcode, 0, 1)).unwrap_err().reason, refused(opcode));
    }
    assert_eq!(queue.raw(&raw(0x83, 0, 1)).unwrap_err().reason, Reject::NotSent { opcode: 0x83 });
    let cancel = queue.raw(&raw(nvm::CANCEL, 0, 1)).unwrap_err().reason;
    assert!(matches!(cancel, Reject::OwnedByDriver { .. }));
    let none = RawCommand { nsid: 9, ..raw(nvm::VERIFY, 0, 1) };
    assert_eq!(queue.raw(&none).unwrap_err().reason, Reject::NoSuchNamespace { nsid: 9 });
    assert_eq!((queue.in_flight(), queue.stats().commands), (0, 0));
}

/// A command of a vendor may add to a counter: twice is not once.
#[test]
fn a_command_is_sent_again_only_if_it_was_not_carried_out() {
    let (bench, clock) = rig();
    let mut queue = bench.controller.create_queue(4).unwrap();
    for (status, retried) in [(Status::NAMESPACE_NOT_READY, true), (Status::INTERNAL_ERROR, false)]
    {
        let vendor = |seen: &CommandInfo| seen.queue != 0 && seen.opcode == 0x80;
        bench.model.faults().inject(Trigger::Matches(Box::new(vendor)), Fault::Fail(status));
        let before = queue.stats().commands;
        let sent = queue.raw(&raw(0x80, 0, 1)).unwrap();
        let completed = poll_all(&bench, &mut queue);
        assert_eq!(completed.is_none(), retried);
        bench.model.faults().clear();
        clock.advance(2_000 * MS);
        let completed = completed.or_else(|| poll_all(&bench, &mut queue)).unwrap();
        assert!(matches!(sent.finish(completed), pinfold_nvme::driver::Outcome::Completed { .. }));
        assert_eq!(queue.stats().commands - before, 1 + u64::from(retried), "{status}");
    }
}

#[test]
fn an_admin_command_sends_or_receives_its_page() {
    let bench = small();
    let command = |opcode, cdw10| RawCommand { opcode, nsid: 0, cdw: [cdw10, 0, 0, 0, 0, 0] };
    let mut data = [0x55; 4096];
    // From the controller: zeroes follow what it has written.
    let identify = command(admin::IDENTIFY, 1);
    assert_eq!(bench.controller.admin(&identify, &mut data), Ok(0));
    assert_eq!((data[512] & 15, data[4095]), (6, 0));
    // To it; the data stay what they are.
    data = [0x55; 4096];
    let cache = feature::VOLATILE_WRITE_CACHE.into();
    let off = command(admin::SET_FEATURES, cache);
    assert_eq!(bench.controller.admin(&off, &mut data), Ok(0));
    assert_eq!(data, [0x55; 4096]);
    assert_eq!(bench.controller.admin(&command(admin::GET_FEATURES, cache), &mut data), Ok(0));
    // Refused: neither sent nor received.
    data = [0x55; 4096];
    let refused = bench.controller.admin(&command(admin::CREATE_SQ, 0), &mut data);
    assert!(matches!(refused, Err(Error::OwnedByDriver { .. })));
    assert!(bench.controller.admin(&command(admin::IDENTIFY, 0xee), &mut data).is_err());
    assert_eq!(data, [0x55; 4096]);
}
