//! The report of the memory stack, gathered from its parts.

use super::{line, remedies};
use crate::args::Protect;
use crate::setup::open::OpenTarget;
use crate::setup::stack::Stack;
use crate::targets::nvme::NvmeStats;
use crate::units::{ByteSize, counted, grouped, time};
use pinfold::arena::{ArenaStats, NotLocked, Residency, SourceUnavailable};
use pinfold::{Arena, Domain, MappingPolicy};
use pinfold_core::addr::PageSize;
use pinfold_core::counters::Counters;
use pinfold_core::dma_pool::DmaPoolStats;
use pinfold_core::domain::DomainStats;
use pinfold_nvme::driver::{ControllerStats, QueueStats};
use serde::{Serialize, Serializer};
use std::fmt::{self, Write};

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
    /// The size of its pages.
    pub(crate) page_bytes: u64,
    /// Whether all of it is mapped at all times.
    pub(crate) always_mapped: bool,
    /// The cost of small pages.
    pub(crate) cost: Option<&'static str>,
    /// Why its pages are not locked in memory, if they are not.
    pub(crate) not_locked: Option<String>,
    /// The part of it that is in use.
    #[serde(flatten, serialize_with = "counters")]
    pub(crate) stats: ArenaStats,
    /// The sources that were tried before, and why they are unavailable.
    pub(crate) refused: Vec<RefusedReport>,
}

impl MemoryReport {
    fn new(name: &'static str, arena: &Arena) -> Self {
        let report = arena.report();
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
            page_bytes: report.page_size.bytes(),
            always_mapped: arena.mapping_policy() == MappingPolicy::Whole,
            cost: small.then_some(SMALL_PAGES_COST),
            not_locked,
            stats: arena.stats(),
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
    /// The number of queues used.
    pub(crate) queues: u64,
    /// Whether a wait sleeps until an interrupt (without `--poll`) or polls.
    pub(crate) by_interrupt: bool,
    /// The driver's counters, of all queues.
    #[serde(flatten, serialize_with = "counters")]
    pub(crate) queue: QueueStats,
    /// The driver's counters of the controller.
    #[serde(flatten, serialize_with = "counters")]
    pub(crate) controller: ControllerStats,
}

impl DeviceReport {
    /// Creates the report of `stats`.
    fn new(stats: NvmeStats) -> Self {
        let NvmeStats { name, queues, by_interrupt, queue, controller } = stats;
        Self { name, queues, by_interrupt, queue, controller }
    }
}

/// A DMA pool.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PoolReport {
    /// Its name.
    pub(crate) name: String,
    /// Its counters.
    #[serde(flatten, serialize_with = "counters")]
    pub(crate) stats: DmaPoolStats,
}

impl PoolReport {
    /// Creates the report of `stats`.
    pub(crate) fn new(stats: &DmaPoolStats) -> Self {
        Self { name: stats.name.clone(), stats: stats.clone() }
    }
}

/// An I/O address space.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct DomainReport {
    /// The owner of its I/O page table.
    pub(crate) backend: &'static str,
    /// Whether its flushes take a modelled time: those of the software IOMMU.
    pub(crate) flushes_modelled: bool,
    /// The domain's counters, its backend's, and those of the invalidation queue.
    #[serde(flatten, serialize_with = "domain_counters")]
    pub(crate) stats: DomainStats,
}

impl DomainReport {
    fn new(domain: &Domain) -> Self {
        let backend = domain.name();
        Self { backend, flushes_modelled: backend == "soft", stats: domain.stats() }
    }
}

/// Serializes counters by the names of their table.
fn counters<C: Counters, S: Serializer>(counters: &C, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(named(counters))
}

fn domain_counters<S: Serializer>(stats: &DomainStats, serializer: S) -> Result<S::Ok, S::Error> {
    let all = named(stats).into_iter().chain(named(&stats.backend));
    serializer.collect_map(all.chain(named(&stats.backend.invalidations)))
}

fn named<C: Counters>(counters: &C) -> Vec<(&'static str, u64)> {
    let mut all = Vec::with_capacity(C::TABLE.len());
    counters.for_each(&mut |counter, value| all.push((counter.name, value)));
    all
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
            let DmaPoolStats { in_use, peak, blocks, block_bytes, chunks, free_chunks, .. } =
                pool.stats;
            let figures = [in_use, peak, blocks, block_bytes, chunks, free_chunks];
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
            let text = pool.stats.to_string();
            out.extend(text.lines().skip(1).flat_map(|line| [line, "\n"]));
        }
        out
    }
}

