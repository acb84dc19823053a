//! The report of a workload; the text is laid out as fio's.

use super::stack::StackReport;
use super::{CpuReport, RequestReport};
use crate::args::Rw;
use crate::engine::jobs::JobsStats;
use crate::engine::verify::Verified;
use crate::engine::worker::{Rates, RequestStats};
use crate::engine::workload::Workload;
use crate::histogram::{Latency, PERCENTILES};
use crate::units::{ByteSize, counted, per_second};
use serde::Serialize;
use std::fmt::{self, Write};
use std::time::Duration;

/// The report of a workload.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct IoReport {
    /// `io`.
    pub(crate) command: &'static str,
    /// The target, as named on the command line.
    pub(crate) target: String,
    /// Whether the target is a file that was created for the run, and is gone.
    pub(crate) scratch_file: bool,
    /// Why the run ended early, if it did.
    pub(crate) ended_early: Option<String>,
    /// The direction and order of the requests.
    pub(crate) rw: Rw,
    /// Bytes of one request, the most if they differ.
    pub(crate) block_bytes: u64,
    /// The fewest bytes of one request.
    pub(crate) min_block_bytes: u64,
    /// The most requests in flight of one job.
    pub(crate) iodepth: u64,
    /// The number of jobs, each with a queue.
    pub(crate) numjobs: u64,
    /// The start of the part of the target that was used.
    pub(crate) offset_bytes: u64,
    /// The bytes of the target that each job used; all together, if they verified it.
    pub(crate) size_bytes: u64,
    /// The distance between the parts of consecutive jobs.
    pub(crate) offset_increment_bytes: u64,
    /// The duration.
    pub(crate) seconds: f64,
    /// The reads, if there were any.
    pub(crate) read: Option<DirectionReport>,
    /// The writes, if there were any.
    pub(crate) write: Option<DirectionReport>,
    /// The trims, if there were any.
    pub(crate) trim: Option<DirectionReport>,
    /// The verified data, if that was requested.
    pub(crate) verified: Option<Verified>,
    /// The processor time.
    pub(crate) cpu: CpuReport,
    /// The statistics of the memory stack.
    pub(crate) stack: StackReport,
    /// Fallbacks to something slower, with the reason.
    pub(crate) notes: Vec<String>,
    /// The flushes between the writes, if there were any.
    pub(crate) flush: Option<FlushReport>,
}

/// The job that an [`IoReport`] describes.
#[derive(Clone, Debug)]
pub(crate) struct IoParameters {
    /// The target, as named on the command line.
    pub(crate) target: String,
    /// Whether it is a file that was created for the run.
    pub(crate) is_scratch: bool,
    /// Why it ended early, if it did.
    pub(crate) ended_early: Option<String>,
    /// The workload of a job; if it was verified, of all jobs together.
    pub(crate) workload: Workload,
    /// The fewest bytes of one request.
    pub(crate) min_block: u64,
    /// The most requests in flight of one job.
    pub(crate) iodepth: u64,
    /// The number of jobs.
    pub(crate) numjobs: u64,
}

/// The requests of one direction.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DirectionReport {
    /// Requests per second.
    pub(crate) iops: f64,
    /// Bytes per second.
    pub(crate) bytes_per_second: f64,
    /// Samples of both, every 500 ms, if there were any.
    #[serde(skip_serializing_if = "Rates::is_empty")]
    pub(crate) samples: Rates,
    /// Their number and latencies.
    #[serde(flatten)]
    pub(crate) requests: RequestReport,
}

/// The flushes of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct FlushReport {
    /// The number of completed flushes.
    pub(crate) requests: u64,
    /// From the call until the flush has completed.
    pub(crate) total: Latency,
}

impl FlushReport {
    fn new(stats: &RequestStats) -> Option<Self> {
        (stats.requests > 0)
            .then(|| Self { requests: stats.requests, total: stats.total.summary(&PERCENTILES) })
    }
}

