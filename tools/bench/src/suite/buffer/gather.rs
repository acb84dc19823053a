//! Gathering 8 MiB into what a device accepts.

use super::own::{self, Own, each_page};
use crate::baseline::page_segments::PageSegments;
use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::{Metric, Record};
use pinfold::folios::Folios;
use pinfold::{Arena, Domain, MappingPolicy};
use pinfold_core::addr::{Iova, Segment};
use pinfold_core::dma_pool::{Block, DmaPool};
use pinfold_core::gather::Profile;
use pinfold_core::gather::prp::{ControllerPage, Prps};
use std::cell::RefCell;
use std::hint::black_box;

const BYTES: u64 = 8 << 20;
/// The most segments that the device accepts: as many as 4 KiB pages need.
const SEGMENTS: usize = 2048;

/// The cases.
pub(super) const CASES: [&str; 2] = ["gather-8m", "gather-8m-prp"];

/// Measures the program's own memory, registered, and the same memory with a segment for every
/// page.
pub(super) fn gathered(harness: &Harness<'_>, own: &Own) -> Result<Vec<Record>, BenchError> {
    let memory = own.memory()?;
    let table = memory.folios()?;
    let list = each_page(table)?;
    let mut records = segments(harness, table, &list)?;
    records.extend(prps(harness, table, &list)?);
    Ok(records)
}

/// Returns the offset of each operation: every 8 MiB of the buffer in turn.
fn offsets(times: usize) -> impl Iterator<Item = u64> {
    (0..times as u64).map(|i| i * BYTES % own::BYTES)
}

fn segments(
    harness: &Harness<'_>,
    table: &Folios,
    list: &PageSegments,
) -> Result<Vec<Record>, BenchError> {
    const CASE: &str = CASES[0];
    let (many, few) = (harness.scale(1_000_000), harness.scale(20_000));
    // The profile of an NVMe controller's SGLs: aligned to 4 bytes, lengths of 32 bits.
    let profile = Profile::new(2048, u64::from(u32::MAX), 0, 4)?;
    let none = Segment { iova: Iova::new(0), len: 0 };
    harness.interleave(vec![
        Subject::new("pinfold", move |out: &mut Samples| {
            let mut slots = vec![none; SEGMENTS];
            let (cost, segments) = Cost::of(|| {
                offsets(many).try_fold(0, |_, offset| {
                    let full = profile
                        .gather_into(table.segments(offset, BYTES)?, black_box(&mut slots))?;
                    Ok::<_, BenchError>(full.len())
                })
            });
            record_segments(out, CASE, cost, many, segments?);
            Ok(())
        }),
        Subject::new("pages-4k", move |out: &mut Samples| {
            let mut slots = vec![none; SEGMENTS];
            let (cost, segments) = Cost::of(|| {
                offsets(few).try_fold(0, |_, offset| {
                    list.gather((offset, BYTES), &profile, black_box(&mut slots))
                })
            });
            record_segments(out, CASE, cost, few, segments?);
            Ok(())
        }),
    ])
}

fn prps(
    harness: &Harness<'_>,
    table: &Folios,
    list: &PageSegments,
) -> Result<Vec<Record>, BenchError> {
    const CASE: &str = CASES[1];
    let times = harness.scale(10_000);
    let domain = Domain::soft()?;
    let arena =
        Arena::builder().size(1 << 20).mapping_policy(MappingPolicy::Whole).build(&domain)?;
    let pool = DmaPool::builder("prp lists").block(4096).align(4096).build(&arena)?;
    let local = &RefCell::new(pool.local());
    let build = |parts: &mut dyn Iterator<Item = Segment>| -> Result<usize, BenchError> {
        let lists = &mut *local.borrow_mut();
        let prps: Prps<Block> = Prps::new(ControllerPage::SIZE_4K, parts, lists)?;
        let entries = usize::try_from(prps.entries()).unwrap_or(usize::MAX);
        prps.release(lists);
        Ok(entries)
    };
    harness.interleave(vec![
        Subject::new("pinfold", move |out: &mut Samples| {
            let (cost, entries) = Cost::of(|| {
                offsets(times).try_fold(0, |_, offset| build(&mut table.segments(offset, BYTES)?))
            });
            record_segments(out, CASE, cost, times, entries?);
            Ok(())
        }),
        Subject::new("pages-4k", move |out: &mut Samples| {
            let (cost, entries) = Cost::of(|| {
                offsets(times).try_fold(0, |_, offset| build(&mut list.part(offset, BYTES)))
            });
            record_segments(out, CASE, cost, times, entries?);
            Ok(())
        }),
    ])
}

#[expect(clippy::cast_precision_loss, reason = "a few thousand segments")]
fn record_segments(
    out: &mut Samples,
    case: &'static str,
    cost: Cost,
    times: usize,
    segments: usize,
) {
    out.cost(case, cost, times);
    out.figure(case, Metric::Segments, "segments", segments as f64);
}

// Registering 1 GiB.

pub(super) const REGISTER: &str = "register-1g";

/// Measures registering the program's own memory: both subjects pin and unpin all of it by the same
/// calls, and `pages-4k` describes each page afterwards.
pub(super) fn registered(harness: &Harness<'_>, own: &Own) -> Result<Vec<Record>, BenchError> {
    let times = harness.scale(16);
    harness.interleave(vec![
        Subject::new("pinfold", move |out: &mut Samples| {
            let whole = |table: &Folios| Ok(table.table_bytes());
            let (cost, table) = Cost::of(|| (0..times).try_fold(0, |_, _| once(own, whole)));
            record_table(out, REGISTER, cost, times, table?);
            Ok(())
        }),
        Subject::new("pages-4k", move |out: &mut Samples| {
            let each = |table: &Folios| Ok(black_box(each_page(table)?).table_bytes());
            let (cost, table) = Cost::of(|| (0..times).try_fold(0, |_, _| once(own, each)));
            record_table(out, REGISTER, cost, times, table?);
            Ok(())
        }),
    ])
}

/// Pins the memory, describes it, and unpins it.
fn once(
    own: &Own,
    describe: impl FnOnce(&Folios) -> Result<usize, BenchError>,
) -> Result<usize, BenchError> {
    describe(own.memory()?.folios()?)
}

#[expect(clippy::cast_precision_loss, reason = "a few MiB, a few thousand times")]
fn record_table(out: &mut Samples, case: &'static str, cost: Cost, times: usize, table: usize) {
    out.figure(case, Metric::Time, "us", cost.ns / 1e3 / times.max(1) as f64);
    out.figure(case, Metric::Bytes, "bytes", table as f64);
}
