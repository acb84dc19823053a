//! The account as text: a line a fact, the figures of a kind under each other.

use super::{CopyReport, DeviceReport, DomainReport, MemoryReport, PoolReport, RequestReport, StackReport};
use crate::args::Protect;
use crate::units::{ByteSize, counted, grouped, rate, time};
use std::fmt::{self, Write};
use std::time::Duration;

/// Where the second column starts.
const LABEL: usize = 14;

fn line(out: &mut String, label: &str, value: fmt::Arguments<'_>) {
    // Writing to a `String` does not fail.
    let _ = writeln!(out, "  {label:<LABEL$}{value}");
}

impl CopyReport {
    /// The account as text.
    pub(crate) fn to_text(&self) -> String {
        let mut out = String::new();
        let via = self.via.as_ref().map(|via| format!(", by way of {via}")).unwrap_or_default();
        let _ = writeln!(out, "{} -> {}{via}", self.source, self.destination);
        let what = format_args!(
            "{} ({} bytes), {} at a time, {} in flight",
            ByteSize(self.bytes),
            grouped(self.bytes),
            ByteSize(self.block_bytes),
            self.iodepth
        );
        line(&mut out, "copied", what);
        if let Some(hashes) = &self.sha256 {
            line(&mut out, "sha256", format_args!("{} read from the source", hashes.source));
            line(&mut out, "", format_args!("{} read back from the destination", hashes.destination));
        }
        self.phases_to_text(&mut out);
        self.stack.to_text(&mut out);
        for note in &self.notes {
            let _ = writeln!(out, "note: {note}");
        }
        out
    }

    fn phases_to_text(&self, out: &mut String) {
        for phase in &self.phases {
            let elapsed = Duration::try_from_secs_f64(phase.seconds).unwrap_or_default();
            let _ = writeln!(out, "\n{} -> {}", phase.from, phase.to);
            let flush = time(nanoseconds(phase.flush_seconds));
            let took = format_args!(
                "{} in {} (of which {flush} to flush): {}",
                ByteSize(phase.bytes),
                time(nanoseconds(phase.seconds)),
                rate(phase.bytes, elapsed)
            );
            line(out, "moved", took);
            request_line(out, "reads", &phase.reads);
            request_line(out, "writes", &phase.writes);
        }
    }
}

fn nanoseconds(seconds: f64) -> u64 {
    Duration::try_from_secs_f64(seconds).map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
}

fn request_line(out: &mut String, label: &str, account: &RequestReport) {
    if account.requests == 0 {
        return;
    }
    let (queueing, completion) = (&account.queueing, &account.completion);
    let figures = format_args!(
        "{:>12} · queueing median {:>7}, p99 {:>7} · completion median {:>7}, p99 {:>7}",
        counted(account.requests, "I/O"),
        time(queueing.median_ns),
        time(queueing.p99_ns),
        time(completion.median_ns),
        time(completion.p99_ns)
    );
    line(out, label, figures);
}

impl StackReport {
    /// The stack's part, section by section.
    pub(crate) fn to_text(&self, out: &mut String) {
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
    }

    /// The pools with their high-water marks.
    pub(crate) fn pools_to_text(&self, out: &mut String) {
        let heads = ["in use", "at most", "blocks", "of bytes", "chunks", "free"];
        let _ = write!(out, "{:<16}", "pools");
        for head in heads {
            let _ = write!(out, " {head:>9}");
        }
        out.push('\n');
        for pool in &self.pools {
            let _ = write!(out, "  {:<14}", pool.name);
            let figures =
                [pool.in_use, pool.at_most, pool.blocks, pool.block_bytes, pool.chunks, pool.free_chunks];
            for figure in figures {
                let _ = write!(out, " {:>9}", grouped(figure));
            }
            out.push('\n');
        }
    }

    /// The pools in the kernel's format: name, blocks in use, blocks in all, block size, chunks.
    pub(crate) fn pools_to_kernel_text(&self) -> String {
        let mut out = String::from("poolinfo - 0.1\n");
        for pool in &self.pools {
            let PoolReport { name, in_use, blocks, block_bytes, chunks, .. } = pool;
            let _ = writeln!(out, "{name:<16} {in_use:>4} {blocks:>4} {block_bytes:>4} {chunks:>2}");
        }
        out
    }
}

