//! [`Payload`], implemented and used from its page alone: records of parts of several mappings, and
//! a queue that holds them, gathers their segments and gives them back; and payloads that are
//! wrong, which a driver and an IOMMU turn into an error or into nothing.

use super::lists::{Page, Pages, walk_sgl};
use super::{Memory, Shared};
use pinfold_core::access::{Access, Bidirectional, Direction, FromDevice, ToDevice};
use pinfold_core::addr::{Iova, RangeError, Segment};
use pinfold_core::domain::{Domain, DomainId, Mapping, Payload, Pinned, Revoked};
use pinfold_core::gather::sgl::Sgl;
use pinfold_core::gather::{GatherError, LayoutError, Profile};
use pinfold_core::iova::IovaSpace;
use std::cell::Cell;
use std::fmt;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Parts of mappings of one domain, in the order of the data.
struct Record<D: Direction> {
    domain: DomainId,
    mappings: Vec<Mapping<Memory, D>>,
    /// The mapping of each part, and offset and length in it.
    parts: Vec<(usize, u64, u64)>,
}

impl<D: Direction> Record<D> {
    /// Returns `None`, after it has ended the mappings, if they are not of `domain`.
    fn new(domain: DomainId, mappings: Vec<Mapping<Memory, D>>) -> Option<Self> {
        let is_its = |mapping: &Mapping<Memory, D>| Payload::<D>::domain(mapping) == Some(domain);
        let all = mappings.iter().all(is_its);
        all.then_some(Self { domain, mappings, parts: Vec::new() })
    }

    /// Appends a part; returns whether the mapping has it.
    fn push(&mut self, mapping: usize, offset: u64, len: u64) -> bool {
        let end = offset.checked_add(len);
        let all = self.mappings.get(mapping).map_or(0, |mapping| mapping.iova().len());
        let inside = end.is_some_and(|end| end <= all);
        self.parts.extend(inside.then_some((mapping, offset, len)));
        inside
    }

    fn revoke(self) -> Vec<Revoked<Memory>> {
        self.mappings.into_iter().map(Mapping::revoke).collect()
    }
}

// SAFETY: each part is inside of its mapping (`push`), which the value owns, which is for `D` and of
// `domain` (`new`), and which is ended by a method that consumes the value. Parts are appended
// before the value is a payload in use: that takes `&mut self`, and a queue has the value.
unsafe impl<D: Direction> Payload<D> for Record<D> {
    fn segment(&self, index: usize) -> Option<Segment> {
        let &(mapping, offset, len) = self.parts.get(index)?;
        let iova = self.mappings.get(mapping)?.iova().start().checked_add(offset)?;
        Some(Segment { iova, len })
    }
    fn domain(&self) -> Option<DomainId> {
        Some(self.domain)
    }
}

/// A transfer that a queue has not accepted, with its payload.
struct Refused<P> {
    payload: P,
    reason: Reason,
}

impl<P> fmt::Debug for Refused<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.reason.fmt(f)
    }
}

#[derive(Debug, PartialEq)]
enum Reason {
    Domain,
    Short { has: u64 },
    Layout(LayoutError<super::lists::Used>),
}

/// A queue of one device, as the page says what a queue does: it asks for the domain and for the
/// segments, in order, up to the bytes of the transfer, once, and holds the payload.
struct Engine {
    unit: Shared,
    domain: DomainId,
    pages: Pages,
}

/// A payload at the device. Dropping it leaks the payload: the device may still use it.
struct Flying<P> {
    payload: ManuallyDrop<P>,
    sgl: Sgl<Page>,
    blocks: usize,
}

