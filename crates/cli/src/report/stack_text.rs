//! The report of the memory stack as text.

use super::stack::{DeviceReport, DomainReport, MemoryReport, PoolReport, StackReport};
use super::text::line;
use crate::args::Protect;
use crate::units::{ByteSize, counted, grouped, time};
use std::fmt::{self, Write};
use std::time::Duration;

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
    use crate::report::stack::RefusedReport;

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
