//! Every interleaving of two owners, on a zone of one or two regions.
//!
//! A cell models the memory of each frame: the model checker reports two concurrent owners, and
//! accesses of one owner that do not happen before the next owner's. An owner writes the cell when
//! it has got the frame and before it frees it, as a program would.

use super::map::Part;
use super::*;
use loom::cell::UnsafeCell;
use loom::thread;
use std::ops::Deref;
use std::sync::Arc;

mod regions;

fn model(check: impl Fn() + Sync + Send + 'static) {
    model_with(Some(2), check);
}

fn model_with(preemptions: Option<usize>, check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 20_000;
    builder.check(check);
}

/// Makes loom try both orders of the operations of one thread before [`meet`](Self::meet) and those
/// of another behind it; orders no memory.
///
/// Loom compares an operation with the last one on the same atomic alone. So where a thread reads
/// an atomic right before it changes it, loom does not see that another thread has read it before,
/// and tries one order.
#[derive(Clone, Default)]
struct Race(Arc<loom::sync::atomic::AtomicUsize>);

impl Race {
    fn meet(&self) {
        self.0.fetch_add(1, loom::sync::atomic::Ordering::Relaxed);
    }
}

/// A zone, and the cells that model the memory of its frames.
#[derive(Clone)]
struct Model {
    zone: Zone,
    memory: Arc<Memory>,
}

struct Memory(Vec<UnsafeCell<u32>>);

// SAFETY: only the owner of a frame accesses its cell, which is what loom checks.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

impl Deref for Model {
    type Target = Zone;
    fn deref(&self) -> &Zone {
        &self.zone
    }
}

/// The calls of a zone, by a caller that uses the memory of its frames.
impl Model {
    /// Like [`Zone::with_slots`].
    fn with_slots(frames: u32, slots: u32) -> Self {
        let memory = (0..frames).map(|_| UnsafeCell::new(0)).collect();
        Self { zone: Zone::with_slots(frames, slots), memory: Arc::new(Memory(memory)) }
    }

    /// Accesses the memory of a run as its only owner: of the first three frames of each word (no
    /// model has more owners in one), and of the last.
    fn touch(&self, first: Frame, frames: u32) {
        let last = first.index() + frames - 1;
        for index in (first.index()..=last).filter(|index| index % 64 < 3 || *index == last) {
            // SAFETY: loom reports any access that is not exclusive.
            self.memory.0[index as usize].with_mut(|memory| unsafe { *memory += 1 });
        }
    }

    fn alloc(&self, order: Order) -> Result<Frame, FrameError> {
        self.zone.alloc(order).inspect(|&frame| self.touch(frame, order.frames()))
    }

    fn alloc_run(&self, frames: u32, align: u32) -> Result<Frame, FrameError> {
        self.zone.alloc_run(frames, align).inspect(|&frame| self.touch(frame, frames))
    }

    fn free(&self, frame: Frame, order: Order) -> Result<(), FrameError> {
        self.touch(frame, order.frames());
        self.zone.free(frame, order)
    }

    fn free_run(&self, first: Frame, frames: u32) -> Result<(), FrameError> {
        self.touch(first, frames);
        self.zone.free_run(first, frames)
    }

    /// Fills slots that are empty.
    fn fill(&self, slots: &mut [Option<Frame>]) -> usize {
        assert!(slots.iter().all(Option::is_none));
        let filled = self.zone.local().fill(slots);
        slots.iter().flatten().for_each(|&frame| self.touch(frame, 1));
        filled
    }

    fn free_bulk(&self, slots: &mut [Option<Frame>]) -> Result<usize, FrameError> {
        slots.iter().flatten().for_each(|&frame| self.touch(frame, 1));
        self.zone.local().free_bulk(slots)
    }

    /// Claims a frame of a region, as a call that has found the region by its hints.
    fn claim_in(&self, region: u32) -> Option<Part> {
        self.zone.0.claim_in(region, 1).inspect(|part| self.touch(part.first(), 1))
    }
}

/// Returns a zone of one region, which is allocated as a run.
fn whole(slots: u32) -> (Model, Frame) {
    let zone = Model::with_slots(512, slots);
    let first = zone.alloc(Order::HUGE).unwrap();
    (zone, first)
}

/// Returns a zone of which all frames are allocated, and can be freed one by one.
fn full(slots: u32) -> (Model, Frame) {
    let (zone, first) = whole(slots);
    zone.0.split(0);
    (zone, first)
}

