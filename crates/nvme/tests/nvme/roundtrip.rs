//! Data that is written is read back: for all sizes, depths, segments and transfer limits, and in random
//! operations against an array of bytes.

use crate::common::*;
use pinfold_nvme::driver::{Config, Error, InFlight, Outcome, Reject};
use pinfold_nvme::spec::{Command, admin, cns};
use pinfold_nvme_model::{Fault, FileMedia, ModelConfig, Namespace, Trigger};
use proptest::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

#[test]
fn the_controller_identifies_itself() {
    let mut model = ModelConfig::new(namespaces(8 << 20));
    (model.mdts, model.mqes, model.queues) = (5, 63, 3);
    let bench = bench(256, model, Config::default());
    let identity = bench.controller.identify();
    assert_eq!(identity.model, "Pinfold model controller");
    assert_eq!(identity.version, (2, 0, 0));
    assert_eq!(
        (identity.max_transfer_bytes, identity.max_queue_entries, identity.queues),
        (128 << 10, 64, 3)
    );
    assert!(identity.can_discard && identity.volatile_cache);
    let namespaces = bench.controller.namespaces();
    let seen: Vec<_> =
        namespaces.iter().map(|n| (n.nsid, n.blocks, n.block_bytes, n.discard_zeroes)).collect();
    assert_eq!(seen, [(1, 16384, 512, true), (2, 2048, 4096, true)]);
    assert_eq!(
        bench.controller.create_queue(64).unwrap_err(),
        Error::Depth { depth: 64, limit: 63 }
    );
    assert_eq!(bench.controller.create_queue(0).unwrap_err(), Error::Depth { depth: 0, limit: 63 });
    let queues: Vec<_> = (0..3).map(|_| bench.controller.create_queue(63).unwrap()).collect();
    assert_eq!(bench.controller.create_queue(1).unwrap_err(), Error::NoQueueLeft { limit: 3 });
    drop(queues);
    assert_eq!(bench.controller.create_queue(1).unwrap().id(), 1);
}

#[test]
fn all_sizes_round_trip_at_any_transfer_limit() {
    for (mdts, skip) in [(1, 0), (1, 1028), (8, 0), (0, 2052)] {
        let mut model = ModelConfig::new(namespaces(32 << 20));
        model.mdts = mdts;
        let bench = bench(6000, model, Config { max_transfer_bytes: 8 << 20, ..Config::default() });
        let mut queue = bench.controller.create_queue(4).unwrap();
        for (nsid, block) in [(1, 512usize), (2, 4096)] {
            for blocks in
                [1, 2, 3, 7, 8, 9, 64, 511, 512, 513, 2048].into_iter().chain([(8 << 20) / block])
            {
                let bytes = pattern((blocks * block) as u64, blocks * block);
                let mut source = Buffer::new(&bench.arena, bytes.len() + skip);
                source.skip = skip;
                source.memory().copy_from_slice(0, &bytes).unwrap();
                let write = queue.write(nsid, 5, blocks as u32, source).unwrap();
                let (source, result) = one(&mut queue, write);
                result.unwrap();
                drop(source);
                let mut target = Buffer::new(&bench.arena, bytes.len() + skip);
                target.skip = skip;
                let read = queue.read(nsid, 5, blocks as u32, target).unwrap();
                let (target, result) = one(&mut queue, read);
                result.unwrap();
                assert!(
                    target.bytes(bytes.len()) == bytes,
                    "{blocks} blocks of {block}, mdts {mdts}"
                );
            }
        }
        let stats = queue.stats();
        assert_eq!((stats.errors, stats.spurious_completions, stats.bad_heads), (0, 0, 0));
        assert_eq!(bench.controller.stats().list_pages_used, 0);
        assert!(bench.controller.stats().list_pages_max > 0 || mdts == 1);
    }
}

#[test]
fn several_segments_are_one_payload() {
    let bench = bench(
        2000,
        ModelConfig::new(namespaces(8 << 20)),
        Config { max_transfer_bytes: 64 << 10, ..Config::default() },
    );
    let mut queue = bench.controller.create_queue(2).unwrap();
    let bytes = pattern(1, 300_032);
    let mut source = Buffer::new(&bench.arena, bytes.len() + 512);
    (source.skip, source.cut) = (512, 3);
    source.memory().copy_from_slice(0, &bytes).unwrap();
    let write = queue.write(1, 0, 586, source).unwrap();
    one(&mut queue, write).1.unwrap();
    assert_eq!(queue.stats().segments, 25);
    let read = queue.read(1, 0, 586, Buffer::new(&bench.arena, bytes.len())).unwrap();
    let (target, result) = one(&mut queue, read);
    result.unwrap();
    assert_eq!(target.bytes(bytes.len()), bytes);
}

