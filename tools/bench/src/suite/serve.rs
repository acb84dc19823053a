//! The suite `serve`: network block servers beside each other, with one client for all:
//! `pinfold serve`, nbdkit, qemu-nbd.
//!
//! The servers are processes that run for the whole suite. `pinfold`, `nbdkit-file` and `qemu-nbd`
//! serve one file in the page cache, `pinfold-soft` and `nbdkit-memory` memory of their own, filled
//! with the same bytes. The clients are fio's nbd engine, which has one connection, and nbdcopy,
//! which has up to four; their own processor time is not counted.

mod client;
mod process;

use super::Entry;
use super::program::{self, Data};
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Harness, Samples, Subject};
use crate::record::{Metric, Record};
use client::{Direction, Fio};
use process::{Server, missing};
use std::time::{Duration, Instant};

/// The cases.
pub(super) const CASES: &[Entry] = &[
    ("read-4k-1", "random reads of 4 KiB, one at a time: requests/s, p99, the server's CPU time"),
    ("read-4k-16", "the same, 16 in flight"),
    ("write-4k-16", "random writes of 4 KiB, 16 in flight"),
    ("read-1m-16", "random reads of 1 MiB, 16 in flight: bandwidth, p99, the server's CPU time"),
    ("write-1m-16", "random writes of 1 MiB, 16 in flight"),
    ("nbdcopy-read", "nbdcopy of 1 GiB from the server to nowhere"),
    ("nbdcopy-write", "nbdcopy of 1 GiB from memory to the server"),
];

/// The subjects.
pub(super) const SUBJECTS: &[Entry] = &[
    ("pinfold", "pinfold serve FILE --cached, of a file in the page cache"),
    ("nbdkit-file", "nbdkit's file plugin, of the same file"),
    ("qemu-nbd", "qemu-nbd, of the same file, with its threads"),
    ("qemu-nbd-uring", "the same with --aio=io_uring"),
    ("nbdkit-memory", "nbdkit's memory plugin"),
    ("pinfold-soft", "pinfold serve soft:SIZE, through a model controller, whose time counts"),
];

/// The measurements with fio: case, direction, bytes of a request, requests in flight.
const FIO: [(&str, Direction, u64, usize); 5] = [
    ("read-4k-1", Direction::Read, 4 << 10, 1),
    ("read-4k-16", Direction::Read, 4 << 10, 16),
    ("write-4k-16", Direction::Write, 4 << 10, 16),
    ("read-1m-16", Direction::Read, 1 << 20, 16),
    ("write-1m-16", Direction::Write, 1 << 20, 16),
];
/// The measurements with nbdcopy.
const COPIES: [(&str, Direction); 2] =
    [("nbdcopy-read", Direction::Read), ("nbdcopy-write", Direction::Write)];
/// The data, MiB.
const MIB: usize = 1 << 10;
/// The least of it, in a quick run: as many requests of 1 MiB as are in flight.
const LEAST_MIB: usize = 64;
/// The length of a run of fio.
const RUN: Duration = Duration::from_secs(1);
const QUICK_RUN: Duration = Duration::from_millis(200);
/// The most runs: they take seconds.
const MOST_RUNS: usize = 5;

/// Returns why this machine cannot measure the suite, if so.
pub(super) fn unable() -> Option<String> {
    missing().map(|error| error.to_string())
}

/// Measures the suite.
///
/// # Errors
/// [`BenchError::NoPrograms`] where a program is not installed, or the failure of a server or a
/// client.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    if let Some(error) = missing() {
        return Err(error);
    }
    let quick = harness.options().quick;
    let harness = if quick {
        harness.once()
    } else {
        harness.with_runs(harness.options().runs.min(MOST_RUNS))
    };
    let duration = if quick { QUICK_RUN } else { RUN };
    let folder = program::in_memory();
    let data = Data::create(&folder, harness.scale(MIB).max(LEAST_MIB) << 20)?;
    // The written data comes from another file: the server's own would be in the processor's cache
    // for both.
    let source = Data::create(&folder, data.bytes())?;
    let servers = Server::start_all(&data)?;
    // The servers of memory get the same bytes, so none returns zeroes that it has never stored.
    for server in servers.iter().filter(|server| server.has_memory()) {
        client::copy(Direction::Write, &data, server)?;
    }
    let mut records = Vec::new();
    for (case, direction, block, depth) in FIO.into_iter().filter(|(case, ..)| harness.wants(case))
    {
        let subjects = servers.iter().map(|server| {
            let fio = Fio { direction, block, depth, duration };
            Subject::new(server.name(), move |out: &mut Samples| requests(out, case, server, &fio))
        });
        records.extend(harness.interleave(subjects.collect())?);
    }
    for (case, direction) in COPIES.into_iter().filter(|(case, _)| harness.wants(case)) {
        let subjects = servers.iter().map(|server| {
            let source = &source;
            Subject::new(server.name(), move |out: &mut Samples| {
                copies(out, case, direction, source, server)
            })
        });
        records.extend(harness.interleave(subjects.collect())?);
    }
    Ok(records)
}

/// Records a figure of a server, marked where it contains a model's.
fn record(
    out: &mut Samples,
    server: &Server,
    (case, metric, unit): (&'static str, Metric, &'static str),
    value: f64,
) {
    match server.is_model() {
        true => out.modelled(case, metric, unit, value),
        false => out.figure(case, metric, unit, value),
    }
}

fn requests(
    out: &mut Samples,
    case: &'static str,
    server: &Server,
    fio: &Fio,
) -> Result<(), BenchError> {
    let before = server.cpu_time()?;
    let result = fio.run(server)?;
    let cpu = server.cpu_time()?.saturating_sub(before);
    let rate = match fio.block {
        ..1_048_576 => (case, Metric::Rate, "requests/s"),
        _ => (case, Metric::Rate, "MiB/s"),
    };
    let each = if rate.2 == "MiB/s" {
        result.bytes_per_s / f64::from(1 << 20)
    } else {
        result.requests_per_s
    };
    record(out, server, rate, each);
    record(out, server, (case, Metric::Time, "us p99"), result.p99.as_secs_f64() * 1e6);
    // Counted in ticks of 10 ms: one request of a short run may show none.
    record(
        out,
        server,
        (case, Metric::Count, "us CPU/request"),
        cpu.as_secs_f64() * 1e6 / result.requests,
    );
    Ok(())
}

fn copies(
    out: &mut Samples,
    case: &'static str,
    direction: Direction,
    data: &Data,
    server: &Server,
) -> Result<(), BenchError> {
    let (before, began) = (server.cpu_time()?, Instant::now());
    client::copy(direction, data, server)?;
    let (elapsed, cpu) = (began.elapsed(), server.cpu_time()?.saturating_sub(before));
    #[expect(clippy::cast_precision_loss, reason = "far less than 2^52 bytes")]
    let mib = data.bytes() as f64 / f64::from(1 << 20);
    record(out, server, (case, Metric::Rate, "MiB/s"), mib / elapsed.as_secs_f64());
    record(out, server, (case, Metric::Count, "us CPU/MiB"), cpu.as_secs_f64() * 1e6 / mib);
    Ok(())
}
