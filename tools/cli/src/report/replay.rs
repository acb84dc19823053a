//! The report of a replay: the needs of each policy, beside those recorded.

use crate::args::TimingArg;
use crate::output::OutputError;
use crate::units::{ByteSize, counted, grouped, time};
use pinfold_core::access::Access;
use pinfold_core::table::MappedRun;
use pinfold_replay::{Counts, Device, Footprint, Outcome, Summary, Times, Trace};
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;

/// The report of a replay.
#[derive(Debug)]
pub(crate) struct Report<'t> {
    trace: TraceLine<'t>,
    devices: Vec<(DeviceLine<'t>, Vec<Row<'t>>)>,
}

/// The trace that was read.
#[derive(Debug, Serialize)]
struct TraceLine<'t> {
    trace: String,
    timing: &'static str,
    devices: usize,
    /// Why policies are missing; `None` if all were replayed.
    failure: Option<String>,
    #[serde(flatten)]
    summary: &'t Summary,
}

/// The operations of one device.
#[derive(Debug, Serialize)]
struct DeviceLine<'t> {
    device: &'t str,
    #[serde(flatten)]
    counts: &'t Counts,
}

/// The needs of one policy for one device, or the recorded ones.
#[derive(Debug, Serialize)]
pub(crate) struct Row<'t> {
    device: &'t str,
    policy: &'static str,
    #[serde(flatten)]
    footprint: Footprint,
    /// `None` of what was recorded.
    #[serde(flatten)]
    replayed: Option<Replayed>,
    /// The mappings that remain at the end; `None` unless it is wanted and can be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    mapped: Option<Vec<MappedLine>>,
}

/// The figures that can be measured of a policy only.
#[derive(Debug, Serialize)]
struct Replayed {
    /// Entries that the policy keeps for the addresses, and the pages of its table, when the most
    /// bytes are mapped.
    entries_at_peak: u64,
    own_table_pages_at_peak: u64,
    invalidations: u64,
    domain_flushes: u64,
    waits: u64,
    pages_requested: u64,
    pages_flushed: u64,
    map: Times,
    unmap: Times,
    held_bytes_peak: u64,
    /// The longest time from an unmap until no device reached its memory; `None` for ever.
    reachable_ns: Option<u64>,
    free_while_reachable: bool,
    late_ns: u64,
    /// The IOMMU is a model.
    modelled: bool,
}

impl<'t> Row<'t> {
    /// The name of the recorded addresses, among the policies.
    pub(crate) const RECORDED: &'static str = "recorded";

    fn recorded(device: &'t Device) -> Self {
        let footprint = device.footprint();
        Self {
            device: &device.name,
            policy: Self::RECORDED,
            footprint,
            replayed: None,
            mapped: None,
        }
    }

    fn of(device: &'t Device, outcome: &Outcome, lists_mapped: bool) -> Self {
        let Outcome { at_peak, stats, footprint, maps, unmaps, late_ns, .. } = *outcome;
        let replayed = Replayed {
            entries_at_peak: at_peak.entries,
            own_table_pages_at_peak: at_peak.table_pages,
            invalidations: stats.invalidations,
            domain_flushes: stats.domain_flushes,
            waits: stats.waits,
            pages_requested: stats.pages_requested,
            pages_flushed: stats.pages_flushed,
            map: maps,
            unmap: unmaps,
            held_bytes_peak: stats.held_bytes_peak,
            reachable_ns: Some(stats.reachable_ns).filter(|ns| *ns < u64::MAX),
            free_while_reachable: stats.reused_while_reachable,
            late_ns,
            modelled: true,
        };
        let runs = outcome.mapped.as_ref().filter(|_| lists_mapped);
        let mapped = runs.map(|runs| runs.iter().map(MappedLine::from).collect());
        let policy = outcome.policy.name();
        Self { device: &device.name, policy, footprint, replayed: Some(replayed), mapped }
    }
}

