//! Registering 1 GiB.

use super::own::{Own, each_page};
use super::setup::{HUGEPAGES, large, pages};
use crate::baseline::page_segments::PageSegments;
use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::{Metric, Record};
use pinfold::registered::{Buffers, Registration};
use std::hint::black_box;

pub(super) const CASE: &str = "register-1g";
const MODEL: &str = "register-1g-model";

/// Measures registering the program's own memory: both subjects pin and unpin all of it by the same
/// calls, and `pages-4k` describes each page afterwards.
pub(super) fn run(harness: &Harness<'_>, own: &Own) -> Result<Vec<Record>, BenchError> {
    let times = harness.scale(16);
    let (mut ours, mut theirs) = (own.table()?, own.table()?);
    harness.interleave(vec![
        Subject::new("pinfold", move |out: &mut Samples| {
            let whole = |registration: &Registration| Ok(registration.table().table_bytes());
            let (cost, table) =
                Cost::of(|| (0..times).try_fold(0, |_, _| once(own, &mut ours, whole)));
            record(out, CASE, cost, times, table?);
            Ok(())
        }),
        Subject::new("pages-4k", move |out: &mut Samples| {
            let each =
                |registration: &Registration| Ok(black_box(each_page(registration)?).table_bytes());
            let (cost, table) =
                Cost::of(|| (0..times).try_fold(0, |_, _| once(own, &mut theirs, each)));
            record(out, CASE, cost, times, table?);
            Ok(())
        }),
    ])
}

/// Registers the memory, describes it, and unregisters it.
fn once(
    own: &Own,
    table: &mut Buffers<'_>,
    describe: impl FnOnce(&Registration) -> Result<usize, BenchError>,
) -> Result<usize, BenchError> {
    let index = own.register(table)?;
    let bytes = describe(table.get(index)?)?;
    table.unregister(index)?;
    Ok(bytes)
}

/// Measures describing hugepages none of which are adjacent: what the pinning hides, of a layout
/// that real memory has only by chance.
pub(super) fn model(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let (many, few) = (harness.scale(1000), harness.scale(32));
    let count = usize::try_from(HUGEPAGES).unwrap_or(0) * 512;
    harness.interleave(vec![
        Subject::new("pinfold", move |out: &mut Samples| {
            let (cost, table) = Cost::of(|| {
                (0..many).try_fold(0, |_, _| Ok::<_, BenchError>(black_box(large()?).table_bytes()))
            });
            record(out, MODEL, cost, many, table?);
            Ok(())
        }),
        Subject::new("pages-4k", move |out: &mut Samples| {
            let register = || black_box(PageSegments::register(count, pages())).table_bytes();
            let (cost, table) = Cost::of(|| (0..few).fold(0, |_, _| register()));
            record(out, MODEL, cost, few, table);
            Ok(())
        }),
    ])
}

#[expect(clippy::cast_precision_loss, reason = "a few MiB, a few thousand times")]
fn record(out: &mut Samples, case: &'static str, cost: Cost, times: usize, table: usize) {
    out.figure(case, Metric::Time, "us", cost.ns / 1e3 / times.max(1) as f64);
    out.figure(case, Metric::Bytes, "bytes", table as f64);
}
