//! Payloads of commands: of one block from anywhere, bounced or in pages that their owner declares
//! shareable; described by SGLs, and those that cannot be described.

use crate::common::{namespaces, pattern, *};
use pinfold::memory::{BouncePool, OwnedMemory};
use pinfold::{Arena, Domain, MappingPolicy, Source};
use pinfold_core::access::{Bidirectional, Direction, FromDevice, ToDevice};
use pinfold_core::addr::Segment;
use pinfold_core::domain::DomainId;
use pinfold_core::gather::GatherError;
use pinfold_nvme::driver::{
    Config, Controller, InFlight, LayoutError, Outcome, Payload, Queue, QueueStats, Reject,
};
use pinfold_nvme::spec::SglSupport;
use pinfold_nvme_model::{ModelConfig, ModelController, ModelRegisters};
use proptest::prelude::*;
use std::ptr::NonNull;

/// A buffer as segments in any order.
#[derive(Debug)]
struct Scattered {
    buffer: Buffer,
    /// Offset and length of each segment.
    pieces: Vec<(usize, usize)>,
}

// SAFETY: the pieces are inside the buffer, as the tests choose them; otherwise as for `Buffer`.
unsafe impl Payload<Bidirectional> for Scattered {
    fn domain(&self) -> Option<DomainId> {
        Payload::<Bidirectional>::domain(&self.buffer)
    }
    fn segment(&self, index: usize) -> Option<Segment> {
        let &(offset, len) = self.pieces.get(index)?;
        Some(Segment { iova: self.buffer.iova().checked_add(offset as u64)?, len: len as u64 })
    }
}

impl Scattered {
    fn new(bench: &Bench, bytes: usize, pieces: Vec<(usize, usize)>) -> Self {
        Self { buffer: Buffer::new(&bench.arena, bytes), pieces }
    }

    fn len(&self) -> usize {
        self.pieces.iter().map(|piece| piece.1).sum()
    }

