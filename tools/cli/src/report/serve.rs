//! The reports of a server.

use super::stack::StackReport;
use super::{CpuReport, RequestReport, line};
use crate::server::operation::ServeStats;
use crate::server::run::Served;
use crate::units::{ByteSize, counted, grouped, time};
use pinfold_nbd::BlockSizes;
use serde::Serialize;
use std::fmt::{self, Write};
use std::time::Duration;

/// Printed as soon as clients can connect.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Listening {
    command: &'static str,
    /// The target, as named on the command line.
    target: String,
    /// The number of bytes served.
    bytes: u64,
    /// The address, as NBD clients write it; the first one if there are several.
    listening: String,
    /// All addresses.
    addresses: Vec<String>,
    /// Requests are multiples of this.
    block_minimum: u32,
    /// Requests that are multiples of this are fast.
    block_preferred: u32,
    /// The longest request.
    block_maximum: u32,
    /// The parts that are slower than they could be, with the reason.
    notes: Vec<String>,
}

impl Listening {
    /// Creates the report of a server of `bytes` bytes at `addresses`.
    pub(crate) fn new(
        target: String,
        bytes: u64,
        addresses: Vec<String>,
        BlockSizes { minimum, preferred, maximum }: BlockSizes,
        notes: Vec<String>,
    ) -> Self {
        Self {
            command: "serve",
            target,
            bytes,
            listening: addresses.first().cloned().unwrap_or_default(),
            addresses,
            block_minimum: minimum,
            block_preferred: preferred,
            block_maximum: maximum,
            notes,
        }
    }
}

impl fmt::Display for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (target, bytes, uri) = (&self.target, ByteSize(self.bytes), &self.listening);
        writeln!(f, "serving {target} ({bytes} in blocks of {}) at {uri}", self.block_minimum)?;
        let out = &mut String::new();
        for address in self.addresses.iter().skip(1) {
            line(out, "also at", format_args!("{address}"));
        }
        for note in &self.notes {
            line(out, "note", format_args!("{note}"));
        }
        f.write_str(out)
    }
}

/// The report of a server that has ended.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ServeReport {
    /// `serve`.
    pub(crate) command: &'static str,
    /// The target, as named on the command line.
    pub(crate) target: String,
    /// The time for which clients could connect.
    pub(crate) seconds: f64,
    /// The clients and their requests.
    pub(crate) clients: ServeStats,
    /// Clients that were refused, because there were too many.
    pub(crate) refused: u64,
    /// The reads at the target; a long request takes several.
    pub(crate) reads: RequestReport,
    /// The writes at the target.
    pub(crate) writes: RequestReport,
    /// The deallocations.
    pub(crate) trims: RequestReport,
    /// The flushes.
    pub(crate) flushes: RequestReport,
    /// The processor time of the whole process.
    pub(crate) cpu: CpuReport,
    /// The statistics of the memory stack.
    pub(crate) stack: StackReport,
    /// Fallbacks to something slower, with the reason.
    pub(crate) notes: Vec<String>,
}

impl ServeReport {
    /// Creates the report of the statistics `served` in `elapsed`.
    pub(crate) fn new(
        target: String,
        elapsed: Duration,
        served: &Served,
        cpu: CpuReport,
        stack: StackReport,
        notes: Vec<String>,
    ) -> Self {
        let report = |stats| RequestReport::new(stats);
        Self {
            command: "serve",
            target,
            seconds: elapsed.as_secs_f64(),
            clients: served.clients,
            refused: served.refused,
            reads: report(&served.target.reads),
            writes: report(&served.target.writes),
            trims: report(&served.target.trims),
            flushes: report(&served.target.flushes),
            cpu,
            stack,
            notes,
        }
    }
}

/// Returns the mean latency in whole nanoseconds.
fn mean_ns(report: &RequestReport) -> u64 {
    whole(report.total.mean_ns)
}

fn whole(ns: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "to be printed; `as` saturates"
    )]
    let whole = ns as u64;
    whole
}

impl fmt::Display for ServeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let out = &mut String::new();
        let ServeStats {
            connections,
            dropped,
            cut,
            requests,
            errors,
            received,
            copied,
            sent,
            memory_waits,
            lost,
            turns: _,
            // The error that follows says it.
            unflushed: _,
        } = self.clients;
        let _ = writeln!(out, "served {} for {:.1} s", self.target, self.seconds);
        let clients = format_args!(
            "{}, {} refused, {dropped} dropped",
            counted(connections, "client"),
            self.refused
        );
        line(out, "clients", clients);
        if cut > 0 {
            line(
                out,
                "cut off",
                format_args!("{} before their last replies", counted(cut, "client")),
            );
        }
        line(out, "requests", format_args!("{}, {} failed", grouped(requests), grouped(errors)));
        let moved = format_args!(
            "{} received ({} copied), {} sent, {} for memory",
            ByteSize(received),
            ByteSize(copied),
            ByteSize(sent),
            counted(memory_waits, "wait"),
        );
        line(out, "payloads", moved);
        if lost > 0 {
            let why = "is lost, since the controller may still reach it: check the device";
            line(out, "memory", format_args!("{} of --buffers {why}", ByteSize(lost)));
        }
        let all = [
            ("reads", &self.reads),
            ("writes", &self.writes),
            ("trims", &self.trims),
            ("flushes", &self.flushes),
        ];
        for (name, report) in all.into_iter().filter(|(_, report)| report.requests > 0) {
            let mean = time(mean_ns(report));
            line(
                out,
                name,
                format_args!(
                    "{} of {}, {mean} each",
                    grouped(report.requests),
                    ByteSize(report.bytes)
                ),
            );
        }
        let CpuReport { user_seconds, system_seconds, ns_per_request } = self.cpu;
        let mut cpu = format!("{user_seconds:.2} s user, {system_seconds:.2} s system");
        if ns_per_request > 0.0 {
            let _ = write!(cpu, ", {} a request", time(whole(ns_per_request)));
        }
        line(out, "cpu", format_args!("{cpu}"));
        let _ = write!(out, "{}", self.stack);
        for note in &self.notes {
            line(out, "note", format_args!("{note}"));
        }
        f.write_str(out)
    }
}