impl Engine {
    fn start<D: Direction, P: Payload<D>>(
        &mut self,
        payload: P,
        bytes: u64,
    ) -> Result<Flying<P>, Refused<P>> {
        if payload.domain() != Some(self.domain) {
            return Err(Refused { payload, reason: Reason::Domain });
        }
        let (mut segments, mut has) = (Vec::new(), 0);
        for index in 0.. {
            let Some(next) = payload.segment(index).filter(|_| has < bytes) else { break };
            let len = next.len.min(bytes - has);
            has += len;
            segments.extend((len > 0).then_some(Segment { len, ..next }));
        }
        if has < bytes {
            return Err(Refused { payload, reason: Reason::Short { has } });
        }
        let profile = Profile::new(u32::MAX, u64::MAX, 0, 1).unwrap();
        match Sgl::new(&profile, segments, &mut self.pages) {
            Ok(sgl) => {
                let blocks = usize::try_from(sgl.data_blocks()).unwrap();
                Ok(Flying { payload: ManuallyDrop::new(payload), sgl, blocks })
            }
            Err(error) => Err(Refused { payload, reason: Reason::Layout(error) }),
        }
    }

    /// Has the device work on the data blocks; returns those that it does not reach.
    fn run<P>(&self, flying: &Flying<P>, access: Access, data: &mut [u8]) -> usize {
        let (mut at, mut faults) = (0, 0);
        for (iova, len) in walk_sgl(&self.pages, &flying.sgl, flying.blocks) {
            let bytes = &mut data[at..at + usize::try_from(len).unwrap()];
            at += bytes.len();
            let reached =
                self.unit.reach(Segment { iova: Iova::new(iova), len }, access, |memory| {
                    let done = match access {
                        Access::WRITE => memory.copy_from_slice(0, bytes),
                        _ => memory.copy_to_slice(0, bytes),
                    };
                    done.unwrap();
                });
            faults += usize::from(!reached);
        }
        faults
    }

    fn finish<P>(&mut self, flying: Flying<P>) -> P {
        flying.sgl.release(&mut self.pages);
        assert_eq!(self.pages.counts().1, 0);
        ManuallyDrop::into_inner(flying.payload)
    }
}

fn stack() -> (Domain, Engine) {
    let unit = Shared::default();
    let domain = Domain::new(Arc::new(unit.clone()), IovaSpace::new(39).unwrap());
    let engine = Engine { unit, domain: domain.id(), pages: Pages::new(4096, 4096, 8) };
    (domain, engine)
}

fn record<D: Direction>(domain: &Domain, pages: &[usize], direction: D) -> Record<D> {
    let map = |&pages: &usize| domain.map(Memory::new(1, pages), direction).unwrap();
    Record::new(domain.id(), pages.iter().map(map).collect()).unwrap()
}

/// A header, a body that is read twice, nothing, and a part that adjoins the header.
const PARTS: [(usize, u64, u64); 5] =
    [(0, 4000, 64), (2, 100, 8000), (1, 0, 0), (2, 100, 8000), (0, 4064, 32)];

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((at * 7 + at / 251) % 251).unwrap()).collect()
}

#[test]
fn a_record_is_gathered_revoked_and_given_back() {
    let (domain, mut engine) = stack();
    let mut sent = record(&domain, &[1, 1, 3], ToDevice);
    for (mapping, (at, seed)) in [(0, (4000, 1)), (2, (0, 2))] {
        let memory = sent.mappings[mapping].memory();
        memory.copy_from_slice(at, &vec![seed; memory.len() - at]).unwrap();
    }
    assert!(PARTS.iter().all(|&(mapping, offset, len)| sent.push(mapping, offset, len)));
    assert!(!sent.push(0, 4000, 97) && !sent.push(3, 0, 1) && !sent.push(2, u64::MAX, 2));

    // All of it, then less: what is beyond is not the device's business.
    for bytes in [16_096_u64, 8_065] {
        // Moved, boxed, and to another thread.
        let boxed = Box::new(sent);
        let moved = std::thread::scope(|scope| scope.spawn(move || *boxed).join().unwrap());
        let flying = engine.start::<ToDevice, _>(moved, bytes).unwrap();
        let mut got = vec![0; usize::try_from(bytes).unwrap()];
        assert_eq!(engine.run(&flying, Access::WRITE, &mut got.clone()), flying.blocks);
        assert_eq!(engine.run(&flying, Access::READ, &mut got), 0, "in the order of the segments");
        let expected = [vec![1; 64], vec![2; 16_000], vec![1; 32]].concat();
        assert!(got == expected[..got.len()]);
        sent = engine.finish(flying);
    }

    let flying = engine.start::<ToDevice, _>(sent, 16_096).unwrap();
    let blocks = walk_sgl(&engine.pages, &flying.sgl, flying.blocks);
    let revoked = engine.finish(flying).revoke();
    for (iova, len) in blocks {
        let reached =
            engine.unit.reach(Segment { iova: Iova::new(iova), len }, Access::READ, |_| ());
        assert!(!reached, "it is revoked");
    }
    let all: Vec<Memory> = revoked.into_iter().map(|one| one.wait().unwrap()).collect();
    assert_eq!(
        all.iter().map(|memory| memory.memory().len()).collect::<Vec<_>>(),
        [4096, 4096, 12288]
    );
    assert_eq!((domain.stats().live, domain.stats().quarantined), (0, 0));
}

