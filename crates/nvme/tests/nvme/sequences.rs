//! Random operations against an array of bytes.

use crate::common::*;
use pinfold_nvme::driver::{Config, InFlight, Outcome};
use pinfold_nvme_model::{Fault, ModelConfig, Trigger};
use proptest::prelude::*;
use std::ops::Range;

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
