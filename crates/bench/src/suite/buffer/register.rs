//! Describing 1 GiB as a registered buffer.

use super::setup::{HUGEPAGES, large, pages};
use crate::baseline::page_segments::PageSegments;
use crate::error::BenchError;
use crate::harness::{Cost, Harness, Samples, Subject};
use crate::record::{Metric, Record};

const CASE: &str = "register-1g";

pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    let (many, few) = (harness.scale(1000), harness.scale(32));
    let count = usize::try_from(HUGEPAGES).unwrap_or(0) * 512;
    harness.interleave(vec![
        Subject::new("pinfold", move |out: &mut Samples| {
            let (cost, table) = Cost::of(|| {
                (0..many)
                    .try_fold(0, |_, _| Ok::<_, BenchError>(std::hint::black_box(large()?).table_bytes()))
            });
            record(out, cost, many, table?);
            Ok(())
        }),
        Subject::new("pages-4k", move |out: &mut Samples| {
            let register = || std::hint::black_box(PageSegments::register(count, pages())).table_bytes();
            let (cost, table) = Cost::of(|| (0..few).fold(0, |_, _| register()));
            record(out, cost, few, table);
            Ok(())
        }),
    ])
}

#[expect(clippy::cast_precision_loss, reason = "a few MiB, a few thousand times")]
fn record(out: &mut Samples, cost: Cost, times: usize, table: usize) {
    out.figure(CASE, Metric::Time, "us", cost.ns / 1e3 / times.max(1) as f64);
    out.figure(CASE, Metric::Bytes, "bytes", table as f64);
}
