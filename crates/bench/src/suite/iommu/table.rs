//! The table alone: `map-4k`, `clear-4k`, `map-1m`, `clear-1m`, `tables-16t`.

use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Cost, Harness, Samples, Subject};
use crate::record::{Metric, Record};
use pinfold_core::access::Access;
use pinfold_core::addr::{Iova, IovaRange, PhysAddr};
use pinfold_core::table::{Retired, Table, TableError, TablePage, TablePages, VtdSecondStage};
use std::cell::RefCell;

const PAGE: u64 = 4096;
/// What one table page of level 1 maps.
const WINDOW: u64 = 2 << 20;
/// How many pages are mapped between two readings of the clock, and by one call for 1 MiB.
const MANY: u64 = 256;
/// The addresses that `tables-16t` cycles through.
const CYCLED: u64 = 16 << 40;
/// The addresses that the table which frees nothing has pages for, and uses again and again.
const KEPT: u64 = 1 << 30;

type Outcome = Result<(), BenchError>;

/// Creates a table of four levels with `pages` pages, which stay allocated for good: a table's
/// pages outlive it.
fn table(pages: usize) -> Result<Table<VtdSecondStage>, BenchError> {
    let pages: &'static [TablePage] = Box::leak((0..pages).map(|_| TablePage::filled(0)).collect());
    let phys = PhysAddr::new(1 << 32);
    Ok(Table::new(TablePages::new(pages, phys)?, 4)?)
}

fn range(start: u64, len: u64) -> Result<IovaRange, BenchError> {
    Ok(IovaRange::new(Iova::new(start), len)?)
}

/// Maps and clears in a table page that other mappings keep in use, and in one that is pinned.
pub(super) fn small(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let (counted, pinned) = (table(16)?, table(16)?);
    // The last page of the window stays mapped.
    counted.map(range(2 * WINDOW - PAGE, PAGE)?, PhysAddr::new(0), Access::READ)?;
    let leaf = pinned.pin(Iova::new(WINDOW))?;
    let (counted, pinned, leaf) = (&counted, &pinned, &leaf);
    let retired = RefCell::new(Retired::new());
    let retired = &retired;
    let map = move |iova, phys| counted.map(iova, phys, Access::WRITE);
    let clear = move |iova| counted.clear(iova, &mut retired.borrow_mut());
    let map_pinned = move |iova, phys| pinned.map_pinned(leaf, iova, phys, Access::WRITE);
    let clear_pinned = move |iova| pinned.clear_pinned(leaf, iova);
    let (rounds, calls) = (harness.scale(3_200), harness.scale(51_200));
    harness.interleave(vec![
        Subject::countable("pinfold", move |out| one_by_one(out, map, clear, rounds)),
        Subject::countable("pinfold-pinned", move |out| {
            one_by_one(out, map_pinned, clear_pinned, rounds)
        }),
        Subject::countable("pinfold", move |out| by_one_call(out, map, clear, calls)),
        Subject::countable("pinfold-pinned", move |out| {
            by_one_call(out, map_pinned, clear_pinned, calls)
        }),
    ])
}

fn one_by_one(
    out: &mut Samples,
    map: impl Fn(IovaRange, PhysAddr) -> Result<(), TableError>,
    clear: impl Fn(IovaRange) -> Result<(), TableError>,
    rounds: usize,
) -> Outcome {
    let ranges: Vec<IovaRange> =
        (0..MANY).map(|page| range(WINDOW + page * PAGE, PAGE)).collect::<Result<_, _>>()?;
    let (mut mapped, mut cleared) = (Cost::default(), Cost::default());
    for _ in 0..rounds {
        let (cost, result) = Cost::of(|| {
            ranges.iter().try_for_each(|iova| map(*iova, PhysAddr::new(iova.start().raw())))
        });
        result?;
        mapped = mapped + cost;
        let (cost, result) = Cost::of(|| ranges.iter().try_for_each(|iova| clear(*iova)));
        result?;
        cleared = cleared + cost;
    }
    let operations = rounds * ranges.len();
    out.cost("map-4k", mapped, operations);
    out.cost("clear-4k", cleared, operations);
    Ok(())
}