impl<'t> Report<'t> {
    /// Gathers the report, with why it lacks policies, if it does, and with what is still mapped at
    /// the end if it `lists_mapped`. `by_policy` has an outcome for each device.
    pub(crate) fn new(
        path: &Path,
        timing: TimingArg,
        lists_mapped: bool,
        trace: &'t Trace,
        by_policy: &[Vec<Outcome>],
        failure: Option<String>,
    ) -> Self {
        let timing = match timing {
            TimingArg::Fast => "fast",
            TimingArg::Original => "original",
        };
        let devices = trace.devices.iter().enumerate().map(|(at, device)| {
            let outcomes = by_policy.iter().filter_map(|outcomes| outcomes.get(at));
            let rows = std::iter::once(Row::recorded(device))
                .chain(outcomes.map(|outcome| Row::of(device, outcome, lists_mapped)));
            (DeviceLine { device: &device.name, counts: &device.counts }, rows.collect())
        });
        let devices: Vec<_> = devices.collect();
        let name = path.display().to_string();
        let trace = TraceLine {
            trace: name,
            timing,
            devices: devices.len(),
            failure,
            summary: &trace.summary,
        };
        Self { trace, devices }
    }

    /// Formats one JSON object per line.
    pub(crate) fn to_json(&self) -> Result<String, OutputError> {
        let mut out = serde_json::to_string(&self.trace)? + "\n";
        for (device, rows) in &self.devices {
            out += &(serde_json::to_string(device)? + "\n");
            for row in rows {
                out += &(serde_json::to_string(row)? + "\n");
            }
        }
        Ok(out)
    }

    /// Formats tables.
    pub(crate) fn to_text(&self) -> String {
        let mut out = String::new();
        self.summary(&mut out);
        for (device, rows) in &self.devices {
            out.push('\n');
            counts(&mut out, device);
            addresses(&mut out, rows);
            flushes(&mut out, rows, device.counts);
            times(&mut out, rows);
            append_mapped(&mut out, rows);
        }
        out.push_str(NOTES);
        out
    }

    fn summary(&self, out: &mut String) {
        let TraceLine { trace, timing, devices, failure, summary } = &self.trace;
        let Summary { lines, dma_events, iommu_events, other_events, cpus, .. } = summary;
        let over = summary.duration_ns.map(|ns| format!(" in {}", time(ns))).unwrap_or_default();
        // Writing to a `String` does not fail, here and below.
        let _ = writeln!(
            out,
            "{trace}: {}, {} of the DMA interface, {} of the IOMMU{over} on {}; {}, replayed with --timing {timing}",
            counted(*lines, "line"),
            counted(*dma_events, "event"),
            grouped(*iommu_events),
            counted(*cpus, "processor"),
            counted(*devices as u64, "device"),
        );
        let mut note = |count: u64, words: &str| {
            if count > 0 {
                let _ = writeln!(out, "  {} {words}", grouped(count));
            }
        };
        note(*other_events, "events of something else");
        note(
            summary.iommu_unassigned,
            "calls of the IOMMU's driver belong to no event of the DMA interface",
        );
        note(summary.out_of_order, "events are earlier than the one before");
        if summary.damaged > 0 {
            let _ = writeln!(out, "  {}, left out:", counted(summary.damaged, "damaged line"));
        }
        for (line, damage) in &summary.first_damaged {
            let _ = writeln!(out, "    line {}: {damage}", grouped(*line));
        }
        if summary.losses > 0 {
            let _ = writeln!(
                out,
                "  events were lost {} ({} in all, as far as is known; first at line {}): record with a larger buffer",
                counted(summary.losses, "time"),
                grouped(summary.lost_events),
                grouped(summary.first_loss)
            );
        }
        if let Some(why) = &summary.ended_early {
            let _ = writeln!(out, "  the trace ends early, behind line {}: {why}", grouped(*lines));
        }
        if let Some(why) = failure {
            let _ = writeln!(
                out,
                "  the replay ended early, and the policies that follow are missing: {why}"
            );
        }
        if summary.limited {
            let _ = writeln!(
                out,
                "  the rest was not read: --limit, or too many segments of scatter lists"
            );
        }
    }
}

