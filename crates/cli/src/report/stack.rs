//! The report of the memory stack, gathered from its parts.

use super::{line, remedies};
use crate::args::Protect;
use crate::setup::open::OpenTarget;
use crate::setup::stack::Stack;
use crate::targets::nvme::NvmeStats;
use crate::units::{ByteSize, counted, grouped, time};
use pinfold::arena::{NotLocked, Residency, SourceUnavailable};
use pinfold::{Arena, Domain, MappingPolicy};
use pinfold_core::addr::PageSize;
use pinfold_core::dma_pool::DmaPoolStats;
use serde::Serialize;
use std::fmt::{self, Write};
use std::time::Duration;

/// The cost of an arena of 2 MiB or more on small pages.
const SMALL_PAGES_COST: &str =
    "an I/O page-table entry and an IOTLB entry for each 4 KiB; hugepages take one for 2 MiB";

/// The memory stack of a run, and its statistics.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct StackReport {
    /// When a controller could reach the data buffers.
    pub(crate) protect: Protect,
    /// The arenas.
    pub(crate) memory: Vec<MemoryReport>,
    /// The commands that make the refused sources available, for all arenas together.
    pub(crate) fixes: Vec<String>,
    /// The controllers.
    pub(crate) devices: Vec<DeviceReport>,
    /// The DMA pools of all controllers.
    pub(crate) pools: Vec<PoolReport>,
    /// The I/O address space.
    pub(crate) domain: DomainReport,
}

impl StackReport {
    /// Creates the report of `stack` and the targets that use it.
    pub(crate) fn new(stack: &Stack, targets: &[&OpenTarget<'_>]) -> Self {
        let refused = targets.iter().map(|target| target.memlock_refused()).sum();
        Self {
            protect: stack.protect,
            memory: stack.arenas().map(|(name, arena)| MemoryReport::new(name, arena)).collect(),
            fixes: remedies::commands(stack, refused),
            devices: targets
                .iter()
                .filter_map(|target| target.nvme_stats())
                .map(DeviceReport::new)
                .collect(),
            pools: targets
                .iter()
                .filter_map(|target| target.pool_stats())
                .map(|stats| PoolReport::new(&stats))
                .collect(),
            domain: DomainReport::new(&stack.domain),
        }
    }
}

/// An arena.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct MemoryReport {
    /// `data` or `control`.
    pub(crate) name: &'static str,
    /// Its source.
    pub(crate) source: &'static str,
    /// Its size in bytes.
    pub(crate) bytes: u64,
    /// The size of its pages.
    pub(crate) page_bytes: u64,
    /// Whether all of it is mapped at all times.
    pub(crate) always_mapped: bool,
    /// The cost of small pages.
    pub(crate) cost: Option<&'static str>,
    /// Why its pages are not locked in memory, if they are not.
    pub(crate) not_locked: Option<String>,
    /// How many 4 KiB frames it has.
    pub(crate) frames: u64,
    /// How many of them were in use at the end.
    pub(crate) frames_in_use: u64,
    /// The most that were in use.
    pub(crate) frames_peak: u64,
    /// How many are quarantined, since a device may still reach them.
    pub(crate) frames_quarantined: u64,
    /// The sources that were tried before, and why they are unavailable.
    pub(crate) refused: Vec<RefusedReport>,
}

impl MemoryReport {
    fn new(name: &'static str, arena: &Arena) -> Self {
        let (report, stats) = (arena.report(), arena.stats());
        let not_locked = match &report.residency {
            // The command that raises the limit is reported once for all arenas.
            Residency::NotLocked(NotLocked::Limit { requested, used, allowed, .. }) => {
                Some(format!(
                    "RLIMIT_MEMLOCK: {requested} bytes requested, {used} locked already, {allowed} allowed"
                ))
            }
            Residency::NotLocked(why) => Some(why.to_string()),
            _ => None,
        };
        let small =
            report.page_size == PageSize::Size4K && report.bytes >= PageSize::Size2M.bytes();
        let refused = |unavailable: &SourceUnavailable| RefusedReport {
            source: unavailable.source.name(),
            why: unavailable.reason.to_string(),
        };
        Self {
            name,
            source: report.source.name(),
            bytes: report.bytes,
            page_bytes: report.page_size.bytes(),
            always_mapped: arena.mapping_policy() == MappingPolicy::Whole,
            cost: small.then_some(SMALL_PAGES_COST),
            not_locked,
            frames: stats.frames,
            frames_in_use: stats.frames_in_use,
            frames_peak: stats.frames_peak,
            frames_quarantined: stats.frames_quarantined,
            refused: report.unavailable.iter().map(refused).collect(),
        }
    }
}