fn by_one_call(
    out: &mut Samples,
    map: impl Fn(IovaRange, PhysAddr) -> Result<(), TableError>,
    clear: impl Fn(IovaRange) -> Result<(), TableError>,
    calls: usize,
) -> Outcome {
    let iova = range(WINDOW, MANY * PAGE)?;
    let (mut mapped, mut cleared) = (Cost::default(), Cost::default());
    for _ in 0..calls {
        let (cost, result) = Cost::of(|| map(iova, PhysAddr::new(PAGE)));
        result?;
        mapped = mapped + cost;
        let (cost, result) = Cost::of(|| clear(iova));
        result?;
        cleared = cleared + cost;
    }
    out.cost("map-1m", mapped, calls);
    out.cost("clear-1m", cleared, calls);
    Ok(())
}

/// Maps 16 TiB of addresses once, 1 MiB at a time with all but 4 KiB of each 2 MiB in use, and
/// records the time per 2 MiB and the bytes of table pages left. `never-freed` uses 1 GiB of
/// addresses again and again, because its table pages for 16 TiB would take 32 GiB; so it never
/// links or zeroes a page. A sixteenth of the work shows its time.
pub(super) fn cycle(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    // A quick run cycles through as much as tests can in a second.
    let windows = CYCLED / WINDOW / if harness.options().quick { 2048 } else { 1 };
    harness.once().interleave(vec![
        Subject::new("pinfold", move |out: &mut Samples| {
            let table = table(1024)?;
            out.figure(
                "tables-16t",
                Metric::Time,
                "ns/2 MiB",
                cycle_through(&table, windows, u64::MAX)?,
            );
            let mut retired = Retired::new();
            table.collect_retired(&mut retired)?;
            let _ = table.reclaim(retired);
            out.figure(
                "tables-16t",
                Metric::Bytes,
                "bytes left",
                f64::from(table.stats().in_use) * 4096.0,
            );
            Ok(())
        }),
        Subject::new("never-freed", move |out: &mut Samples| {
            let table = table(1024)?;
            for window in 0..KEPT / WINDOW {
                let last = range((window + 1) * WINDOW + WINDOW - PAGE, PAGE)?;
                table.map(last, PhysAddr::new(0), Access::READ)?;
            }
            let ns = cycle_through(&table, windows / 16, KEPT / WINDOW)?;
            out.figure("tables-16t", Metric::Time, "ns/2 MiB", ns);
            out.figure(
                "tables-16t",
                Metric::Bytes,
                "bytes left",
                f64::from(table.stats().in_use) * 4096.0,
            );
            Ok(())
        }),
    ])
}

/// Maps and clears `windows` times 2 MiB, at addresses that repeat after `again` of them, and
/// returns the nanoseconds each.
fn cycle_through(
    table: &Table<VtdSecondStage>,
    windows: u64,
    again: u64,
) -> Result<f64, BenchError> {
    let half = WINDOW / 2;
    let (cost, result) = Cost::of(|| -> Outcome {
        for window in 0..windows {
            let start = (window % again + 1) * WINDOW;
            let halves = [range(start, half)?, range(start + half, half - PAGE)?];
            for iova in halves {
                table.map(iova, PhysAddr::new(PAGE), Access::WRITE)?;
            }
            let mut retired = Retired::new();
            for iova in halves {
                table.clear(iova, &mut retired)?;
            }
            // Nothing walks this table, so what a flush would cover is reclaimed at once.
            let _ = table.reclaim(retired);
        }
        Ok(())
    });
    result?;
    #[expect(clippy::cast_precision_loss, reason = "at most 2^23")]
    let windows = windows as f64;
    Ok(cost.ns / windows)
}