impl MemoryReport {
    fn to_text(&self, out: &mut String) {
        let exposed = if self.always_exposed { "always exposed" } else { "exposed while in use" };
        let what = format_args!(
            "{} from {} in pages of {}, {exposed}",
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
            "{} of {} in use, at most {}{quarantined}",
            grouped(self.frames_in_use),
            counted(self.frames, "frame"),
            grouped(self.frames_at_most)
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
            let (sleeps, interrupts) = (counted(self.sleeps, "sleep"), counted(self.interrupts, "interrupt"));
            format!("by interrupt: {sleeps}, {interrupts}")
        } else {
            "polled".to_owned()
        };
        let queues = counted(self.queues, "queue");
        line(out, "queues", format_args!("{queues}, {}, {waits}", counted(self.doorbells, "doorbell")));
        if self.errors + self.timeouts > 0 {
            let (errors, retries) = (counted(self.errors, "error"), grouped(self.retries));
            line(
                out,
                "trouble",
                format_args!("{errors}, {retries} tried again, {} without an answer", self.timeouts),
            );
        }
        let an_io = if self.requests > 0 { self.segments as f64 / self.requests as f64 } else { 0.0 };
        line(out, "segments", format_args!("{an_io:.2} an I/O"));
        let pages = format_args!(
            "{} named to the controller, by {} of PRP lists, at most {} at a time",
            counted(self.prp_entries, "page"),
            counted(self.prp_pages, "page"),
            grouped(self.prp_pages_at_most)
        );
        line(out, "PRP pages", pages);
    }
}

impl DomainReport {
    fn to_text(&self, out: &mut String, protect: Protect) {
        let protect = match protect {
            Protect::Static => "static",
            Protect::Revoke => "revoke",
            Protect::Strict => "strict",
        };
        let _ = writeln!(out, "\ndomain {}, protect {protect}", self.backend);
        let fixed = match self.maps_fixed {
            0 => String::new(),
            fixed => format!(", {} of them for as long as they live", grouped(fixed)),
        };
        line(out, "mappings", format_args!("{}{fixed}", grouped(self.maps)));
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
            tables => format!(" ({} of them for table pages)", grouped(tables)),
        };
        let whole = match self.invalidations_whole {
            0 => String::new(),
            whole => format!(", {} of them of everything", grouped(whole)),
        };
        let invalidations = format_args!(
            "{} asked{tables}, {} merged, {} sent{whole}",
            grouped(self.invalidations_asked),
            grouped(self.invalidations_merged),
            grouped(self.invalidations_sent)
        );
        line(out, "invalidations", invalidations);
        let waits = format_args!(
            "{} sent, {} had to wait, {} in all",
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
            at_most: 373_960,
            free_chunks: 0,
            bytes: 12_064 * 4096,
        };
        let memory = MemoryReport {
            name: "data",
            source: "plain",
            bytes: 16 << 20,
            page_bytes: 4096,
            always_exposed: false,
            cost: Some("more"),
            not_locked: None,
            frames: 4096,
            frames_in_use: 0,
            frames_at_most: 4000,
            frames_quarantined: 1,
            refused: vec![RefusedReport { source: "hugetlb-2m", why: "8 free pages are needed".into() }],
        };
        StackReport {
            protect: Protect::Revoke,
            memory: vec![memory],
            fixes: vec!["sudo sysctl vm.nr_hugepages=8".into()],
            devices: vec![DeviceReport {
                name: "soft:64M".into(),
                requests: 10,
                commands: 12,
                segments: 15,
                prp_pages: 10,
                prp_pages_at_most: 4,
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
    use super::super::RefusedReport;

    #[test]
    fn the_pools_report_is_the_kernels() {
        let expected = "poolinfo - 0.1\nchain pool       373959 386048  128 12064\n";
        assert_eq!(stack().pools_to_kernel_text(), expected);
    }

    #[test]
    fn who_asked_for_interrupts_is_not_told_of_polling() {
        let queues = |by_interrupt, sleeps| {
            let mut text = String::new();
            DeviceReport { queues: 1, by_interrupt, sleeps, interrupts: sleeps, ..Default::default() }
                .to_text(&mut text);
            text.lines().find_map(|line| Some(line.split_once("0 doorbells, ")?.1.to_owned())).unwrap()
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
    fn the_account_names_what_was_refused_and_what_mends_it() {
        let mut text = String::new();
        stack().to_text(&mut text);
        for part in [
            "cost: more\n",
            "refused: hugetlb-2m: 8 free pages are needed\n",
            "  fix           sudo sysctl vm.nr_hugepages=8\n",
            "0 of 4,096 frames in use, at most 4,000, 1 quarantined",
            "10 I/Os as 12 commands",
            "1.50 an I/O",
            "20 asked (3 of them for table pages), 0 merged, 0 sent\n",
            "domain soft, protect revoke",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }
}