/// Appends the operations of a device.
fn counts(out: &mut String, line: &DeviceLine<'_>) {
    let Counts { maps, unmaps, lists, never_unmapped, peak_mappings, peak_bytes, .. } =
        *line.counts;
    let _ = writeln!(
        out,
        "{}: {} ({}), {}; at most {} at a time, {}; {} never unmapped",
        line.device,
        counted(maps, "map"),
        counted(lists, "scatter list"),
        counted(unmaps, "unmap"),
        grouped(peak_mappings),
        ByteSize(peak_bytes),
        grouped(never_unmapped),
    );
    let counts = line.counts;
    for (count, words) in [
        (counts.unmaps_without_map, "unmaps of what the trace does not map, left out"),
        (counts.overlapping, "maps at an address that was still in use"),
        (counts.without_memory, "allocations without a physical address, in memory of their own"),
        (
            counts.split_evenly,
            "scatter lists without the sizes of their segments, taken to be equal",
        ),
        (
            counts.truncated,
            "scatter lists of which the kernel recorded the first segments only: the others are left out",
        ),
        (counts.failed, "maps that failed"),
        (counts.faults, "accesses to what was not mapped"),
        (
            counts.iommu_unmaps_partial,
            "unmaps of the IOMMU's driver that removed another size than was asked for",
        ),
    ] {
        if count > 0 {
            let _ = writeln!(out, "  {} {words}", grouped(count));
        }
    }
}