/// A source of memory that is unavailable.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RefusedReport {
    /// The source.
    pub(crate) source: &'static str,
    /// The reason.
    pub(crate) why: String,
}

/// A controller, and its driver.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct DeviceReport {
    /// The target, as named on the command line.
    pub(crate) name: String,
    /// How many queues were used.
    pub(crate) queues: u64,
    /// Requests that the driver accepted.
    pub(crate) requests: u64,
    /// The commands they were split into.
    pub(crate) commands: u64,
    /// Commands that the controller completed with an error.
    pub(crate) errors: u64,
    /// Requests of which a command was sent again, because its status permits that.
    pub(crate) retried: u64,
    /// How many commands were sent again.
    pub(crate) retries: u64,
    /// The time for which commands waited for that, in seconds; those that wait together in a queue
    /// count once.
    pub(crate) retry_wait_seconds: f64,
    /// Requests that did not complete in time.
    pub(crate) timeouts: u64,
    /// Doorbell writes.
    pub(crate) doorbells: u64,
    /// Whether a wait sleeps until an interrupt (without `--poll`) or polls.
    pub(crate) by_interrupt: bool,
    /// How often the program slept until an interrupt.
    pub(crate) sleeps: u64,
    /// Interrupts that woke it.
    pub(crate) interrupts: u64,
    /// Segments of the data of all requests.
    pub(crate) segments: u64,
    /// Pages passed to the controller.
    pub(crate) prp_entries: u64,
    /// Pages of PRP lists that were needed.
    pub(crate) prp_pages: u64,
    /// Pages of PRP lists in use at the end.
    pub(crate) prp_pages_in_use: u64,
    /// The most in use at a time.
    pub(crate) prp_pages_peak: u64,
}

impl DeviceReport {
    /// Creates the report of `stats`.
    fn new(stats: NvmeStats) -> Self {
        let NvmeStats { name, queues, requests, by_interrupt, queue, controller } = stats;
        Self {
            name,
            queues,
            requests,
            commands: queue.commands,
            errors: queue.errors,
            retried: queue.retried_requests,
            retries: queue.retries,
            retry_wait_seconds: Duration::from_nanos(queue.retry_wait_ns).as_secs_f64(),
            timeouts: queue.timeouts,
            doorbells: queue.doorbells,
            by_interrupt,
            sleeps: queue.sleeps,
            interrupts: queue.interrupts,
            segments: queue.segments,
            prp_entries: queue.prp_entries,
            prp_pages: queue.prp_list_pages,
            prp_pages_in_use: controller.list_pages_used,
            prp_pages_peak: controller.list_pages_max,
        }
    }
}

/// A DMA pool.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PoolReport {
    /// Its name.
    pub(crate) name: String,
    /// Blocks in use at the end.
    pub(crate) in_use: u64,
    /// The most blocks in use at a time.
    pub(crate) peak: u64,
    /// All blocks.
    pub(crate) blocks: u64,
    /// Bytes of a block.
    pub(crate) block_bytes: u64,
    /// The chunks that contain them.
    pub(crate) chunks: u64,
    /// The chunks without a block in use.
    pub(crate) free_chunks: u64,
    /// Bytes of all chunks.
    pub(crate) bytes: u64,
}

impl PoolReport {
    /// Creates the report of `stats`.
    pub(crate) fn new(stats: &DmaPoolStats) -> Self {
        Self {
            name: stats.name.clone(),
            in_use: stats.in_use,
            peak: stats.peak,
            blocks: stats.blocks,
            block_bytes: stats.block_bytes,
            chunks: stats.chunks,
            free_chunks: stats.free_chunks,
            bytes: stats.bytes,
        }
    }
}

