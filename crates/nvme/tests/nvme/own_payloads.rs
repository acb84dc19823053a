//! Payloads of one's own, written from the page of [`Payload`], at a controller behind an IOMMU:
//! parts of several mappings; and wrong ones, which end as an error and change nothing.

use crate::common::pattern;
use crate::payloads::{Rig, rig_with};
use pinfold::{Buffer, Domain};
use pinfold_core::access::Bidirectional;
use pinfold_core::addr::{Iova, Segment};
use pinfold_core::domain::{DomainId, Mapping};
use pinfold_nvme::driver::{CommandError, Config, Outcome, Payload, Reject, Rejected};
use pinfold_nvme::spec::Status;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// Whose commands end with their first status.
fn rig(use_sgls: bool) -> Rig {
    rig_with(Config { use_sgls, retry_limit: Duration::ZERO, ..Config::default() })
}

impl Rig {
    fn map(&self, bytes: &[u8]) -> Mapping<Buffer, Bidirectional> {
        let buffer = self.arena.alloc_zeroed(bytes.len()).unwrap();
        buffer.memory().copy_from_slice(0, bytes).unwrap();
        self.domain.map(buffer, Bidirectional).unwrap()
    }

    /// Writes the payload to blocks, or reads them into it.
    fn transfer<P: Payload<Bidirectional>>(
        &mut self,
        write: bool,
        blocks: u32,
        payload: P,
    ) -> Result<(P, Result<(), CommandError>), Rejected<P>> {
        let in_flight = match write {
            true => self.queue.write(1, 3, blocks, payload)?,
            false => self.queue.read(1, 3, blocks, payload)?,
        };
        let completion = self.queue.wait().unwrap().unwrap();
        let Outcome::Completed { payload, result } = in_flight.finish(completion) else {
            panic!("not completed")
        };
        Ok((payload, result))
    }

    fn faults(&self) -> u64 {
        self.domain.soft_bus().unwrap().stats().faults
    }
}

fn bytes(mapping: &Mapping<Buffer, Bidirectional>) -> Vec<u8> {
    let mut bytes = vec![0; mapping.memory().len()];
    mapping.memory().copy_to_slice(0, &mut bytes).unwrap();
    bytes
}

/// Parts of mappings of one domain, in the order of the data.
struct Record {
    mappings: Vec<Mapping<Buffer, Bidirectional>>,
    /// The mapping of each part, and offset and length in it.
    parts: Vec<(usize, u64, u64)>,
}

// SAFETY: the tests name parts inside of the mappings, of one domain. The value owns them, and is
// not changed while a queue has it.
unsafe impl Payload<Bidirectional> for Record {
    fn segment(&self, index: usize) -> Option<Segment> {
        let &(mapping, offset, len) = self.parts.get(index)?;
        Some(Segment { iova: self.mappings[mapping].iova().start().checked_add(offset)?, len })
    }
    fn domain(&self) -> Option<DomainId> {
        self.mappings.first().and_then(Payload::<Bidirectional>::domain)
    }
}

#[test]
fn parts_of_several_mappings_are_one_transfer() {
    for use_sgls in [false, true] {
        let mut rig = rig(use_sgls);
        let data = pattern(5, 3 * 4096);
        let mappings = [rig.map(&data[..4096]), rig.map(&data[4096..])];
        // From within a page to its end, whole pages in another order, nothing, and the start of
        // one: as PRP entries have it.
        let parts = vec![(0, 4096 - 1536, 1536), (1, 4096, 4096), (0, 0, 0), (1, 0, 512)];
        let sent = [&data[4096 - 1536..4096], &data[2 * 4096..], &data[4096..4096 + 512]].concat();
        let blocks = u32::try_from(sent.len() / 512).unwrap();
        // A block less than the payload has, then all.
        for blocks in [blocks - 1, blocks] {
            let (part, beyond) = sent.split_at(blocks as usize * 512);
            let record = Record {
                mappings: mappings.iter().map(|mapping| rig.map(&bytes(mapping))).collect(),
                parts: parts.clone(),
            };
            let (record, result) = rig.transfer(true, blocks, record).unwrap();
            result.unwrap();
            record.mappings.into_iter().for_each(|mapping| drop(mapping.unmap().unwrap()));

            let zeros = [vec![0; 4096], vec![0; 8192]];
            let zeros = zeros.iter().map(|zeros| rig.map(zeros)).collect();
            let record = Record { mappings: zeros, parts: parts.clone() };
            let (record, result) = rig.transfer(false, blocks, record).unwrap();
            result.unwrap();
            let (first, second) = (bytes(&record.mappings[0]), bytes(&record.mappings[1]));
            let back = [&first[4096 - 1536..], &second[4096..], &second[..512]].concat();
            assert!(back == [part, &vec![0; beyond.len()]].concat(), "{blocks} blocks");
            assert!(first[..4096 - 1536].iter().chain(&second[512..4096]).all(|byte| *byte == 0));
        }
        assert_eq!(rig.faults(), 0);
    }
}

/// A payload whose segments are what a function says.
struct Said<'h, F> {
    domain: DomainId,
    segment: F,
    /// How many have been dropped.
    drops: &'h Cell<u32>,
}

impl<F> Drop for Said<'_, F> {
    fn drop(&mut self) {
        self.drops.set(self.drops.get() + 1);
    }
}

