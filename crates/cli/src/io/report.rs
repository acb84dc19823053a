//! What a workload did, laid out as fio does it, or as JSON.

use super::cpu::CpuReport;
use super::engine::{Outcome, Workload};
use super::verify::Verified;
use crate::account::{RequestReport, StackReport};
use crate::args::Rw;
use crate::latency::Latency;
use crate::units::{ByteSize, counted, per_second};
use serde::Serialize;
use std::fmt::Write;
use std::time::Duration;

/// What a workload did.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct IoReport {
    /// `io`.
    pub(crate) command: &'static str,
    /// As the user named it.
    pub(crate) target: String,
    /// What was done.
    pub(crate) rw: Rw,
    /// Bytes of one request, the most where they differ.
    pub(crate) block_bytes: u64,
    /// The fewest bytes of one request.
    pub(crate) least_block_bytes: u64,
    /// The most requests in flight of one job.
    pub(crate) iodepth: u64,
    /// How many jobs there were, each with a queue and a part of the target.
    pub(crate) numjobs: u64,
    /// How many bytes of the target were used.
    pub(crate) size_bytes: u64,
    /// How long it took.
    pub(crate) seconds: f64,
    /// The reads, if there were any.
    pub(crate) read: Option<DirectionReport>,
    /// The writes, if there were any.
    pub(crate) write: Option<DirectionReport>,
    /// What was found to be right, where that was asked for.
    pub(crate) verified: Option<Verified>,
    /// What it cost the processor.
    pub(crate) cpu: CpuReport,
    /// What the memory stack did.
    pub(crate) stack: StackReport,
    /// What fell back to something slower, and why.
    pub(crate) notes: Vec<String>,
}

/// Requests of one way.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DirectionReport {
    /// Requests a second.
    pub(crate) iops: f64,
    /// Bytes a second.
    pub(crate) bytes_per_second: f64,
    /// How many, and how long each took.
    #[serde(flatten)]
    pub(crate) requests: RequestReport,
}

impl DirectionReport {
    fn new(requests: RequestReport, elapsed: Duration) -> Option<Self> {
        (requests.requests > 0).then(|| Self {
            iops: per_second(requests.requests, elapsed),
            bytes_per_second: per_second(requests.bytes, elapsed),
            requests,
        })
    }
}

impl IoReport {
    /// The account of `outcome`.
    pub(crate) fn new(
        target: String,
        iodepth: u64,
        (workload, outcome): (&Workload, &Outcome),
        stack: StackReport,
        notes: Vec<String>,
    ) -> Self {
        Self {
            command: "io",
            target,
            rw: workload.rw,
            block_bytes: workload.block as u64,
            least_block_bytes: workload.block as u64,
            iodepth,
            numjobs: 1,
            size_bytes: workload.blocks.saturating_mul(workload.block as u64),
            seconds: outcome.elapsed.as_secs_f64(),
            read: DirectionReport::new(RequestReport::new(&outcome.reads), outcome.elapsed),
            write: DirectionReport::new(RequestReport::new(&outcome.writes), outcome.elapsed),
            verified: None,
            cpu: CpuReport::default(),
            stack,
            notes,
        }
    }