/// An I/O address space.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct DomainReport {
    /// The owner of its I/O page table.
    pub(crate) backend: &'static str,
    /// Whether its flushes take a modelled time: those of the software IOMMU.
    pub(crate) flushes_modelled: bool,
    /// Mappings created.
    pub(crate) maps: u64,
    /// The maps that needed no change of the table.
    pub(crate) maps_fixed: u64,
    /// Revocations that waited because too many bytes were held.
    pub(crate) limited: u64,
    /// Buffers that are quarantined, since a device may still reach them.
    pub(crate) quarantined: u64,
    /// Free extents of I/O virtual addresses.
    pub(crate) iova_extents: u64,
    /// Table pages in use.
    pub(crate) table_pages: u64,
    /// Ranges for which a flush was requested.
    pub(crate) invalidations_asked: u64,
    /// The flushes that also had to remove cached table pages.
    pub(crate) invalidations_of_tables: u64,
    /// The requests covered by the flush of a neighbour.
    pub(crate) invalidations_merged: u64,
    /// Flushes submitted.
    pub(crate) invalidations_sent: u64,
    /// Flushes of the whole domain.
    pub(crate) invalidations_whole: u64,
    /// Pages that were to be flushed.
    pub(crate) pages_requested: u64,
    /// Pages flushed for them; a flush of the whole domain counts as what was to be flushed.
    pub(crate) pages_flushed: u64,
    /// Wait descriptors submitted after them.
    pub(crate) waits_sent: u64,
    /// Calls that waited.
    pub(crate) waited: u64,
    /// How long they waited.
    pub(crate) waited_ns: u64,
}

impl DomainReport {
    fn new(domain: &Domain) -> Self {
        let stats = domain.stats();
        let invalidations = stats.backend.invalidations;
        Self {
            backend: domain.name(),
            flushes_modelled: domain.name() == "soft",
            maps: stats.maps,
            maps_fixed: stats.maps_fixed,
            limited: stats.limited,
            quarantined: stats.quarantined,
            iova_extents: stats.iova_extents,
            table_pages: stats.backend.table_pages,
            invalidations_asked: invalidations.requested,
            invalidations_of_tables: invalidations.requested_tables,
            invalidations_merged: invalidations.merged,
            invalidations_sent: invalidations.sent,
            invalidations_whole: invalidations.domain_flushes,
            pages_requested: invalidations.pages_requested,
            pages_flushed: invalidations.pages_flushed,
            waits_sent: invalidations.waits,
            waited: invalidations.waited,
            waited_ns: invalidations.wait_ns,
        }
    }
}

// The report of the memory stack as text.

impl fmt::Display for StackReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let out = &mut String::new();
        let _ = writeln!(out, "\nmemory");
        for memory in &self.memory {
            memory.to_text(out);
        }
        for fix in &self.fixes {
            line(out, "fix", format_args!("{fix}"));
        }
        for device in &self.devices {
            device.to_text(out);
        }
        if !self.devices.is_empty() {
            self.domain.to_text(out, self.protect);
        }
        if !self.pools.is_empty() {
            out.push('\n');
            self.pools_to_text(out);
        }
        f.write_str(out)
    }
}

impl StackReport {
    /// Appends the pools with their peaks.
    pub(crate) fn pools_to_text(&self, out: &mut String) {
        let heads = ["in use", "peak", "blocks", "bytes each", "chunks", "free"];
        let _ = write!(out, "{:<16}", "pools");
        for head in heads {
            let _ = write!(out, " {head:>10}");
        }
        out.push('\n');
        for pool in &self.pools {
            let _ = write!(out, "  {:<14}", pool.name);
            let figures = [
                pool.in_use,
                pool.peak,
                pool.blocks,
                pool.block_bytes,
                pool.chunks,
                pool.free_chunks,
            ];
            for figure in figures {
                let _ = write!(out, " {:>10}", grouped(figure));
            }
            out.push('\n');
        }
    }