/// Appends the table pages that the addresses need.
fn addresses(out: &mut String, rows: &[Row<'_>]) {
    let _ = writeln!(
        out,
        "  {:<18}{:>9}{:>12}{:>10}{:>9}{:>9}{:>9}",
        "addresses", "extents", "span", "pages", "tables", "ever", "entries"
    );
    for Row { policy, footprint, replayed, .. } in rows {
        let entries = replayed
            .as_ref()
            .map_or("-".to_owned(), |replayed| replayed.entries_at_peak.to_string());
        let _ = writeln!(
            out,
            "  {policy:<18}{:>9}{:>12}{:>10}{:>9}{:>9}{entries:>9}",
            footprint.extents_at_peak,
            ByteSize(footprint.span_bytes),
            footprint.pages,
            footprint.table_pages_at_peak,
            footprint.table_pages_ever,
        );
    }
}

/// Appends how addresses were taken back.
fn flushes(out: &mut String, rows: &[Row<'_>], counts: &Counts) {
    let _ = writeln!(
        out,
        "  {:<18}{:>9}{:>12}{:>10}{:>12}{:>12}  reachable",
        "flushes", "sent", "of domain", "waits", "per page", "held"
    );
    for Row { policy, replayed, .. } in rows {
        let Some(replayed) = replayed else {
            let per_page = ratio(counts.strict_flush_pages, counts.iommu_unmapped_pages);
            let sent = counts.iommu_unmaps;
            let _ = writeln!(
                out,
                "  {policy:<18}{sent:>9}{:>12}{:>10}{per_page:>12}{:>12}  -",
                "-", "-", "-"
            );
            continue;
        };
        let reachable = match (replayed.reachable_ns, replayed.free_while_reachable) {
            (None, _) => "always".to_owned(),
            (Some(0), _) => "0".to_owned(),
            (Some(ns), true) => format!("{} while free", time(ns)),
            (Some(ns), false) => format!("{} while held", time(ns)),
        };
        let _ = writeln!(
            out,
            "  {policy:<18}{:>9}{:>12}{:>10}{:>12}{:>12}  {reachable}",
            replayed.invalidations,
            replayed.domain_flushes,
            replayed.waits,
            ratio(replayed.pages_flushed, replayed.pages_requested),
            ByteSize(replayed.held_bytes_peak),
        );
    }
}

/// Appends the times of maps and unmaps.
fn times(out: &mut String, rows: &[Row<'_>]) {
    let _ = writeln!(
        out,
        "  {:<18}{:>9}{:>9}{:>9}{:>12}{:>11}{:>9}{:>9}{:>12}",
        "ns per operation",
        "map: min",
        "median",
        "p99",
        "max",
        "unmap: min",
        "median",
        "p99",
        "max"
    );
    for Row { policy, replayed, .. } in rows {
        let Some(Replayed { map, unmap, .. }) = replayed else { continue };
        let _ = writeln!(
            out,
            "  {policy:<18}{:>9}{:>9}{:>9}{:>12}{:>11}{:>9}{:>9}{:>12}",
            map.min_ns,
            map.median_ns,
            map.p99_ns,
            map.max_ns,
            unmap.min_ns,
            unmap.median_ns,
            unmap.p99_ns,
            unmap.max_ns
        );
    }
    let late =
        rows.iter().filter_map(|row| row.replayed.as_ref()).map(|replayed| replayed.late_ns).max();
    if let Some(late) = late.filter(|late| *late > 0) {
        let _ = writeln!(out, "  the latest operation was {} behind its time", time(late));
    }
}

/// Formats a quotient.
#[expect(clippy::cast_precision_loss, reason = "two decimals are printed")]
fn ratio(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.2}", part as f64 / whole as f64) }
}

/// The meaning of the columns, below all tables.
const NOTES: &str = "
extents: runs of adjacent addresses when the most bytes are mapped; tables: pages of the I/O page table for these; ever: of a
table that is never freed; pages: different pages of addresses ever used; span: from the lowest to the highest address; entries:
what the policy keeps for its addresses. per page: pages flushed for each page to be flushed. recorded: what the kernel did;
a trace has no flushes, so these are the unmaps of the IOMMU's driver and what VT-d would flush for them in strict mode.
The IOMMU of the policies is a model: a flush and its wait take 1 µs, each further flush 0.22 µs.
";

/// Adjacent leaves of a table.
#[derive(Debug, Serialize)]
struct MappedLine {
    iova: u64,
    bytes: u64,
    /// In the memory of the replay, not that of the trace.
    phys: u64,
    page_bytes: u64,
    access: &'static str,
}

impl From<&MappedRun> for MappedLine {
    fn from(run: &MappedRun) -> Self {
        Self {
            iova: run.iova.start().raw(),
            bytes: run.iova.len(),
            phys: run.phys.raw(),
            page_bytes: run.page_size.bytes(),
            access: words(run.access),
        }
    }
}

fn words(access: Access) -> &'static str {
    match (access.contains(Access::READ), access.contains(Access::WRITE)) {
        (true, true) => "read-write",
        (true, false) => "read",
        (false, true) => "write",
        (false, false) => "none",
    }
}

/// Appends what each policy's table maps at the end, if that is listed.
fn append_mapped(out: &mut String, rows: &[Row<'_>]) {
    for Row { policy, mapped, .. } in rows {
        let Some(runs) = mapped else { continue };
        let bytes = runs.iter().map(|run| run.bytes).sum();
        // Writing to a `String` does not fail, here and below.
        let _ = writeln!(
            out,
            "  still mapped by {policy}: {} in {}",
            ByteSize(bytes),
            counted(runs.len() as u64, "run")
        );
        if runs.is_empty() {
            continue;
        }
        let _ = writeln!(
            out,
            "  {:>18}{:>12}{:>20}{:>10}  access",
            "iova", "bytes", "physical", "page"
        );
        for run in runs {
            let _ = writeln!(
                out,
                "  {:>#18x}{:>12}{:>#20x}{:>10}  {}",
                run.iova,
                ByteSize(run.bytes),
                run.phys,
                ByteSize(run.page_bytes),
                run.access
            );
        }
    }
}