#[test]
fn a_device_writes_the_parts_of_a_record_and_nothing_beside_them() {
    let (domain, mut engine) = stack();
    for both in [false, true] {
        // For one direction, and for both.
        let (mut from, mut to) =
            (record(&domain, &[2, 1], FromDevice), record(&domain, &[2, 1], Bidirectional));
        let parts = [(0, 5, 4091), (1, 0, 9), (0, 4096, 4000)];
        assert!(parts.iter().all(|&(mapping, offset, len)| {
            from.push(mapping, offset, len) && to.push(mapping, offset, len)
        }));
        let mut data = pattern(8_100);
        let memory: Vec<Memory> = if both {
            let flying = engine.start::<Bidirectional, _>(to, 8_100).unwrap();
            assert_eq!(engine.run(&flying, Access::WRITE, &mut data), 0);
            engine.finish(flying).mappings.into_iter().map(|one| one.unmap().unwrap()).collect()
        } else {
            let flying = engine.start::<FromDevice, _>(from, 8_100).unwrap();
            assert_eq!(engine.run(&flying, Access::WRITE, &mut data), 0);
            engine.finish(flying).mappings.into_iter().map(|one| one.unmap().unwrap()).collect()
        };
        let bytes = |memory: &Memory| {
            let mut bytes = vec![0; memory.memory().len()];
            memory.memory().copy_to_slice(0, &mut bytes).unwrap();
            bytes
        };
        let rest = [0; 96];
        assert!(
            bytes(&memory[0]) == [&[0; 5][..], &data[..4091], &data[4100..], &rest[..]].concat()
        );
        assert!(bytes(&memory[1])[..] == [&data[4091..4100], &[0; 4087][..]].concat());
    }
}

#[test]
fn a_payload_that_does_not_fit_comes_back_with_the_reason() {
    let ((domain, mut engine), (_other, mut theirs)) = (stack(), stack());
    let mut payload = record(&domain, &[1], ToDevice);
    assert!(payload.push(0, 0, 1000));
    let refused = theirs.start::<ToDevice, _>(payload, 1000).err().unwrap();
    assert_eq!(refused.reason, Reason::Domain);
    let refused = engine.start::<ToDevice, _>(refused.payload, 1001).err().unwrap();
    assert_eq!(refused.reason, Reason::Short { has: 1000 });
    let empty = Record { parts: Vec::new(), ..refused.payload };
    let refused = engine.start::<ToDevice, _>(empty, 1).err().unwrap();
    assert_eq!(refused.reason, Reason::Short { has: 0 });
    let mappings = refused.payload.mappings;
    assert!(Record::new(theirs.domain, mappings).is_none());
    assert_eq!((domain.stats().live, domain.stats().quarantined), (0, 0));
}

/// A payload whose segments are what a function says: right ones, or not.
struct Said<F> {
    domain: DomainId,
    segment: F,
    drops: Arc<()>,
}

// SAFETY: violated on purpose. The device of these tests is software, which reaches what is mapped,
// and the memory of a map is the domain's until it is revoked.
unsafe impl<F: Fn(usize) -> Option<Segment>> Payload<Bidirectional> for Said<F> {
    fn segment(&self, index: usize) -> Option<Segment> {
        (self.segment)(index)
    }
    fn domain(&self) -> Option<DomainId> {
        Some(self.domain)
    }
}