    fn fill(&self, bytes: &[u8]) {
        let mut rest = bytes;
        for &(offset, len) in &self.pieces {
            let (part, after) = rest.split_at(len);
            self.buffer.memory().copy_from_slice(offset, part).unwrap();
            rest = after;
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut all = Vec::new();
        for &(offset, len) in &self.pieces {
            let mut part = vec![0; len];
            self.buffer.memory().copy_to_slice(offset, &mut part).unwrap();
            all.extend(part);
        }
        all
    }
}

fn start(sgls: SglSupport, config: Config) -> Bench {
    bench(4096, ModelConfig { sgls, ..ModelConfig::new(namespaces(16 << 20)) }, config)
}

/// Writes and reads `payload` through `queue`, and checks the bytes.
fn round_trip(bench: &Bench, queue: &mut TestQueue, payload: Scattered) -> QueueStats {
    let before = queue.stats();
    let bytes = pattern(payload.len() as u64, payload.len());
    let blocks = (payload.len() / 512) as u32;
    payload.fill(&bytes);
    let write = queue.write(1, 7, blocks, payload).unwrap();
    let (payload, result) = one(queue, write);
    result.unwrap();
    payload.fill(&vec![0xee; bytes.len()]);
    let read = queue.read(1, 7, blocks, payload).unwrap();
    let (payload, result) = one(queue, read);
    result.unwrap();
    assert!(payload.bytes() == bytes);
    assert_eq!(bench.controller.stats().list_pages_used, 0);
    let after = queue.stats();
    QueueStats {
        commands: after.commands - before.commands,
        prp_entries: after.prp_entries - before.prp_entries,
        sgl_data_blocks: after.sgl_data_blocks - before.sgl_data_blocks,
        sgl_segment_pages: after.sgl_segment_pages - before.sgl_segment_pages,
        ..QueueStats::default()
    }
}

#[test]
fn a_large_segment_is_one_descriptor_and_two_pages_need_none() {
    let bench = start(SglSupport::AnyAlignment, Config::default());
    let mut queue = bench.controller.create_queue(4).unwrap();
    let stats = round_trip(&bench, &mut queue, Scattered::new(&bench, 1 << 20, vec![(0, 1 << 20)]));
    assert_eq!((stats.sgl_data_blocks, stats.sgl_segment_pages, stats.prp_entries), (2, 0, 0));
    let stats = round_trip(&bench, &mut queue, Scattered::new(&bench, 8192, vec![(0, 8192)]));
    assert_eq!((stats.sgl_data_blocks, stats.prp_entries), (0, 4));
    let polite = Config { use_sgls: false, ..Config::default() };
    let bench = start(SglSupport::AnyAlignment, polite);
    let mut queue = bench.controller.create_queue(4).unwrap();
    let stats = round_trip(&bench, &mut queue, Scattered::new(&bench, 1 << 20, vec![(0, 1 << 20)]));
    assert_eq!((stats.sgl_data_blocks, stats.prp_entries), (0, 512));
}

#[test]
fn whole_pages_use_a_prp_list_and_odd_segments_more_commands() {
    let config = Config { max_transfer_bytes: 8 << 20, ..Config::default() };
    let mut model = ModelConfig::new(namespaces(16 << 20));
    (model.sgls, model.mdts) = (SglSupport::AnyAlignment, 0);
    let bench = bench(4096, model, config);
    let mut queue = bench.controller.create_queue(4).unwrap();
    // Every other page, so that none are adjacent: more than 1,276 descriptors.
    let pages = (0..1400).map(|i| (i * 8192, 4096)).collect();
    let stats = round_trip(&bench, &mut queue, Scattered::new(&bench, 1400 * 8192, pages));
    assert_eq!((stats.commands, stats.sgl_data_blocks, stats.prp_entries), (2, 0, 2800));
    let odd = (0..4096).map(|i| (i * 1000, 129 - i % 2 * 2)).collect();
    let payload = Scattered::new(&bench, 4096 * 1000, odd);
    assert_eq!(payload.len() % 512, 0);
    let stats = round_trip(&bench, &mut queue, payload);
    assert!(stats.commands > 2 && stats.prp_entries == 0, "{stats:?}");
    assert!(stats.sgl_data_blocks >= 2 * 4096);
    // A half of which is no whole number of blocks: 1,025.
    let uneven = (0..4100).map(|i| (i * 900, 128)).collect();
    let stats = round_trip(&bench, &mut queue, Scattered::new(&bench, 4100 * 900, uneven));
    assert!(stats.commands > 2 && stats.prp_entries == 0, "{stats:?}");
}

#[test]
fn segments_that_the_controller_cannot_address_are_rejected() {
    let bench = start(SglSupport::DwordAligned, Config::default());
    let mut queue = bench.controller.create_queue(4).unwrap();
    let rejected = queue
        .write(1, 0, 2, Scattered::new(&bench, 8192, vec![(0, 510), (1000, 514)]))
        .unwrap_err();
    let Reject::Layout(LayoutError::Gather(GatherError::Misaligned { align: 4, .. })) =
        rejected.reason
    else {
        panic!("{rejected}")
    };
    assert_eq!(bench.controller.stats().list_pages_used, 0);
    let aligned = Scattered::new(&bench, 8192, vec![(0, 508), (1000, 516)]);
    assert_eq!(round_trip(&bench, &mut queue, aligned).sgl_data_blocks, 4);
}

#[test]
fn a_rejected_request_works_with_the_question_mark_operator() {
    fn boxed(queue: &mut TestQueue, payload: &Bench) -> Result<(), Box<dyn std::error::Error>> {
        drop(queue.write(9, 0, 1, Buffer::new(&payload.arena, 512))?);
        Ok(())
    }
    fn typed(queue: &mut TestQueue, payload: &Bench) -> Result<(), Reject> {
        drop(queue.write(9, 0, 1, Buffer::new(&payload.arena, 512))?);
        Ok(())
    }
    let bench = start(SglSupport::Unsupported, Config::default());
    let mut queue = bench.controller.create_queue(4).unwrap();
    assert!(boxed(&mut queue, &bench).unwrap_err().to_string().contains("namespace 9"));
    assert_eq!(typed(&mut queue, &bench), Err(Reject::NoSuchNamespace { nsid: 9 }));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn scattered_segments_round_trip(
        lens in proptest::collection::vec((1usize..3000, 0usize..900), 1..40),
        dwords in any::<bool>(),
        backwards in any::<bool>(),
    ) {
        let align = if dwords { 4 } else { 1 };
        let sgls = if dwords { SglSupport::DwordAligned } else { SglSupport::AnyAlignment };
        let bench = start(sgls, Config { max_transfer_bytes: 16 << 10, ..Config::default() });
        let mut queue = bench.controller.create_queue(4).unwrap();
        let (mut pieces, mut end) = (Vec::new(), 0usize);
        for (len, gap) in lens {
            let start = (end + gap).next_multiple_of(align);
            let len = len.next_multiple_of(align);
            pieces.push((start, len));
            end = start + len;
        }
        let total: usize = pieces.iter().map(|piece| piece.1).sum();
        let rest = total.next_multiple_of(512) - total;
        if rest > 0 {
            pieces.push((end + 64 - end % 4, rest));
            end += 64 + rest;
        }
        if backwards {
            pieces.reverse();
        }
        let payload = Scattered::new(&bench, end + 4096, pieces);
        round_trip(&bench, &mut queue, payload);
    }
}

/// Dropped in this order.
pub(crate) struct Rig {
    pub(crate) queue: Queue<ModelRegisters, Arena>,
    controller: Controller<ModelRegisters, Arena>,
    model: ModelController,
    pub(crate) arena: Arena,
    pub(crate) domain: Domain,
}

fn rig(use_sgls: bool) -> Rig {
    rig_with(Config { use_sgls, ..Config::default() })
}

pub(crate) fn rig_with(config: Config) -> Rig {
    let domain = Domain::soft().unwrap();
    let arena = Arena::builder().size(4 << 20).source(Source::Plain).build(&domain).unwrap();
    let model =
        ModelController::spawn(domain.port().unwrap(), ModelConfig::new(namespaces(8 << 20)))
            .unwrap();
    let controller = Controller::start(model.registers(), arena.clone(), config).unwrap();
    let queue = controller.create_queue(8).unwrap();
    Rig { queue, controller, model, arena, domain }
}

impl Rig {
    fn finish<P>(&mut self, in_flight: InFlight<P>) -> P {
        let completion = self.queue.wait().unwrap().unwrap();
        let Outcome::Completed { payload, result } = in_flight.finish(completion) else {
            panic!("not completed")
        };
        result.unwrap();
        payload
    }