    /// The account as text.
    pub(crate) fn to_text(&self) -> String {
        let mut out = String::new();
        let rw = format!("{:?}", self.rw).to_lowercase();
        let bs = match (self.least_block_bytes, self.block_bytes) {
            (least, most) if least < most => format!("{least}B-{most}"),
            (_, bs) => bs.to_string(),
        };
        let jobs = if self.numjobs > 1 { format!(", numjobs={}", self.numjobs) } else { String::new() };
        // Writing to a `String` does not fail, here and below.
        let _ = writeln!(
            out,
            "{}: rw={rw}, bs={bs}B, iodepth={}{jobs}, size={}B",
            self.target, self.iodepth, self.size_bytes
        );
        for (name, way) in [("read", &self.read), ("write", &self.write)] {
            if let Some(way) = way {
                way.to_text(&mut out, name, self.seconds);
            }
        }
        self.cpu.to_text(&mut out, self.seconds);
        let _ = writeln!(out, "\nRun status:");
        for (name, way) in [("READ", &self.read), ("WRITE", &self.write)] {
            if let Some(way) = way {
                let run = format_args!("{:>8}: {}", name, bandwidth(way.bytes_per_second));
                let io = binary(way.requests.bytes as f64);
                let _ = writeln!(out, "{run}, io={io}B, run={:.0}msec", self.seconds * 1e3);
            }
        }
        if let Some(verified) = &self.verified {
            let Verified { requests, compared_bytes, sha256, parts, .. } = verified;
            let (requests, compared) = (counted(*requests, "request"), binary(*compared_bytes as f64));
            let _ = writeln!(out, "\nVerified: {requests} and a last pass, {compared}B compared, all right");
            if verified.laid_out_bytes.min(verified.read_back_bytes) < self.size_bytes {
                let (laid, back) = (ByteSize(verified.laid_out_bytes), ByteSize(verified.read_back_bytes));
                let _ = writeln!(
                    out,
                    "In part: the time was over when {laid} were written, {back} read again at the end"
                );
            }
            if let Some(sha256) = sha256 {
                let _ = writeln!(out, "sha256 of the {} bytes: {sha256}", self.size_bytes);
            }
            for (job, sha256) in (1..).zip(parts) {
                let _ = writeln!(out, "sha256 of the part of job {job}: {sha256}");
            }
        }
        self.stack.to_text(&mut out);
        for note in &self.notes {
            let _ = writeln!(out, "note: {note}");
        }
        out
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
        // Not fio's `slat` and `clat`: the call that submits a batch and waits is one, and is part of the second here.
        latency_line(out, "qlat", &requests.queueing);
        latency_line(out, "rlat", &requests.completion);
        latency_line(out, "lat", &requests.total);
        percentiles(out, "qlat", &requests.queueing);
        percentiles(out, "rlat", &requests.completion);
    }
}

/// `bw=411MiB/s (431MB/s)`.
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

/// fio's rule: the largest unit in which the least still has four digits or so.
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
    let _ =
        writeln!(out, "    {name:>4} ({unit}): min={min:.0}, max={max:.0}, avg={avg:.2}, stdev={stdev:.2}");
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
    use crate::latency::Histogram;

    #[test]
    fn figures_are_scaled_as_fio_does() {
        assert_eq!([0.0, 999.0, 105_000.0, 1_250_000.0].map(decimal), ["0", "999", "105k", "1.25M"]);
        assert_eq!([512.0, 4096.0, 430_964_736.0].map(binary), ["512", "4.00Ki", "411Mi"]);
        assert_eq!(bandwidth(430_964_736.0), "bw=411MiB/s (431MB/s)");
    }

    #[test]
    fn what_is_not_measured_as_fio_does_has_not_its_name() {
        let mut text = String::new();
        let requests = RequestReport { requests: 1, ..Default::default() };
        DirectionReport { iops: 1.0, bytes_per_second: 1.0, requests }.to_text(&mut text, "read", 1.0);
        assert!(
            text.contains("qlat (nsec)") && text.contains("rlat (nsec)") && text.contains(" lat (nsec)"),
            "{text}"
        );
        assert!(!text.contains("slat") && !text.contains("clat"), "{text}");
    }

    #[test]
    fn latencies_are_laid_out_as_fio_does() {
        let mut histogram = Histogram::default();
        for us in 100..200 {
            histogram.record(Duration::from_micros(us));
        }
        let mut out = String::new();
        latency_line(&mut out, "clat", &histogram.summary());
        percentiles(&mut out, "clat", &histogram.summary());
        let lines: Vec<_> = out.lines().collect();
        assert_eq!(lines[0], "    clat (usec): min=100, max=199, avg=149.50, stdev=28.87");
        assert_eq!(lines[1], "    clat percentiles (usec):");
        assert_eq!(lines.len(), 2 + 5);
        assert!(lines[2].starts_with("     |  1.00th=[ 100],  5.00th=[ 104]"), "{}", lines[2]);
        assert!(lines[6].starts_with("     | 99.99th=[ 199]"), "{}", lines[6]);
    }
}