fn said<F: Fn(usize) -> Option<Segment>>(engine: &Engine, segment: F) -> Said<F> {
    Said { domain: engine.domain, segment, drops: Arc::new(()) }
}

#[test]
fn segments_that_are_not_mapped_are_out_of_reach() {
    let (domain, mut engine) = stack();
    let mapping = domain.map(Memory::new(1, 1), ToDevice).unwrap();
    let live = mapping.segment();
    let past = Segment { len: live.len + 1, ..live };
    let nowhere = Segment { iova: Iova::new(1 << 38), len: 8 };
    for (segment, access) in [
        // Longer than its mapping, for the other direction, where nothing is mapped.
        (past, Access::READ),
        (live, Access::WRITE),
        (nowhere, Access::READ),
    ] {
        let payload = said(&engine, |index| (index == 0).then_some(segment));
        let flying = engine.start::<Bidirectional, _>(payload, segment.len).unwrap();
        let mut data = pattern(4097);
        assert_eq!(
            engine.run(&flying, access, &mut data[..usize::try_from(segment.len).unwrap()]),
            1
        );
        drop(engine.finish(flying));
    }
    let mut bytes = vec![1; 4096];
    mapping.memory().copy_to_slice(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0));
    // Revoked before the transfer, or while it is in flight.
    let payload = said(&engine, |index| (index == 0).then_some(live));
    let flying = engine.start::<Bidirectional, _>(payload, live.len).unwrap();
    drop(mapping.unmap().unwrap());
    assert_eq!(engine.run(&flying, Access::READ, &mut vec![0; 4096]), 1);
    drop(engine.finish(flying));
}

#[test]
fn segments_that_no_device_can_have_are_refused() {
    let (_domain, mut engine) = stack();
    let wraps = Segment { iova: Iova::new(u64::MAX - 4095), len: 8192 };
    let payload = said(&engine, |index| (index == 0).then_some(wraps));
    let drops = Arc::downgrade(&payload.drops);
    let refused = engine.start::<Bidirectional, _>(payload, 8192).err().unwrap();
    let Reason::Layout(LayoutError::Gather(GatherError::Range(RangeError::Wraps { .. }))) =
        refused.reason
    else {
        panic!("{:?}", refused.reason)
    };
    assert_eq!(engine.pages.counts().1, 0);
    assert!(drops.upgrade().is_some(), "it is given back");
}

/// Each segment is asked for once, so that one that changes is used as it was.
#[test]
fn segments_that_change_are_those_that_were_said_first() {
    let (domain, mut engine) = stack();
    let mapping = domain.map(Memory::new(1, 1), Bidirectional).unwrap();
    let (iova, asked) = (mapping.segment().iova, Cell::new(0_u64));
    let payload = said(&engine, |index| {
        let now = asked.replace(asked.get() + 1);
        assert_eq!(now, index as u64, "in order, and once");
        let iova = iova.checked_add(now * 16)?;
        (index < 256).then_some(Segment { iova, len: 8 })
    });
    let flying = engine.start::<Bidirectional, _>(payload, 256 * 8).unwrap();
    assert_eq!(engine.run(&flying, Access::READ, &mut vec![0; 2048]), 0);
    drop(engine.finish(flying));
    assert_eq!(asked.get(), 257);
}

#[test]
fn a_panic_of_a_payload_passes_through_and_nothing_is_sent() {
    let (domain, mut engine) = stack();
    let mapping = domain.map(Memory::new(1, 1), Bidirectional).unwrap();
    let segment = mapping.segment();
    let payload = said(&engine, |index| {
        assert!(index < 3, "as planned");
        Some(Segment { len: 8, ..segment })
    });
    let drops = Arc::downgrade(&payload.drops);
    let started = catch_unwind(AssertUnwindSafe(|| {
        engine.start::<Bidirectional, _>(payload, 4096).map(drop).is_ok()
    }));
    assert!(started.is_err() && drops.upgrade().is_none());
    assert_eq!(engine.pages.counts(), (0, 0, 0));
}