impl DirectionReport {
    fn new(stats: &RequestStats, samples: Rates, elapsed: Duration) -> Option<Self> {
        (stats.requests > 0).then(|| Self {
            iops: per_second(stats.requests, elapsed),
            bytes_per_second: per_second(stats.bytes, elapsed),
            samples,
            requests: RequestReport::new(stats),
        })
    }
}

impl IoReport {
    /// Creates the report of `stats`.
    pub(crate) fn new(
        parameters: IoParameters,
        stats: JobsStats,
        cpu: CpuReport,
        stack: StackReport,
        notes: Vec<String>,
    ) -> Self {
        let IoParameters { target, is_scratch, ended_early, .. } = parameters;
        let IoParameters { workload, min_block, iodepth, numjobs, .. } = parameters;
        let [reads, writes, trims] = stats.rates;
        let (elapsed, requests) = (stats.workload.elapsed, stats.workload.requests);
        Self {
            command: "io",
            target,
            scratch_file: is_scratch,
            ended_early,
            rw: workload.rw,
            block_bytes: workload.block as u64,
            min_block_bytes: min_block,
            iodepth,
            numjobs,
            offset_bytes: workload.start,
            size_bytes: workload.blocks.saturating_mul(workload.block as u64),
            offset_increment_bytes: workload.increment,
            seconds: elapsed.as_secs_f64(),
            read: DirectionReport::new(&requests.reads, reads, elapsed),
            write: DirectionReport::new(&requests.writes, writes, elapsed),
            trim: DirectionReport::new(&requests.trims, trims, elapsed),
            verified: stats.verified,
            cpu,
            flush: FlushReport::new(&requests.flushes),
            stack,
            notes,
        }
    }
}

impl fmt::Display for IoReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let out = &mut String::new();
        let bs = match (self.min_block_bytes, self.block_bytes) {
            (min, max) if min < max => format!("{min}B-{max}"),
            (_, bs) => bs.to_string(),
        };
        let jobs =
            if self.numjobs > 1 { format!(", numjobs={}", self.numjobs) } else { String::new() };
        let positive = |name: &str, bytes: u64| match bytes {
            0 => String::new(),
            bytes => format!(", {name}={bytes}B"),
        };
        let offset = positive("offset", self.offset_bytes);
        let increment = positive("offset_increment", self.offset_increment_bytes);
        let scratch = if self.scratch_file { " (scratch file)" } else { "" };
        let _ = writeln!(
            out,
            "{}{scratch}: rw={}, bs={bs}B, iodepth={}{jobs}{offset}{increment}, size={}B",
            self.target,
            self.rw.name(),
            self.iodepth,
            self.size_bytes
        );
        for (name, direction) in
            [("read", &self.read), ("write", &self.write), ("trim", &self.trim)]
        {
            if let Some(direction) = direction {
                direction.to_text(out, name, self.seconds);
            }
        }
        if let Some(FlushReport { requests, total }) = &self.flush {
            let flushes = counted(*requests, "flush");
            let _ = writeln!(out, "   sync: {}", flushes.replace("flushs", "flushes"));
            latency_line(out, "lat", total);
        }
        let (user, system) = self.cpu.percent_of(self.seconds);
        let each = match self.cpu.ns_per_request {
            0.0 => String::new(),
            ns => format!(", {:.2} usec per request", ns / 1e3),
        };
        let _ = writeln!(out, "  cpu          : usr={user:.2}%, sys={system:.2}%{each}");
        let _ = writeln!(out, "\nRun status:");
        for (name, direction) in
            [("READ", &self.read), ("WRITE", &self.write), ("TRIM", &self.trim)]
        {
            if let Some(direction) = direction {
                let run = format_args!("{:>8}: {}", name, bandwidth(direction.bytes_per_second));
                let io = binary(direction.requests.bytes as f64);
                let _ = writeln!(out, "{run}, io={io}B, run={:.0}msec", self.seconds * 1e3);
            }
        }
        if let Some(reason) = &self.ended_early {
            let _ = writeln!(out, "   ended early: {reason}");
        }
        if let Some(verified) = &self.verified {
            self.verified_to_text(out, verified);
        }
        let _ = write!(out, "{}", self.stack);
        for note in &self.notes {
            let _ = writeln!(out, "note: {note}");
        }
        f.write_str(out)
    }
}