#[test]
fn every_depth_wraps_and_reports_when_it_is_full() {
    let model = ModelConfig::new(namespaces(8 << 20));
    let bench = bench(2000, model, Config::default());
    for depth in [1, 2, 3, 31, 32, 63, 64, 65, 128, 255, 256] {
        let mut queue = bench.controller.create_queue(depth).unwrap();
        let mut flying: HashMap<usize, (u64, InFlight<Buffer>)> = HashMap::new();
        let (mut next, mut done) = (0u64, 0u64);
        // Often enough for the rings to wrap twice.
        let total = 2 * depth.max(64) as u64 + 3;
        while done < total {
            while next < total {
                let payload = Buffer::filled(&bench.arena, &pattern(next, 512));
                match queue.write(1, next, 1, payload) {
                    Ok(in_flight) => {
                        assert!(in_flight.tag() < depth);
                        assert!(flying.insert(in_flight.tag(), (next, in_flight)).is_none());
                        next += 1;
                    }
                    Err(rejected) => {
                        assert_eq!(rejected.reason, Reject::QueueFull { depth });
                        assert_eq!(rejected.payload.bytes(512), pattern(next, 512));
                        break;
                    }
                }
            }
            queue.ring_doorbell();
            let completion = queue.wait().unwrap().unwrap();
            let (number, in_flight) = flying.remove(&completion.tag()).unwrap();
            let Outcome::Completed { payload, result } = in_flight.finish(completion) else {
                panic!()
            };
            result.unwrap();
            assert_eq!(payload.bytes(512), pattern(number, 512));
            done += 1;
        }
        assert!(queue.wait().unwrap().is_none());
        let read = queue
            .read(1, 0, total as u32, Buffer::new(&bench.arena, total as usize * 512))
            .unwrap();
        let (back, result) = one(&mut queue, read);
        result.unwrap();
        for (number, block) in (0..).zip(back.bytes(total as usize * 512).chunks(512)) {
            assert!(block == pattern(number, 512), "block {number} at depth {depth}");
        }
    }
    assert_eq!(bench.model.stats().bad_doorbells, 0);
}

#[test]
fn impossible_requests_are_rejected_with_reason_and_payload() {
    let bench = bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
    let mut queue = bench.controller.create_queue(4).unwrap();
    let buffer = || Buffer::new(&bench.arena, 8192);
    let reason = |result: Result<InFlight<Buffer>, pinfold_nvme::driver::Rejected<Buffer>>| {
        result.unwrap_err().reason
    };
    assert_eq!(reason(queue.read(3, 0, 1, buffer())), Reject::NoSuchNamespace { nsid: 3 });
    assert_eq!(reason(queue.read(0, 0, 1, buffer())), Reject::NoSuchNamespace { nsid: 0 });
    let outside = |slba, blocks| Reject::OutOfRange { nsid: 1, slba, blocks, size: 2048 };
    assert_eq!(reason(queue.write(1, 2048, 1, buffer())), outside(2048, 1));
    assert_eq!(reason(queue.write(1, u64::MAX, 2, buffer())), outside(u64::MAX, 2));
    assert_eq!(reason(queue.write(1, 0, 0, buffer())), outside(0, 0));
    assert_eq!(
        reason(queue.write(1, 0, 17, buffer())),
        Reject::PayloadTooShort { needed: 8704, has: 8192 }
    );
    let mut crooked = buffer();
    crooked.skip = 2;
    assert!(matches!(reason(queue.write(1, 0, 1, crooked)), Reject::Layout(_)));
    assert_eq!(queue.discard(1, 2000, 49).unwrap_err().reason, outside(2000, 49));
    assert_eq!((queue.in_flight(), queue.stats().commands), (0, 0));
    assert_eq!(bench.arena.0.used(), bench.arena.0.used());
}

#[test]
fn discarded_blocks_read_as_zeroes_and_flush_works() {
    let dir = tempfile::tempdir().unwrap();
    let media = Arc::new(FileMedia::open(&dir.path().join("image"), Some(4 << 20)).unwrap());
    let model = ModelConfig::new(vec![Namespace::new(media, 4096).unwrap()]);
    let bench = bench(2000, model, Config::default());
    let mut queue = bench.controller.create_queue(4).unwrap();
    let bytes = pattern(5, 1 << 20);
    let write = queue.write(1, 3, 256, Buffer::filled(&bench.arena, &bytes)).unwrap();
    one(&mut queue, write).1.unwrap();
    let flush = queue.flush(1).unwrap();
    one(&mut queue, flush).1.unwrap();
    let discard = queue.discard(1, 10, 20).unwrap();
    one(&mut queue, discard).1.unwrap();
    let read = queue.read(1, 3, 256, Buffer::new(&bench.arena, 1 << 20)).unwrap();
    let (back, result) = one(&mut queue, read);
    result.unwrap();
    let mut expected = bytes;
    expected[7 * 4096..27 * 4096].fill(0);
    assert!(back.bytes(1 << 20) == expected);
    assert_eq!(bench.controller.stats().list_pages_used, 0);
}

