//! `rx-512`: a network card's receive path.
//!
//! The first thread is the device and its driver: 64 packets arrive in the pages of a ring of 512
//! descriptors, are passed to the second thread, and their descriptors are refilled. The second
//! thread reads each packet and frees its page. All of it is timed, from the first packet to the
//! last free.

use super::{FRAMES, pool};
use crate::baseline::buddy::{Buddy, Offset};
use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::Record;
use crate::suite::handle::{slots, spawn_second};
use pinfold::Arena;
use pinfold_core::frame::{Frame, Order, Zone};
use pinfold_core::mem::DmaMemory;
use pinfold_core::page_pool::Page;
use std::hint::black_box;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

/// The number of descriptors in the ring.
const DESCRIPTORS: usize = 512;
/// The number of packets handled at a time.
const BUDGET: usize = 64;
/// The most batches in flight between the threads.
const BATCHES: usize = 16;

type Outcome = Result<(), BenchError>;

/// A subject's way of receiving packets.
struct Path<Refill, Write, Read, Freer> {
    /// Fills the empty descriptors.
    refill: Refill,
    /// The function by which the device writes into a page.
    write: Write,
    /// The function by which the second thread reads it.
    read: Read,
    /// Makes the function by which the second thread frees a batch.
    freer: Freer,
}

pub(super) fn run(
    harness: &Harness<'_>,
    arena: &Arena,
    packets: DmaMemory<'_>,
    buddy: &Buddy,
) -> Result<Vec<Record>, BenchError> {
    let batches = harness.scale(4_000);
    let zone = Zone::new(FRAMES)?;
    let zone = &zone;
    let at = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
    let write_frame = |frame: &Frame, word| Ok(packets.write_u64(at(frame.offset()), word)?);
    let read_frame = |frame: &Frame| Ok(packets.read_u64(at(frame.offset()))?);
    let free_frames = || {
        let mut local = zone.local();
        move |batch: &mut Vec<Frame>| -> Outcome {
            batch.drain(..).try_for_each(|frame| Ok(local.free(frame, Order::PAGE)?))
        }
    };
    let mut driver = buddy.owner();
    let mut for_array = zone.local();
    let mut bulk = pool(arena, 2048)?;
    let remote = bulk.remote();
    let remote = &remote;
    let write_page = |page: &Page, word| Ok(page.memory().write_u64(0, word)?);
    let read_page = |page: &Page| Ok(page.memory().read_u64(0)?);
    let all = |full: usize| match full {
        BUDGET => Ok(()),
        got => Err(BenchError::Short { asked: BUDGET, got }),
    };
    harness.interleave(vec![
        Subject::countable(
            "pinfold",
            receive(
                batches,
                Path {
                    refill: move |ring: &mut [_]| all(bulk.fill(ring)),
                    write: write_page,
                    read: read_page,
                    freer: move || {
                        move |batch: &mut Vec<Page>| -> Outcome {
                            remote.recycle_all(batch.drain(..));
                            Ok(())
                        }
                    },
                },
            ),
        ),
        Subject::new(
            "single",
            receive(
                batches,
                Path {
                    refill: move |ring: &mut [Option<Offset>]| {
                        ring.iter_mut().filter(|slot| slot.is_none()).try_for_each(|slot| {
                            *slot = Some(driver.alloc_page()?);
                            Ok(())
                        })
                    },
                    write: |page: &Offset, word| Ok(packets.write_u64(at(*page), word)?),
                    read: |page: &Offset| Ok(packets.read_u64(at(*page))?),
                    freer: || {
                        let mut owner = buddy.owner();
                        move |batch: &mut Vec<Offset>| -> Outcome {
                            batch.drain(..).for_each(|page| owner.free_page(page));
                            Ok(())
                        }
                    },
                },
            ),
        ),
        Subject::countable(
            "array",
            receive(
                batches,
                Path {
                    refill: move |ring: &mut [_]| all(for_array.fill(ring)),
                    write: write_frame,
                    read: read_frame,
                    freer: free_frames,
                },
            ),
        ),
    ])
}

/// Returns a run that receives `batches` batches of packets. The ring stays full from one run to
/// the next.
fn receive<'s, P, Free>(
    batches: usize,
    mut path: Path<
        impl FnMut(&mut [Option<P>]) -> Outcome + 's,
        impl Fn(&P, u64) -> Outcome + 's,
        impl Fn(&P) -> Result<u64, BenchError> + Sync + 's,
        impl Fn() -> Free + Sync + 's,
    >,
) -> impl FnMut(&mut Samples) -> Outcome + 's
where
    P: Send + 's,
    Free: FnMut(&mut Vec<P>) -> Outcome,
{
    let mut ring: Vec<Option<P>> = slots(DESCRIPTORS);
    move |out| {
        ring.chunks_exact_mut(BUDGET).try_for_each(&mut path.refill)?;
        let (to_freer, full) = sync_channel(BATCHES);
        let (to_driver, empty) = sync_channel(BATCHES);
        for _ in 0..BATCHES {
            to_driver.send(Vec::with_capacity(BUDGET)).map_err(|_| BenchError::Thread)?;
        }
        let (read, freer) = (&path.read, &path.freer);
        let (refill, write) = (&mut path.refill, &path.write);
        let ring = &mut ring;
        let (cost, freed) = Cost::of(|| {
            std::thread::scope(|scope| {
                let second = spawn_second(scope, move || {
                    let (cost, result) = Cost::of(|| consume(&full, &to_driver, read, freer()));
                    result.map(|()| cost.counts)
                })?;
                let received = arrive(ring, batches, &empty, to_freer, refill, write);
                let freed = second.join().unwrap_or(Err(BenchError::Thread))?;
                received.map(|()| freed)
            })
        });
        let cost = cost.with(freed?);
        out.cost("rx-512", cost, batches * BUDGET);
        Ok(())
    }
}

/// Plays the device and its driver.
#[inline(always)]
fn arrive<P>(
    ring: &mut [Option<P>],
    batches: usize,
    empty: &Receiver<Vec<P>>,
    full: SyncSender<Vec<P>>,
    mut refill: impl FnMut(&mut [Option<P>]) -> Outcome,
    write: impl Fn(&P, u64) -> Outcome,
) -> Outcome {
    let windows = DESCRIPTORS / BUDGET;
    for number in 0..batches {
        let mut batch = empty.recv().map_err(|_| BenchError::Thread)?;
        let window = ring.chunks_exact_mut(BUDGET).nth(number % windows).unwrap_or_default();
        for slot in &mut *window {
            if let Some(page) = slot.take() {
                write(&page, number as u64)?;
                batch.push(page);
            }
        }
        refill(window)?;
        full.send(batch).map_err(|_| BenchError::Thread)?;
    }
    // The other thread ends when the channel closes.
    drop(full);
    Ok(())
}

/// Runs the second thread.
#[inline(always)]
fn consume<P>(
    full: &Receiver<Vec<P>>,
    empty: &SyncSender<Vec<P>>,
    read: impl Fn(&P) -> Result<u64, BenchError>,
    mut free: impl FnMut(&mut Vec<P>) -> Outcome,
) -> Outcome {
    while let Ok(mut batch) = full.recv() {
        for page in &batch {
            black_box(read(page)?);
        }
        free(&mut batch)?;
        // The first thread no longer receives when the last batches come back.
        let _ = empty.send(batch);
    }
    Ok(())
}