impl IoReport {
    fn verified_to_text(&self, out: &mut String, verified: &Verified) {
        let Verified { requests, compared_bytes, sha256, parts, .. } = verified;
        let (requests, compared) = (counted(*requests, "request"), binary(*compared_bytes as f64));
        if self.ended_early.is_some() {
            let _ = writeln!(
                out,
                "\nNot verified as a whole: {requests}, {compared}B compared and correct until it ended"
            );
        } else {
            let _ = writeln!(
                out,
                "\nVerified: {requests} and a last pass, {compared}B compared, all correct"
            );
        }
        if self.ended_early.is_none()
            && verified.laid_out_bytes.min(verified.read_back_bytes) < self.size_bytes
        {
            let (laid, back) =
                (ByteSize(verified.laid_out_bytes), ByteSize(verified.read_back_bytes));
            let _ = writeln!(
                out,
                "In part: the runtime ended after {laid} were written, {back} read back"
            );
        }
        if let Some(sha256) = sha256 {
            let _ = writeln!(out, "sha256 of the {} bytes: {sha256}", self.size_bytes);
        }
        for (job, sha256) in (1..).zip(parts) {
            let _ = writeln!(out, "sha256 of the part of job {job}: {sha256}");
        }
    }
}

impl DirectionReport {
    fn to_text(&self, out: &mut String, name: &str, seconds: f64) {
        let requests = &self.requests;
        let _ = writeln!(
            out,
            "{name:>7}: IOPS={}, {} ({}B/{:.0}msec)",
            decimal(self.iops),
            bandwidth(self.bytes_per_second).replacen("bw", "BW", 1),
            binary(requests.bytes as f64),
            seconds * 1e3
        );
        // As in fio, the call or doorbell that submits a batch is part of `slat`.
        latency_line(out, "slat", &requests.queueing);
        latency_line(out, "clat", &requests.completion);
        latency_line(out, "lat", &requests.total);
        percentiles(out, "clat", &requests.completion);
        let Rates { iops, bytes_per_second: bw } = &self.samples;
        if !self.samples.is_empty() {
            let (min, max, avg, stdev) =
                (bw.min / 1024.0, bw.max / 1024.0, bw.mean / 1024.0, bw.deviation / 1024.0);
            let _ = writeln!(
                out,
                "   bw (  KiB/s): min={min:.0}, max={max:.0}, avg={avg:.2}, stdev={stdev:.2}, samples={}",
                bw.samples
            );
            let (min, max, avg, stdev) = (iops.min, iops.max, iops.mean, iops.deviation);
            let _ = writeln!(
                out,
                "   iops        : min={min:.0}, max={max:.0}, avg={avg:.2}, stdev={stdev:.2}, samples={}",
                iops.samples
            );
        }
    }
}

/// Formats `bw=411MiB/s (431MB/s)`.
fn bandwidth(bytes_per_second: f64) -> String {
    format!("bw={}B/s ({}B/s)", binary(bytes_per_second), decimal(bytes_per_second))
}

fn scaled(value: f64, step: f64, units: [&str; 5]) -> String {
    let mut value = value;
    let mut unit = 0;
    while value >= step && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let decimals = match value {
        _ if unit == 0 => 0,
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}{}", units.get(unit).unwrap_or(&""))
}

fn binary(value: f64) -> String {
    scaled(value, 1024.0, ["", "Ki", "Mi", "Gi", "Ti"])
}