// SAFETY: violated on purpose. The controller is a model behind a software IOMMU, which reaches what
// is mapped; what the tests name without a mapping is mapped by nothing else meanwhile.
unsafe impl<F: Fn(usize) -> Option<Segment>> Payload<Bidirectional> for Said<'_, F> {
    fn segment(&self, index: usize) -> Option<Segment> {
        (self.segment)(index)
    }
    fn domain(&self) -> Option<DomainId> {
        Some(self.domain)
    }
}

fn one(segment: Segment) -> impl Fn(usize) -> Option<Segment> {
    move |index| (index == 0).then_some(segment)
}

#[test]
fn segments_that_are_not_mapped_are_a_transfer_error() {
    let (mut rig, other) = (rig(true), rig(true));
    let drops = Cell::new(0);
    let said = |rig: &Rig, segment| Said { domain: rig.domain.id(), segment, drops: &drops };
    let mapping = rig.map(&pattern(1, 4096));
    let live = mapping.segment();
    let longer = Segment { len: 2 * live.len, ..live };
    // Mapped, but for the devices of another domain, at an address that this one does not use.
    let is_ours = |at: Iova| rig.domain.mapped().unwrap().any(|run| run.iova.contains(at));
    let theirs: Vec<_> = (0..4).map(|_| other.map(&pattern(2, 4096))).collect();
    let theirs = theirs.iter().map(Mapping::segment).find(|one| !is_ours(one.iova)).unwrap();
    let nowhere = Segment { iova: Iova::new(1 << 30), len: 4096 };
    assert!(!is_ours(nowhere.iova));
    for (faults, (write, segment, blocks)) in
        (1..).zip([(true, longer, 16), (false, theirs, 8), (true, nowhere, 8)])
    {
        let (_, result) = rig.transfer(write, blocks, said(&rig, one(segment))).unwrap();
        assert_eq!(result, Err(CommandError::Status(Status::DATA_TRANSFER_ERROR)));
        assert!(rig.faults() >= faults, "the IOMMU has stopped it");
    }
    drop(mapping.unmap().unwrap());
    let (_, result) = rig.transfer(false, 8, said(&rig, one(live))).unwrap();
    assert_eq!(result, Err(CommandError::Status(Status::DATA_TRANSFER_ERROR)));
    assert_eq!(drops.get(), 4, "each comes back");
    assert_eq!(other.faults(), 0);
}

#[test]
fn segments_that_cannot_be_sent_come_back_with_the_reason() {
    for use_sgls in [false, true] {
        let mut rig = rig(use_sgls);
        let mapping = rig.map(&pattern(1, 4096));
        let (live, domain) = (mapping.segment(), rig.domain.id());
        let drops = Cell::new(0);
        let said = |domain, segment| Said { domain, segment, drops: &drops };
        let foreign = said(Domain::soft().unwrap().id(), one(live));
        let refused = rig.transfer(true, 8, foreign).err().unwrap();
        assert_eq!(refused.reason, Reject::OtherDomain);
        let short = said(domain, one(Segment { len: 4095, ..live }));
        let refused = rig.transfer(true, 8, short).err().unwrap();
        assert_eq!(refused.reason, Reject::PayloadTooShort { needed: 4096, has: 4095 });
        let nothing = said(domain, one(Segment { len: 0, ..live }));
        let refused = rig.transfer(true, 8, nothing).err().unwrap();
        assert_eq!(refused.reason, Reject::PayloadTooShort { needed: 4096, has: 0 });
        for len in [8192, u64::MAX] {
            let wraps = said(domain, one(Segment { iova: Iova::new(u64::MAX - 4095), len }));
            let refused = rig.transfer(true, 16, wraps).err().unwrap();
            assert!(matches!(refused.reason, Reject::Layout(_)), "{}", refused.reason);
        }
        assert_eq!(rig.faults(), 0);
        let (_, result) = rig.transfer(true, 8, mapping).unwrap();
        assert_eq!(result, Ok(()));
    }
}

#[test]
fn what_a_payload_says_first_holds_and_its_panic_sends_nothing() {
    let mut rig = rig(true);
    let mapping = rig.map(&pattern(1, 4096));
    let (live, domain) = (mapping.segment(), rig.domain.id());
    let (drops, asked) = (Cell::new(0), Cell::new(0));
    // Another address each time, of which only the first is mapped.
    let changes = |index| {
        let iova = live.iova.checked_add(asked.replace(asked.get() + 1) << 20)?;
        (index == 0).then_some(Segment { iova, len: 4096 })
    };
    let payload = Said { domain, segment: changes, drops: &drops };
    assert_eq!(rig.transfer(true, 8, payload).unwrap().1, Ok(()));

    let panics = |index| {
        assert!(index < 2, "as planned");
        Some(Segment { len: 512, ..live })
    };
    // More often than the queue is deep.
    for round in 2..20 {
        let payload = Said { domain, segment: panics, drops: &drops };
        let panicked = catch_unwind(AssertUnwindSafe(|| rig.transfer(true, 8, payload).is_ok()));
        assert_eq!((panicked.is_err(), drops.get()), (true, round));
    }
    assert_eq!((rig.queue.in_flight(), rig.faults()), (0, 0));
    mapping.memory().fill(0, 4096, 0).unwrap();
    let (mapping, result) = rig.transfer(false, 8, mapping).unwrap();
    assert_eq!((result, bytes(&mapping)), (Ok(()), pattern(1, 4096)));
}