    /// Formats the pools as the kernel does: name, blocks in use, blocks, block size, chunks.
    pub(crate) fn pools_to_kernel_text(&self) -> String {
        let mut out = String::from("poolinfo - 0.1\n");
        for pool in &self.pools {
            let PoolReport { name, in_use, blocks, block_bytes, chunks, .. } = pool;
            let _ =
                writeln!(out, "{name:<16} {in_use:>4} {blocks:>4} {block_bytes:>4} {chunks:>2}");
        }
        out
    }
}

impl MemoryReport {
    fn to_text(&self, out: &mut String) {
        let mapped = if self.always_mapped { "always mapped" } else { "mapped while in use" };
        let what = format_args!(
            "{} from {} in pages of {}, {mapped}",
            ByteSize(self.bytes),
            self.source,
            ByteSize(self.page_bytes)
        );
        line(out, self.name, what);
        let mut quarantined = String::new();
        if self.frames_quarantined > 0 {
            quarantined = format!(", {} quarantined", grouped(self.frames_quarantined));
        }
        let frames = format_args!(
            "{} of {} in use, peak {}{quarantined}",
            grouped(self.frames_in_use),
            counted(self.frames, "frame"),
            grouped(self.frames_peak)
        );
        line(out, "", frames);
        if let Some(cost) = self.cost {
            line(out, "", format_args!("cost: {cost}"));
        }
        if let Some(why) = &self.not_locked {
            line(out, "", format_args!("not locked: {why}"));
        }
        for refused in &self.refused {
            line(out, "", format_args!("refused: {}: {}", refused.source, refused.why));
        }
    }
}

impl DeviceReport {
    fn to_text(&self, out: &mut String) {
        let _ = writeln!(out, "\ncontroller {}", self.name);
        let requests = counted(self.requests, "I/O");
        line(out, "I/Os", format_args!("{requests} as {}", counted(self.commands, "command")));
        let waits = if self.by_interrupt {
            let (sleeps, interrupts) =
                (counted(self.sleeps, "sleep"), counted(self.interrupts, "interrupt"));
            format!("by interrupt: {sleeps}, {interrupts}")
        } else {
            "polled".to_owned()
        };
        let queues = counted(self.queues, "queue");
        line(
            out,
            "queues",
            format_args!("{queues}, {}, {waits}", counted(self.doorbells, "doorbell")),
        );
        if let Some(failures) = self.failures() {
            line(out, "failures", format_args!("{failures}"));
        }
        let per_request =
            if self.requests > 0 { self.segments as f64 / self.requests as f64 } else { 0.0 };
        line(out, "segments", format_args!("{per_request:.2} per I/O"));
        let pages = format_args!(
            "{} passed to the controller, with {} of PRP lists, peak {}",
            counted(self.prp_entries, "page"),
            counted(self.prp_pages, "page"),
            grouped(self.prp_pages_peak)
        );
        line(out, "PRP pages", pages);
    }

    /// Returns the failed commands, if there are any, and what became of them.
    pub(super) fn failures(&self) -> Option<String> {
        (self.errors + self.timeouts > 0).then(|| {
            let (errors, timeouts) = (counted(self.errors, "error"), self.timeouts);
            let retried = match self.retried {
                0 => "0 retried".to_owned(),
                retried => {
                    let waited =
                        Duration::try_from_secs_f64(self.retry_wait_seconds).unwrap_or_default();
                    let waited = time(u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX));
                    format!("{} retried after {waited} in all", counted(retried, "request"))
                }
            };
            format!("{errors}, {retried}, {timeouts} timed out")
        })
    }
}