/// A claim against a free of the only free frame: the frame is allocated once, by this claim or the
/// next. This fails if the hints are read before the map is changed.
#[test]
fn loom_a_claim_against_a_free() {
    model(|| {
        let (zone, frame) = full(0);
        let other = thread::spawn({
            let zone = zone.clone();
            move || zone.free(frame, Order::PAGE).unwrap()
        });
        let early = zone.alloc(Order::PAGE).ok();
        other.join().unwrap();
        let late = zone.alloc(Order::PAGE).ok();
        assert_eq!((early.is_some(), early.or(late)), (late.is_none(), Some(frame)));
        assert_eq!(zone.taken(), 512);
    });
}

/// Two owners reserve regions, one partly free and one whole: no frame is allocated twice, and all
/// are found afterwards.
#[test]
fn loom_reservations() {
    model(|| {
        let zone = Model::with_slots(1000, 2);
        let owner = |zone: Model| {
            move || {
                let mut local = zone.local();
                let frame = local.alloc(Order::PAGE).unwrap();
                zone.touch(frame, 1);
                assert!(local.held() > 0);
                frame
            }
        };
        let other = thread::spawn(owner(zone.clone()));
        let mine = owner(zone.clone())();
        let theirs = other.join().unwrap();
        assert_ne!(mine, theirs);
        assert_eq!(zone.taken(), 2);
        let rest = zone.local().take_list(2000);
        assert_eq!(rest.len(), 998);
        rest.for_each(|frame| zone.touch(frame, 1));
    });
}

/// The same frame freed by two threads at once: one of them gets the error.
#[test]
fn loom_a_double_free_is_reported_once() {
    model(|| {
        let (zone, frame) = full(0);
        let other = thread::spawn({
            let zone = zone.clone();
            move || zone.zone.free(frame, Order::PAGE).is_ok()
        });
        let mine = zone.zone.free(frame, Order::PAGE).is_ok();
        assert!(mine ^ other.join().unwrap());
        assert_eq!(zone.taken(), 511);
    });
}

/// A bulk call against the free of a run: no frame is allocated twice, and all others can be
/// allocated afterwards.
#[test]
fn loom_a_fill_against_a_free_in_bulk() {
    model(|| {
        let (zone, first) = full(0);
        let other = thread::spawn({
            let zone = zone.clone();
            move || zone.free_run(first, 128).unwrap()
        });
        let mut slots = [None; 3];
        let early = zone.local().fill(&mut slots);
        assert_eq!(early, slots.iter().flatten().count());
        other.join().unwrap();
        assert_eq!(zone.taken(), 512 - 128 + early as u64);
        let mut rest = [None; 3];
        assert_eq!(zone.local().fill(&mut rest[early..]), 3 - early);
        slots[early..].copy_from_slice(&rest[early..]);
        assert_eq!(zone.local().take_list(200).len(), 125);
        zone.local().free_bulk(&mut slots).unwrap();
        assert_eq!(zone.taken(), 512 - 128);
        assert_eq!(zone.stats().in_use, 512 - 128);
        assert!(!zone.under_pressure(), "relieved by the thread that freed last");
    });
}

/// An owner that caches all free frames, and another alloc that fails meanwhile: under pressure the
/// owner frees them.
#[test]
fn loom_pressure_against_a_magazine() {
    model(|| {
        let zone = Model::with_slots(512, 1);
        let all = zone.alloc(Order::HUGE).unwrap();
        zone.free_run(all, 2).unwrap();
        let other = thread::spawn({
            let zone = zone.clone();
            move || zone.alloc(Order::PAGE).ok()
        });
        let mut local = zone.local();
        let mine = local.alloc(Order::PAGE).ok();
        mine.iter().for_each(|&frame| zone.touch(frame, 1));
        let theirs = other.join().unwrap();
        assert!(mine.is_none() || mine != theirs);
        assert!(mine.is_some() || theirs.is_some());
        drop(local);
        let late = zone.alloc(Order::PAGE).ok();
        let got = [mine, theirs, late].into_iter().flatten().count();
        assert_eq!((got, zone.taken()), (2, 512));
    });
}

/// A run claimed word by word against a concurrent single claim: no frame has two owners, a run
/// that fails at one word releases the others, and the hints are correct afterwards.
#[test]
fn loom_a_range_against_single_claims() {
    model(|| {
        let zone = Model::with_slots(512, 0);
        let _front = zone.alloc_run(256, 1).unwrap();
        let other = thread::spawn({
            let zone = zone.clone();
            move || zone.alloc(Order::PAGE).unwrap()
        });
        let run = zone.alloc_run(128, 128).unwrap();
        let single = other.join().unwrap();
        let claimed = run.index()..run.index() + 128;
        assert!(!claimed.contains(&single.index()), "{single} is in the run from {run}");
        assert_eq!(zone.taken(), 256 + 128 + 1);
        zone.free(single, Order::PAGE).unwrap();
        assert!(zone.alloc_run(128, 128).is_ok(), "the rest is whole again, and is found");
        assert_eq!(zone.taken(), 512);
    });
}

