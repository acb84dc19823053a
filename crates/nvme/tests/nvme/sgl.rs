//! Payloads described by SGLs: which commands use one, and what cannot be described.

use crate::common::*;
use pinfold_core::access::Bidirectional;
use pinfold_core::addr::Segment;
use pinfold_core::domain::DomainId;
use pinfold_core::gather::GatherError;
use pinfold_core::gather::sgl::SglError;
use pinfold_nvme::driver::{Config, LayoutError, Payload, QueueStats, Reject};
use pinfold_nvme::spec::SglSupport;
use pinfold_nvme_model::ModelConfig;
use proptest::prelude::*;

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
}

#[test]
fn segments_that_the_controller_cannot_address_are_rejected() {
    let bench = start(SglSupport::DwordAligned, Config::default());
    let mut queue = bench.controller.create_queue(4).unwrap();
    let rejected = queue
        .write(1, 0, 2, Scattered::new(&bench, 8192, vec![(0, 510), (1000, 514)]))
        .unwrap_err();
    let Reject::Layout(LayoutError::Sgl(SglError::Gather(GatherError::Misaligned {
        align: 4,
        ..
    }))) = rejected.reason
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
