//! The report of an NVMe controller as text.

use super::nvme::{ControllerReport, NamespaceReport, NvmeReport, SmartReport};
use super::text::line;
use crate::units::{ByteSize, counted, grouped};
use std::fmt::{self, Write};

/// The bits of Critical Warning, SMART log byte 0.
const WARNINGS: [&str; 6] = [
    "the spare is below its threshold",
    "the temperature is outside its limits",
    "reliability is degraded",
    "the media are read-only",
    "the backup of the volatile memory failed",
    "a persistent memory region is read-only or unreliable",
];

impl fmt::Display for NvmeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = format!("controller {}\n", self.target);
        self.controller.to_text(&mut out);
        let heads = ["size", "blocks", "bytes each", "in use", "metadata"];
        let _ = write!(out, "\n{:<12}", "namespaces");
        for head in heads {
            let _ = write!(out, " {head:>14}");
        }
        out.push('\n');
        for namespace in &self.namespaces {
            namespace.to_text(&mut out);
        }
        if let Some(smart) = &self.smart {
            out.push_str("\nhealth\n");
            smart.to_text(&mut out);
        }
        for note in &self.notes {
            let _ = writeln!(out, "note: {note}");
        }
        f.write_str(&out)
    }
}

impl ControllerReport {
    fn to_text(&self, out: &mut String) {
        let (major, minor, tertiary) = self.version;
        line(out, "model", format_args!("{}, firmware {}", self.model, self.firmware));
        line(out, "serial", format_args!("{}", self.serial));
        let id = (self.vendor, self.controller_id);
        line(out, "version", format_args!("NVMe {major}.{minor}.{tertiary}"));
        line(out, "identity", format_args!("PCI vendor {:04x}, controller {}", id.0, id.1));
        if !self.subsystem.is_empty() {
            line(out, "subsystem", format_args!("{}", self.subsystem));
        }
        let most = ByteSize(self.max_transfer_bytes.into());
        match self.mdts_bytes {
            None => line(out, "transfers", format_args!("no limit; {most} are used")),
            Some(mdts) => {
                line(out, "transfers", format_args!("{} at most; {most} are used", ByteSize(mdts)))
            }
        }
        let (queues, entries) =
            (counted(self.queues.into(), "queue"), grouped(self.max_queue_entries.into()));
        line(out, "queues", format_args!("{queues} granted, of up to {entries} entries"));
        let word = |has| if has { "yes" } else { "no" };
        line(out, "discards", format_args!("{}", word(self.can_discard)));
        line(
            out,
            "write cache",
            format_args!("{}", if self.volatile_cache { "volatile" } else { "none" }),
        );
    }
}

impl NamespaceReport {
    pub(super) fn to_text(&self, out: &mut String) {
        let size = ByteSize(self.bytes).to_string();
        let _ = write!(out, "  {:<10} {size:>14} {:>14}", self.nsid, grouped(self.blocks));
        let (used, metadata) = (grouped(self.used_blocks), self.metadata_bytes);
        let _ = write!(out, " {:>14} {used:>14} {metadata:>14}", self.block_bytes);
        if let Some(reason) = &self.unusable {
            let _ = write!(out, "  cannot be used: {reason}");
        }
        out.push('\n');
    }
}

impl SmartReport {
    fn to_text(&self, out: &mut String) {
        let warned = |bit: &usize| self.critical_warning >> bit & 1 == 1;
        let warnings: Vec<_> = (0..WARNINGS.len())
            .filter(warned)
            .filter_map(|bit| WARNINGS.get(bit))
            .copied()
            .collect();
        let warnings = if warnings.is_empty() { "none".to_owned() } else { warnings.join("; ") };
        line(out, "warnings", format_args!("{warnings}"));
        let celsius = i32::from(self.temperature_kelvin) - 273;
        line(out, "temperature", format_args!("{} K ({celsius} °C)", self.temperature_kelvin));
        let spare = (self.available_spare_percent, self.spare_threshold_percent);
        line(out, "spare", format_args!("{} %, threshold {} %", spare.0, spare.1));
        line(out, "used", format_args!("{} %", self.used_percent));
        let read = (ByteSize(self.bytes_read), counted(self.host_reads, "command"));
        line(out, "read", format_args!("{} by {}", read.0, read.1));
        let written = (ByteSize(self.bytes_written), counted(self.host_writes, "command"));
        line(out, "written", format_args!("{} by {}", written.0, written.1));
        line(out, "busy", format_args!("{}", counted(self.busy_minutes, "minute")));
        let (on, cycles) =
            (counted(self.power_on_hours, "hour"), counted(self.power_cycles, "power cycle"));
        let unsafely = counted(self.unsafe_shutdowns, "unsafe shutdown");
        line(out, "power", format_args!("{on}, {cycles}, {unsafely}"));
        let (media, entries) =
            (counted(self.media_errors, "media error"), grouped(self.error_entries));
        line(out, "errors", format_args!("{media}, {entries} in the error log"));
        if self.warning_minutes + self.critical_minutes > 0 {
            let (warning, critical) = (self.warning_minutes, self.critical_minutes);
            line(out, "too hot", format_args!("{warning} minutes, {critical} of them critical"));
        }
        for (i, kelvin) in (1..).zip(&self.sensors_kelvin) {
            line(
                out,
                &format!("sensor {i}"),
                format_args!("{kelvin} K ({} °C)", i32::from(*kelvin) - 273),
            );
        }
    }
}