#[test]
fn zeroes_are_written_without_a_payload() {
    let mut model = ModelConfig::new(namespaces(4 << 20));
    model.mdts = 4;
    let bench = bench(2048, model, Config::default());
    let mut queue = bench.controller.create_queue(4).unwrap();
    for (nsid, block) in [(1, 512), (2, 4096)] {
        let blocks = (2 << 20) / block;
        let bytes = pattern(7, 2 << 20);
        let write = queue.write(nsid, 0, blocks, Buffer::filled(&bench.arena, &bytes)).unwrap();
        one(&mut queue, write).1.unwrap();
        let before = queue.stats();
        // Not at the limits of the largest transfer of 64 KiB.
        let zeroes = queue.write_zeroes(nsid, 3, blocks - 8).unwrap();
        one(&mut queue, zeroes).1.unwrap();
        let commands = queue.stats().commands - before.commands;
        assert_eq!(commands, u64::from((blocks - 8) * block).div_ceil(64 << 10));
        assert_eq!(queue.stats().segments, before.segments);
        let read = queue.read(nsid, 0, blocks, Buffer::new(&bench.arena, 2 << 20)).unwrap();
        let after = one(&mut queue, read).0.bytes(2 << 20);
        let (from, to) = (3 * block as usize, (blocks - 5) as usize * block as usize);
        assert!(after[..from] == bytes[..from] && after[to..] == bytes[to..]);
        assert!(after[from..to].iter().all(|byte| *byte == 0));
    }
    let size = u32::try_from(bench.controller.namespaces()[0].blocks).unwrap();
    for (slba, blocks) in [(u64::from(size), 1), (0, 0), (1, size)] {
        let error = queue.write_zeroes(1, slba, blocks).unwrap_err().reason;
        assert!(matches!(error, Reject::OutOfRange { .. }), "{error}");
    }

    // A controller without the command is not sent it.
    let identify = |command: &Command, data: &mut [u8]| {
        if command.opcode == admin::IDENTIFY
            && command.cdw10.get() & 0xff == u32::from(cns::CONTROLLER)
        {
            data[520] &= !(1 << 3);
        }
    };
    bench.model.faults().tamper(identify);
    bench.controller.reset().unwrap();
    let mut queue = bench.controller.create_queue(4).unwrap();
    assert_eq!(queue.write_zeroes(1, 0, 8).unwrap_err().reason, Reject::NoWriteZeroes);
}

#[test]
fn everything_is_released() {
    let arena = Arena(Memory::new(512));
    let model = pinfold_nvme_model::ModelController::spawn(
        arena.clone(),
        ModelConfig::new(namespaces(1 << 20)),
    )
    .unwrap();
    for _ in 0..3 {
        let controller = pinfold_nvme::driver::Controller::start(
            model.registers(),
            arena.clone(),
            Config::default(),
        )
        .unwrap();
        let mut queue = controller.create_queue(8).unwrap();
        let write = queue.write(1, 0, 64, Buffer::new(&arena, 32768)).unwrap();
        one(&mut queue, write).1.unwrap();
        drop(controller);
        drop(queue);
        assert_eq!(arena.0.used(), 0);
    }
}

const BYTES: usize = 2 << 20;

#[derive(Clone, Debug)]
enum Op {
    Write { slba: u64, blocks: u32, seed: u64 },
    Read { slba: u64, blocks: u32 },
    Discard { slba: u64, blocks: u32 },
    Flush,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    // Many small ones and a few large ones.
    let blocks = prop_oneof![4 => 1u32..20, 1 => 1u32..400];
    let at = (0u64..4096, blocks);
    let op = prop_oneof![
        4 => (at.clone(), any::<u64>()).prop_map(|((slba, blocks), seed)| Op::Write { slba, blocks, seed }),
        4 => at.clone().prop_map(|(slba, blocks)| Op::Read { slba, blocks }),
        1 => at.prop_map(|(slba, blocks)| Op::Discard { slba, blocks }),
        1 => Just(Op::Flush),
    ];
    proptest::collection::vec(op, 1..80)
}