impl MemoryReport {
    fn to_text(&self, out: &mut String) {
        let mapped = if self.always_mapped { "always mapped" } else { "mapped while in use" };
        let what = format_args!(
            "{} from {} in pages of {}, {mapped}",
            ByteSize(self.stats.bytes),
            self.source,
            ByteSize(self.page_bytes)
        );
        line(out, self.name, what);
        let mut quarantined = String::new();
        if self.stats.frames_quarantined > 0 {
            quarantined = format!(", {} quarantined", grouped(self.stats.frames_quarantined));
        }
        let frames = format_args!(
            "{} of {} in use, peak {}{quarantined}",
            grouped(self.stats.frames_in_use),
            counted(self.stats.frames, "frame"),
            grouped(self.stats.frames_peak)
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
        let requests = counted(self.queue.requests, "I/O");
        line(
            out,
            "I/Os",
            format_args!("{requests} as {}", counted(self.queue.commands, "command")),
        );
        let waits = if self.by_interrupt {
            let (sleeps, interrupts) =
                (counted(self.queue.sleeps, "sleep"), counted(self.queue.interrupts, "interrupt"));
            format!("by interrupt: {sleeps}, {interrupts}")
        } else {
            "polled".to_owned()
        };
        let queues = counted(self.queues, "queue");
        line(
            out,
            "queues",
            format_args!("{queues}, {}, {waits}", counted(self.queue.doorbells, "doorbell")),
        );
        if let Some(failures) = self.failures() {
            line(out, "failures", format_args!("{failures}"));
        }
        let per_request = if self.queue.requests > 0 {
            self.queue.segments as f64 / self.queue.requests as f64
        } else {
            0.0
        };
        line(out, "segments", format_args!("{per_request:.2} per I/O"));
        let pages = format_args!(
            "{} passed to the controller, with {} of PRP lists, peak {}",
            counted(self.queue.prp_entries, "page"),
            counted(self.queue.prp_list_pages, "page"),
            grouped(self.controller.list_pages_max)
        );
        line(out, "PRP pages", pages);
    }

    /// Returns the failed commands, if there are any, and what became of them.
    pub(super) fn failures(&self) -> Option<String> {
        (self.queue.errors + self.queue.timeouts > 0).then(|| {
            let (errors, timeouts) = (counted(self.queue.errors, "error"), self.queue.timeouts);
            let retried = match self.queue.retried_requests {
                0 => "0 retried".to_owned(),
                retried => {
                    let waited = time(self.queue.retry_wait_ns);
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
        let flushes = &self.stats.backend.invalidations;
        let _ = writeln!(out, "\ndomain {}, protect {}{modelled}", self.backend, protect.name());
        let fixed = match self.stats.maps_fixed {
            0 => String::new(),
            fixed => format!(", {} of them permanent", grouped(fixed)),
        };
        line(out, "mappings", format_args!("{}{fixed}", grouped(self.stats.maps)));
        if self.stats.limited > 0 {
            let waits = counted(self.stats.limited, "revocation");
            line(out, "held limit", format_args!("{waits} waited for their flush because of it"));
        }
        if self.stats.quarantined > 0 {
            line(out, "quarantined", format_args!("{}", counted(self.stats.quarantined, "buffer")));
        }
        let iova = format_args!(
            "{} free, {} in use",
            counted(self.stats.iova_extents, "extent"),
            counted(self.stats.backend.table_pages, "table page")
        );
        line(out, "IOVA", iova);
        let tables = match flushes.requested_tables {
            0 => String::new(),
            tables => format!(" ({} of them with table pages)", grouped(tables)),
        };
        let whole = match flushes.domain_flushes {
            0 => String::new(),
            whole => format!(", {} of them of the whole domain", grouped(whole)),
        };
        let pages = match flushes.pages_requested {
            0 => String::new(),
            requested => {
                format!(
                    ", {:.2} pages flushed for each requested",
                    flushes.pages_flushed as f64 / requested as f64
                )
            }
        };
        let invalidations = format_args!(
            "{} requested{tables}, {} merged, {} submitted{whole}{pages}",
            grouped(flushes.requested),
            grouped(flushes.merged),
            grouped(flushes.sent)
        );
        line(out, "invalidations", invalidations);
        let waits = format_args!(
            "{} submitted, {} waited, {} in total",
            grouped(flushes.waits),
            counted(flushes.waited, "call"),
            time(flushes.wait_ns)
        );
        line(out, "waits", waits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stack() -> StackReport {
        let pool = PoolReport::new(&DmaPoolStats {
            name: "chain pool".into(),
            in_use: 373_959,
            blocks: 386_048,
            block_bytes: 128,
            chunks: 12_064,
            peak: 373_960,
            cached: 0,
            in_depot: 12_089,
            free_chunks: 0,
            bytes: 12_064 * 4096,
            damaged: 0,
        });
        let memory = MemoryReport {
            name: "data",
            source: "plain",
            page_bytes: 4096,
            always_mapped: false,
            cost: Some("more"),
            not_locked: None,
            stats: ArenaStats {
                bytes: 16 << 20,
                pinned_bytes: 0,
                frames: 4096,
                frames_in_use: 0,
                frames_peak: 4000,
                frames_quarantined: 1,
            },
            refused: vec![RefusedReport {
                source: "hugetlb-2m",
                why: "8 free pages are needed".into(),
            }],
        };
        let mut stats = DomainStats::default();
        stats.maps = 20;
        stats.backend.invalidations.requested = 20;
        stats.backend.invalidations.requested_tables = 3;
        StackReport {
            protect: Protect::Batch,
            memory: vec![memory],
            fixes: vec!["sudo sysctl vm.nr_hugepages=8".into()],
            devices: vec![DeviceReport {
                name: "soft:64M".into(),
                queue: QueueStats {
                    requests: 10,
                    commands: 12,
                    segments: 15,
                    prp_list_pages: 10,
                    ..Default::default()
                },
                controller: ControllerStats { list_pages_max: 4, ..Default::default() },
                ..Default::default()
            }],
            pools: vec![pool],
            domain: DomainReport { backend: "soft", flushes_modelled: true, stats },
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
                queue: QueueStats { sleeps, interrupts: sleeps, ..Default::default() },
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