    /// Ends it all; the accesses that faulted are those that the test asked for.
    fn end(self, faults: u64) {
        let Self { queue, controller, model, arena, domain } = self;
        assert_eq!(domain.soft_bus().unwrap().stats().faults, faults);
        drop((queue, controller, model));
        assert_eq!(arena.stats().frames_in_use, 0);
    }
}

fn reaches<D: Direction>(
    domain: &Domain,
    payload: &impl Payload<D>,
    ahead: u64,
    write: bool,
) -> bool {
    let at = payload.segment(0).unwrap().iova.checked_add(ahead).unwrap();
    let port = domain.port().unwrap();
    if write { port.write(at, &[0xee]).is_ok() } else { port.read(at, &mut [0]).is_ok() }
}

#[test]
fn an_unaligned_payload_is_bounced_there_and_back() {
    for use_sgls in [false, true] {
        let mut rig = rig(use_sgls);
        let to = BouncePool::<ToDevice>::new(&rig.arena).unwrap();
        let from = BouncePool::<FromDevice>::new(&rig.arena).unwrap();
        // From one block to as many as a pool takes, none of them aligned in the program.
        for (slba, blocks) in [(1, 1), (2, 2), (5, 8), (20, 9), (40, 32)] {
            let len = blocks as usize * 512;
            let program = pattern(slba, len + 3);
            let payload = to.copy_of(&program[3..]).unwrap();
            assert!(
                !reaches(&rig.domain, &payload, 0, true),
                "a device does not change what it is sent"
            );
            let write = rig.queue.write(1, slba, blocks, payload).unwrap();
            drop(rig.finish(write));

            let read = rig.queue.read(1, slba, blocks, from.alloc(len).unwrap()).unwrap();
            let payload = rig.finish(read);
            let mut back = vec![0xcc; len + 2];
            payload.memory().copy_to_slice(0, &mut back[1..=len]).unwrap();
            assert_eq!(back[1..=len], program[3..]);
            assert_eq!((back[0], back[len + 1]), (0xcc, 0xcc));
        }
        drop((to, from));
        rig.end(5);
    }
}

#[test]
fn a_payload_of_another_length_than_the_command_is_refused() {
    let mut rig = rig(false);
    let payload = BouncePool::<ToDevice>::new(&rig.arena).unwrap().copy_of(&[1; 511]).unwrap();
    let rejected = rig.queue.write(1, 0, 1, payload).unwrap_err();
    assert_eq!(rejected.payload.memory().len(), 511);
    drop(rejected);
    rig.end(0);
}

#[repr(align(4096))]
struct Slots([u8; 8192]);

#[test]
fn a_slot_of_shared_pages_is_transferred_alone() {
    let mut rig = rig(false);
    let slots = Box::leak(Box::new(Slots([0x5a; 8192])));
    slots.0[4608..5120].copy_from_slice(&pattern(9, 512));
    let pages = NonNull::from(&mut slots.0 as &mut [u8]);
    // SAFETY: the pages are leaked, and reached through this value alone.
    let memory = unsafe { OwnedMemory::sharing_pages(pages, 4608..5120, ()) }.unwrap();
    memory.map_into(&rig.domain, MappingPolicy::PerUse).unwrap();

    let domain = rig.domain.clone();
    let mapping = domain.map(memory.take().unwrap(), ToDevice).unwrap();
    let write = rig.queue.write(1, 7, 1, mapping).unwrap();
    let mapping = rig.finish(write);
    assert!(reaches(&domain, &mapping, 512, false), "the neighbour: it was declared shareable");
    let piece = mapping.unmap().unwrap();

    let mapping = domain.map(piece, FromDevice).unwrap();
    let read = rig.queue.read(1, 7, 1, mapping).unwrap();
    let piece = rig.finish(read).unmap().unwrap();
    let mut page = vec![0; 4096];
    piece.memory().copy_to_slice(0, &mut page).unwrap();
    assert_eq!(page[512..1024], pattern(9, 512));
    assert!(
        page[..512].iter().chain(&page[1024..]).all(|&byte| byte == 0x5a),
        "no neighbour was written"
    );
    drop((piece, memory, domain));
    rig.end(0);
}