/// A run of two regions, or of one and two words, against a claim of one frame that it reaches last:
/// a run that fails there gives back what it has claimed, which is found.
#[test]
fn loom_a_run_of_regions_against_a_single_claim() {
    for frames in [1024, 512 + 128] {
        model(move || {
            let zone = Model::with_slots(1536, 0);
            // The run does not start at the first frame.
            zone.alloc(Order::HUGE).unwrap();
            let other = thread::spawn({
                let zone = zone.clone();
                move || {
                    let part = zone.zone.0.claim_at(16 + 1, 1);
                    let claimed = Some(part).filter(|part| part.mask != 0);
                    claimed.inspect(|part| zone.touch(part.first(), 1))
                }
            });
            let run = zone.alloc_run(frames, 512).ok();
            let single = other.join().unwrap();
            assert!(run.is_none() || single.is_none());
            let taken = 512 + run.map_or(0, |_| frames) + single.map_or(0, Part::len);
            assert_eq!(zone.taken(), taken.into());
            if let Some(part) = single {
                zone.touch(part.first(), 1);
                zone.zone.0.release(part).unwrap();
                let again = zone.alloc_run(1024, 512).map(Frame::index);
                assert_eq!(again, Ok(512), "all of it is free, and is found");
            }
        });
    }
}

/// Two runs that need the same half of a region: at most one succeeds, and the other changes
/// nothing.
#[test]
fn loom_two_ranges_for_the_same_frames() {
    model(|| {
        let zone = Model::with_slots(512, 0);
        let _front = zone.alloc_run(256, 1).unwrap();
        let other = thread::spawn({
            let zone = zone.clone();
            move || zone.alloc_run(256, 256).ok()
        });
        let mine = zone.alloc_run(256, 256).ok();
        let theirs = other.join().unwrap();
        assert!(mine.is_none() || theirs.is_none());
        // Each may have failed at the other's first word; then nothing stays claimed.
        let had = u64::from(mine.is_some()) + u64::from(theirs.is_some());
        assert_eq!(zone.taken(), 256 + 256 * had);
        assert_eq!(zone.alloc_run(256, 256).is_ok(), had == 0);
    });
}

/// A run against the free that completes its range: it fails or gets all of the range, which is
/// available afterwards.
#[test]
fn loom_a_range_against_a_free() {
    model(|| {
        let (zone, first) = full(0);
        zone.free_run(first, 127).unwrap();
        let other = thread::spawn({
            let zone = zone.clone();
            let last = Frame::inside(first.index() + 127);
            move || zone.free(last, Order::PAGE).unwrap()
        });
        let early = zone.alloc_run(128, 128).ok();
        other.join().unwrap();
        let late = zone.alloc_run(128, 128).ok();
        assert_eq!((early.is_some(), early.or(late)), (late.is_none(), Some(first)));
        assert_eq!(zone.taken(), 512);
    });
}

/// Two frees in a region whose limits are low: what one has freed is found once it has returned,
/// even if the other has raised the limit of the region and not yet those of its groups.
#[test]
fn loom_a_free_does_not_rely_on_one_that_has_not_returned() {
    model(|| {
        let (zone, first) = full(0);
        let pair = Order::new(1).unwrap();
        let free = move |zone: &Model, index| {
            zone.free(Frame::inside(first.index() + index), Order::PAGE).unwrap()
        };
        free(&zone, 1);
        free(&zone, 3);
        assert!(zone.alloc(pair).is_err());
        let other = thread::spawn({
            let zone = zone.clone();
            move || free(&zone, 0)
        });
        free(&zone, 2);
        assert!(zone.alloc(pair).is_ok());
        other.join().unwrap();
        assert!(zone.alloc(pair).is_ok());
    });
}

/// Frames pass from owner to owner through the map, from one magazine into the other.
#[test]
fn loom_frames_pass_between_magazines() {
    model(|| {
        let (zone, first) = full(1);
        let other = thread::spawn({
            let zone = zone.clone();
            move || {
                let mut local = zone.local();
                for index in 0..2 {
                    let frame = Frame::inside(first.index() + index);
                    zone.touch(frame, 1);
                    local.free(frame, Order::PAGE).unwrap();
                }
            }
        });
        let mut local = zone.local();
        let mut got = 0;
        let mut take = |local: &mut ZoneLocal| {
            while let Ok(frame) = local.alloc(Order::PAGE) {
                zone.touch(frame, 1);
                got += 1;
            }
        };
        take(&mut local);
        other.join().unwrap();
        take(&mut local);
        assert_eq!((got, zone.taken()), (2, 512));
    });
}