fn decimal(value: f64) -> String {
    scaled(value, 1000.0, ["", "k", "M", "G", "T"])
}

/// Returns the unit by fio's rule: the largest in which the minimum still has about four digits.
fn unit(latency: &Latency) -> (&'static str, f64) {
    match (latency.min_ns, latency.max_ns) {
        (min, max) if min > 2_000_000 && max > 99_999_999 => ("msec", 1e6),
        (min, max) if min > 2_000 && max > 99_999 => ("usec", 1e3),
        _ => ("nsec", 1.0),
    }
}

fn latency_line(out: &mut String, name: &str, latency: &Latency) {
    let (unit, scale) = unit(latency);
    let (min, max) = (latency.min_ns as f64 / scale, latency.max_ns as f64 / scale);
    let (avg, stdev) = (latency.mean_ns / scale, latency.deviation_ns / scale);
    let _ = writeln!(
        out,
        "    {name:>4} ({unit}): min={min:.0}, max={max:.0}, avg={avg:.2}, stdev={stdev:.2}"
    );
}

fn percentiles(out: &mut String, name: &str, latency: &Latency) {
    let (unit, scale) = unit(latency);
    let _ = writeln!(out, "    {name} percentiles ({unit}):");
    let width = format!("{:.0}", latency.max_ns as f64 / scale).len().max(4);
    let rows = latency.percentiles_ns.chunks(4);
    let last = rows.len().saturating_sub(1);
    for (i, row) in rows.enumerate() {
        let cells: Vec<_> = row
            .iter()
            .map(|&(percent, ns)| format!("{percent:>5.2}th=[{:>width$.0}]", ns as f64 / scale))
            .collect();
        let _ = writeln!(out, "     | {}{}", cells.join(", "), if i < last { "," } else { "" });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::histogram::Histogram;

    #[test]
    fn figures_are_scaled_as_by_fio() {
        assert_eq!(
            [0.0, 999.0, 105_000.0, 1_250_000.0].map(decimal),
            ["0", "999", "105k", "1.25M"]
        );
        assert_eq!([512.0, 4096.0, 430_964_736.0].map(binary), ["512", "4.00Ki", "411Mi"]);
        assert_eq!(bandwidth(430_964_736.0), "bw=411MiB/s (431MB/s)");
    }

    #[test]
    fn latencies_have_fios_names_and_samples_are_absent_without_any() {
        let mut text = String::new();
        let (requests, samples) =
            (RequestReport { requests: 1, ..Default::default() }, Rates::default());
        DirectionReport { iops: 1.0, bytes_per_second: 1.0, samples, requests }
            .to_text(&mut text, "read", 1.0);
        for name in ["slat (nsec)", "clat (nsec)", " lat (nsec)", "clat percentiles"] {
            assert!(text.contains(name), "{name:?} is not in {text}");
        }
        assert!(!text.contains("samples"), "{text}");
    }

    #[test]
    fn latencies_are_laid_out_as_by_fio() {
        let mut histogram = Histogram::default();
        for us in 100..200 {
            histogram.record(Duration::from_micros(us));
        }
        let mut out = String::new();
        latency_line(&mut out, "clat", &histogram.summary(&PERCENTILES));
        percentiles(&mut out, "clat", &histogram.summary(&PERCENTILES));
        let lines: Vec<_> = out.lines().collect();
        assert_eq!(lines[0], "    clat (usec): min=100, max=199, avg=149.50, stdev=28.87");
        assert_eq!(lines[1], "    clat percentiles (usec):");
        assert_eq!(lines.len(), 2 + 5);
        assert!(lines[2].starts_with("     |  1.00th=[ 100],  5.00th=[ 104]"), "{}", lines[2]);
        assert!(lines[6].starts_with("     | 99.99th=[ 199]"), "{}", lines[6]);
    }
}
