//! The report of a copy.

use super::stack::StackReport;
use super::{RequestReport, line};
use crate::engine::digest::Hash;
use crate::engine::pump::PumpStats;
use crate::units::{ByteSize, counted, grouped, per_second, rate, time};
use serde::Serialize;
use std::fmt::{self, Write};
use std::time::Duration;

/// The report of a copy.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct CopyReport {
    /// `copy`.
    pub(crate) command: &'static str,
    /// The source, as named on the command line.
    pub(crate) source: String,
    /// The destination, as named on the command line.
    pub(crate) destination: String,
    /// The third target, as named on the command line.
    pub(crate) via: Option<String>,
    /// The number of bytes to copy.
    pub(crate) bytes: u64,
    /// The bytes of those that are holes of the source.
    pub(crate) hole_bytes: u64,
    /// Bytes of one request.
    pub(crate) block_bytes: u64,
    /// The most requests in flight.
    pub(crate) iodepth: u64,
    /// From the first request to the end of the last phase, or of the comparison.
    pub(crate) seconds: f64,
    /// Source to destination, or to the third target and from there.
    pub(crate) phases: Vec<PhaseReport>,
    /// The SHA-256 of both, if it was requested.
    pub(crate) sha256: Option<Hashes>,
    /// The statistics of the memory stack.
    pub(crate) stack: StackReport,
    /// Fallbacks to something slower, with the reason; data that does not remain.
    pub(crate) notes: Vec<String>,
    /// Why the copy is not complete; `None` where it is.
    pub(crate) error: Option<String>,
    /// The state of the destination if the copy is not complete.
    #[serde(skip)]
    pub(crate) left: &'static str,
}

/// The hashes of source and destination, which were read again.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Hashes {
    /// The hash of the source.
    pub(crate) source: Hash,
    /// The hash of the destination, before it was renamed.
    pub(crate) destination: Hash,
}

/// One pass over all bytes, from one target to another.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PhaseReport {
    /// The source.
    pub(crate) from: String,
    /// The destination.
    pub(crate) to: String,
    /// The number of bytes.
    pub(crate) bytes: u64,
    /// From the first request to the end of the flush.
    pub(crate) seconds: f64,
    /// The part of it that the flush took.
    pub(crate) flush_seconds: f64,
    /// `bytes` per second.
    pub(crate) bytes_per_second: f64,
    /// The reads from the source.
    pub(crate) reads: RequestReport,
    /// The writes to the destination.
    pub(crate) writes: RequestReport,
}

impl PhaseReport {
    /// Creates the report of `stats`.
    pub(crate) fn new(from: String, to: String, stats: &PumpStats) -> Self {
        Self {
            from,
            to,
            bytes: stats.bytes,
            seconds: stats.elapsed.as_secs_f64(),
            flush_seconds: stats.flush.as_secs_f64(),
            bytes_per_second: per_second(stats.bytes, stats.elapsed),
            reads: RequestReport::new(&stats.reads),
            writes: RequestReport::new(&stats.writes),
        }
    }
}

impl CopyReport {
    /// Returns the report in three lines, and one for each thing that is out of the ordinary.
    pub(crate) fn summary(&self) -> String {
        let mut out = String::new();
        self.heading(&mut out);
        let source = self.stack.memory.first().map_or("", |memory| memory.source);
        let with = format_args!(
            "requests of {}, {} in flight; memory from {source}; --details has the rest",
            ByteSize(self.block_bytes),
            self.iodepth
        );
        line(&mut out, "with", with);
        if let Some(hashes) = &self.sha256 {
            line(&mut out, "sha256", format_args!("{} of both", hashes.source));
        }
        for device in &self.stack.devices {
            if let Some(failures) = device.failures() {
                line(&mut out, "failures", format_args!("{}: {failures}", device.name));
            }
        }
        self.notes_to_text(&mut out);
        out
    }

    /// Appends the amount copied, and the rate.
    fn heading(&self, out: &mut String) {
        let via = self.via.as_ref().map(|via| format!(", through {via}")).unwrap_or_default();
        let _ = writeln!(out, "{} -> {}{via}", self.source, self.destination);
        let bytes = format!("{} ({} bytes)", ByteSize(self.bytes), grouped(self.bytes));
        if self.error.is_some() {
            let written = self.phases.last().map_or(0, |phase| phase.bytes);
            let phase =
                if self.via.is_some() && self.phases.len() < 2 { " on the way there" } else { "" };
            let (written, left) = (ByteSize(written), self.left);
            let what = format_args!("after {written}{phase}, of {bytes}: the destination {left}");
            line(out, "not complete", what);
            return;
        }
        let holes = match self.hole_bytes {
            0 => String::new(),
            holes => format!(", {} of it holes,", ByteSize(holes)),
        };
        let speeds: Vec<_> = self.phases.iter().map(|phase| phase.speed(self.bytes)).collect();
        line(
            out,
            "copied",
            format_args!("{bytes}{holes} in {}", speeds.join(" there, and back in ")),
        );
    }

    fn notes_to_text(&self, out: &mut String) {
        for note in &self.notes {
            let _ = writeln!(out, "note: {note}");
        }
    }
}

impl fmt::Display for CopyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = String::new();
        self.heading(&mut out);
        let with =
            format_args!("requests of {}, {} in flight", ByteSize(self.block_bytes), self.iodepth);
        line(&mut out, "with", with);
        if let Some(hashes) = &self.sha256 {
            line(&mut out, "sha256", format_args!("{} of the source", hashes.source));
            line(&mut out, "", format_args!("{} of the destination", hashes.destination));
        }
        for phase in &self.phases {
            phase.to_text(&mut out);
        }
        let _ = write!(out, "{}", self.stack);
        self.notes_to_text(&mut out);
        f.write_str(&out)
    }
}

impl PhaseReport {
    /// Formats the time and the rate, which is of the data alone if less than `all` bytes were
    /// moved.
    fn speed(&self, all: u64) -> String {
        let elapsed = Duration::try_from_secs_f64(self.seconds).unwrap_or_default();
        let of_data = if self.bytes < all { " of data" } else { "" };
        format!("{} ({}{of_data})", time(nanoseconds(self.seconds)), rate(self.bytes, elapsed))
    }

    fn to_text(&self, out: &mut String) {
        let elapsed = Duration::try_from_secs_f64(self.seconds).unwrap_or_default();
        let _ = writeln!(out, "\n{} -> {}", self.from, self.to);
        let flush = time(nanoseconds(self.flush_seconds));
        let took = format_args!(
            "{} in {} (of which {flush} to flush): {}",
            ByteSize(self.bytes),
            time(nanoseconds(self.seconds)),
            rate(self.bytes, elapsed)
        );
        line(out, "moved", took);
        request_line(out, "reads", &self.reads);
        request_line(out, "writes", &self.writes);
    }
}

fn nanoseconds(seconds: f64) -> u64 {
    Duration::try_from_secs_f64(seconds)
        .map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
}

fn request_line(out: &mut String, label: &str, report: &RequestReport) {
    if report.requests == 0 {
        return;
    }
    let (queueing, completion) = (&report.queueing, &report.completion);
    let figures = format_args!(
        "{:>12} · queueing median {:>7}, p99 {:>7} · completion median {:>7}, p99 {:>7}",
        counted(report.requests, "I/O"),
        time(queueing.median_ns),
        time(queueing.p99_ns),
        time(completion.median_ns),
        time(completion.p99_ns)
    );
    line(out, label, figures);
}