enum Pending {
    Data(InFlight<Buffer>, Option<Vec<u8>>),
    Other(InFlight<()>),
}

struct Runner {
    bench: Bench,
    queue: TestQueue,
    nsid: u32,
    block: usize,
    model: Vec<u8>,
    in_flight: Vec<(Pending, Range<u64>)>,
}

impl Runner {
    fn complete_one(&mut self) {
        let completion = self.queue.wait().unwrap().unwrap();
        let tag = completion.tag();
        let at = self.in_flight.iter().position(|(pending, _)| match pending {
            Pending::Data(f, _) => f.tag() == tag,
            Pending::Other(f) => f.tag() == tag,
        });
        match self.in_flight.swap_remove(at.unwrap()).0 {
            Pending::Data(f, expected) => {
                let Outcome::Completed { payload, result } = f.finish(completion) else { panic!() };
                result.unwrap();
                if let Some(expected) = expected {
                    assert!(payload.bytes(expected.len()) == expected);
                }
            }
            Pending::Other(f) => {
                let Outcome::Completed { result, .. } = f.finish(completion) else { panic!() };
                result.unwrap();
            }
        }
    }

    fn make_room(&mut self, range: &Range<u64>) {
        let clash = |(_, r): &(Pending, Range<u64>)| r.start < range.end && range.start < r.end;
        while self.in_flight.iter().any(clash) || self.in_flight.len() == self.queue.depth() {
            self.complete_one();
        }
    }

    fn apply(&mut self, op: Op) {
        let last = (BYTES / self.block) as u64;
        let clip = |slba: u64, blocks: u32| {
            let slba = slba % last;
            slba..(slba + u64::from(blocks)).min(last)
        };
        let bytes = |r: &Range<u64>| r.start as usize * self.block..r.end as usize * self.block;
        let count = |r: &Range<u64>| (r.end - r.start) as u32;
        match op {
            Op::Write { slba, blocks, seed } => {
                let range = clip(slba, blocks);
                let at = bytes(&range);
                self.make_room(&range);
                let data = pattern(seed, at.len());
                let payload = Buffer::filled(&self.bench.arena, &data);
                self.model[at].copy_from_slice(&data);
                let write =
                    self.queue.write(self.nsid, range.start, count(&range), payload).unwrap();
                self.in_flight.push((Pending::Data(write, None), range));
            }
            Op::Read { slba, blocks } => {
                let range = clip(slba, blocks);
                let at = bytes(&range);
                self.make_room(&range);
                let payload = Buffer::new(&self.bench.arena, at.len());
                let read = self.queue.read(self.nsid, range.start, count(&range), payload).unwrap();
                self.in_flight.push((Pending::Data(read, Some(self.model[at].to_vec())), range));
            }
            Op::Discard { slba, blocks } => {
                let range = clip(slba, blocks);
                let at = bytes(&range);
                self.make_room(&range);
                self.model[at].fill(0);
                let discard = self.queue.discard(self.nsid, range.start, count(&range)).unwrap();
                self.in_flight.push((Pending::Other(discard), range));
            }
            Op::Flush => {
                self.make_room(&(0..0));
                let flush = self.queue.flush(self.nsid).unwrap();
                self.in_flight.push((Pending::Other(flush), 0..0));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn random_operations_agree_with_an_array(
        ops in ops(),
        depth in 1usize..12,
        mdts in 0u8..6,
        mqes in 1u16..70,
        nsid in 1u32..3,
        reorder in 2u64..6,
    ) {
        let mut config = ModelConfig::new(namespaces(BYTES as u64));
        (config.mdts, config.mqes, config.stride_shift) = (mdts, mqes, mdts & 3);
        let bench = bench(9000, config, Config::default());
        bench.model.faults().inject(Trigger::Every(reorder), Fault::Reorder(3));
        let depth = depth.min(bench.controller.max_depth());
        let queue = bench.controller.create_queue(depth).unwrap();
        let block = if nsid == 1 { 512 } else { 4096 };
        let mut runner = Runner { bench, queue, nsid, block, model: vec![0; BYTES], in_flight: Vec::new() };
        for op in ops {
            runner.apply(op);
        }
        while !runner.in_flight.is_empty() {
            runner.complete_one();
        }
        let Runner { bench, queue, .. } = runner;
        prop_assert_eq!(queue.stats().spurious_completions, 0);
        drop(queue);
        prop_assert_eq!(bench.controller.stats().list_pages_used, 0);
        drop(bench.controller);
        prop_assert_eq!(bench.arena.0.used(), 0);
    }
}