impl DomainReport {
    fn to_text(&self, out: &mut String, protect: Protect) {
        let modelled =
            if self.flushes_modelled { ", the time of its flushes modelled" } else { "" };
        let _ = writeln!(out, "\ndomain {}, protect {}{modelled}", self.backend, protect.name());
        let fixed = match self.maps_fixed {
            0 => String::new(),
            fixed => format!(", {} of them permanent", grouped(fixed)),
        };
        line(out, "mappings", format_args!("{}{fixed}", grouped(self.maps)));
        if self.limited > 0 {
            let waits = counted(self.limited, "revocation");
            line(out, "held limit", format_args!("{waits} waited for their flush because of it"));
        }
        if self.quarantined > 0 {
            line(out, "quarantined", format_args!("{}", counted(self.quarantined, "buffer")));
        }
        let iova = format_args!(
            "{} free, {} in use",
            counted(self.iova_extents, "extent"),
            counted(self.table_pages, "table page")
        );
        line(out, "IOVA", iova);
        let tables = match self.invalidations_of_tables {
            0 => String::new(),
            tables => format!(" ({} of them with table pages)", grouped(tables)),
        };
        let whole = match self.invalidations_whole {
            0 => String::new(),
            whole => format!(", {} of them of the whole domain", grouped(whole)),
        };
        let pages = match self.pages_requested {
            0 => String::new(),
            requested => {
                format!(
                    ", {:.2} pages flushed for each requested",
                    self.pages_flushed as f64 / requested as f64
                )
            }
        };
        let invalidations = format_args!(
            "{} requested{tables}, {} merged, {} submitted{whole}{pages}",
            grouped(self.invalidations_asked),
            grouped(self.invalidations_merged),
            grouped(self.invalidations_sent)
        );
        line(out, "invalidations", invalidations);
        let waits = format_args!(
            "{} submitted, {} waited, {} in total",
            grouped(self.waits_sent),
            counted(self.waited, "call"),
            time(self.waited_ns)
        );
        line(out, "waits", waits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack() -> StackReport {
        let pool = PoolReport {
            name: "chain pool".into(),
            in_use: 373_959,
            blocks: 386_048,
            block_bytes: 128,
            chunks: 12_064,
            peak: 373_960,
            free_chunks: 0,
            bytes: 12_064 * 4096,
        };
        let memory = MemoryReport {
            name: "data",
            source: "plain",
            bytes: 16 << 20,
            page_bytes: 4096,
            always_mapped: false,
            cost: Some("more"),
            not_locked: None,
            frames: 4096,
            frames_in_use: 0,
            frames_peak: 4000,
            frames_quarantined: 1,
            refused: vec![RefusedReport {
                source: "hugetlb-2m",
                why: "8 free pages are needed".into(),
            }],
        };
        StackReport {
            protect: Protect::Batch,
            memory: vec![memory],
            fixes: vec!["sudo sysctl vm.nr_hugepages=8".into()],
            devices: vec![DeviceReport {
                name: "soft:64M".into(),
                requests: 10,
                commands: 12,
                segments: 15,
                prp_pages: 10,
                prp_pages_peak: 4,
                ..Default::default()
            }],
            pools: vec![pool],
            domain: DomainReport {
                backend: "soft",
                maps: 20,
                invalidations_asked: 20,
                invalidations_of_tables: 3,
                ..Default::default()
            },
        }
    }

    #[test]
    fn the_pools_report_is_the_kernels() {
        let expected = "poolinfo - 0.1\nchain pool       373959 386048  128 12064\n";
        assert_eq!(stack().pools_to_kernel_text(), expected);
    }

    #[test]
    fn interrupt_mode_does_not_report_polling() {
        let queues = |by_interrupt, sleeps| {
            let mut text = String::new();
            DeviceReport {
                queues: 1,
                by_interrupt,
                sleeps,
                interrupts: sleeps,
                ..Default::default()
            }
            .to_text(&mut text);
            text.lines()
                .find_map(|line| Some(line.split_once("0 doorbells, ")?.1.to_owned()))
                .unwrap()
        };
        assert_eq!(queues(false, 0), "polled");
        assert_eq!(queues(true, 3), "by interrupt: 3 sleeps, 3 interrupts");
        assert_eq!(
            queues(true, 0),
            "by interrupt: 0 sleeps, 0 interrupts",
            "each wait found something at once"
        );
    }

    #[test]
    fn unavailable_sources_are_reported_with_their_fixes() {
        let text = stack().to_string();
        for part in [
            "cost: more\n",
            "refused: hugetlb-2m: 8 free pages are needed\n",
            "  fix           sudo sysctl vm.nr_hugepages=8\n",
            "0 of 4,096 frames in use, peak 4,000, 1 quarantined",
            "10 I/Os as 12 commands",
            "1.50 per I/O",
            "20 requested (3 of them with table pages), 0 merged, 0 submitted\n",
            "domain soft, protect batch",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }
}
