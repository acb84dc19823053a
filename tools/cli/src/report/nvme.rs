//! The report of an NVMe controller.

use super::line;
use crate::units::{ByteSize, counted, grouped};
use pinfold_nvme::driver::{Health, Identity, NamespaceInfo};
use serde::Serialize;
use std::fmt::{self, Write};

/// A controller's identity, namespaces and health.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NvmeReport {
    /// `nvme`.
    pub(crate) command: &'static str,
    /// The target, as named on the command line.
    pub(crate) target: String,
    pub(crate) controller: ControllerReport,
    pub(crate) namespaces: Vec<NamespaceReport>,
    /// The SMART log, if the controller has one.
    pub(crate) smart: Option<SmartReport>,
    /// The parts that could not be read, with the reason.
    pub(crate) notes: Vec<String>,
}

/// Identify controller.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ControllerReport {
    pub(crate) model: String,
    pub(crate) serial: String,
    pub(crate) firmware: String,
    pub(crate) subsystem: String,
    pub(crate) vendor: u16,
    pub(crate) controller_id: u16,
    pub(crate) version: (u16, u8, u8),
    /// `None` if it sets no limit.
    pub(crate) mdts_bytes: Option<u64>,
    pub(crate) max_transfer_bytes: u32,
    pub(crate) max_queue_entries: u32,
    pub(crate) queues: u16,
    pub(crate) highest_namespace: u32,
    pub(crate) can_discard: bool,
    pub(crate) volatile_cache: bool,
}

/// An active namespace.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NamespaceReport {
    pub(crate) nsid: u32,
    pub(crate) blocks: u64,
    pub(crate) capacity_blocks: u64,
    pub(crate) used_blocks: u64,
    pub(crate) block_bytes: u64,
    pub(crate) metadata_bytes: u16,
    pub(crate) bytes: u64,
    pub(crate) discard_zeroes: bool,
    /// Whether this driver supports it.
    pub(crate) usable: bool,
    /// Why it is not supported.
    pub(crate) unusable: Option<String>,
}

/// SMART / health information.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct SmartReport {
    pub(crate) critical_warning: u8,
    pub(crate) temperature_kelvin: u16,
    pub(crate) available_spare_percent: u8,
    pub(crate) spare_threshold_percent: u8,
    pub(crate) used_percent: u8,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
    pub(crate) host_reads: u64,
    pub(crate) host_writes: u64,
    pub(crate) busy_minutes: u64,
    pub(crate) power_cycles: u64,
    pub(crate) power_on_hours: u64,
    pub(crate) unsafe_shutdowns: u64,
    pub(crate) media_errors: u64,
    pub(crate) error_entries: u64,
    pub(crate) warning_minutes: u32,
    pub(crate) critical_minutes: u32,
    pub(crate) sensors_kelvin: Vec<u16>,
}

impl From<Identity> for ControllerReport {
    fn from(identity: Identity) -> Self {
        Self {
            model: identity.model,
            serial: identity.serial,
            firmware: identity.firmware,
            subsystem: identity.subsystem,
            vendor: identity.vendor,
            controller_id: identity.controller_id,
            version: identity.version,
            mdts_bytes: identity.mdts_bytes,
            max_transfer_bytes: identity.max_transfer_bytes,
            max_queue_entries: identity.max_queue_entries,
            queues: identity.queues,
            highest_namespace: identity.namespaces,
            can_discard: identity.can_discard,
            volatile_cache: identity.volatile_cache,
        }
    }
}

impl From<NamespaceInfo> for NamespaceReport {
    fn from(info: NamespaceInfo) -> Self {
        Self {
            nsid: info.nsid,
            blocks: info.blocks,
            capacity_blocks: info.capacity_blocks,
            used_blocks: info.used_blocks,
            block_bytes: info.block_bytes,
            metadata_bytes: info.metadata_bytes,
            bytes: info.blocks.saturating_mul(info.block_bytes),
            discard_zeroes: info.discard_zeroes,
            usable: info.usable().is_some(),
            unusable: info.unusable.map(|reason| reason.to_string()),
        }
    }
}

impl From<Health> for SmartReport {
    fn from(health: Health) -> Self {
        Self {
            critical_warning: health.critical_warning,
            temperature_kelvin: health.temperature_kelvin,
            available_spare_percent: health.available_spare_percent,
            spare_threshold_percent: health.spare_threshold_percent,
            used_percent: health.used_percent,
            bytes_read: health.bytes_read,
            bytes_written: health.bytes_written,
            host_reads: health.host_reads,
            host_writes: health.host_writes,
            busy_minutes: health.busy_minutes,
            power_cycles: health.power_cycles,
            power_on_hours: health.power_on_hours,
            unsafe_shutdowns: health.unsafe_shutdowns,
            media_errors: health.media_errors,
            error_entries: health.error_entries,
            warning_minutes: health.warning_minutes,
            critical_minutes: health.critical_minutes,
            sensors_kelvin: health.sensors_kelvin,
        }
    }
}

// The report of an NVMe controller as text.

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

#[cfg(test)]
mod tests {
    use super::*;
    use pinfold_nvme::driver::Unusable;

    #[test]
    fn a_namespace_that_cannot_be_used_is_reported_with_the_reason() {
        let reason = Unusable::CommandSet { csi: 2 };
        let info = NamespaceInfo {
            nsid: 3,
            blocks: 8,
            capacity_blocks: 8,
            used_blocks: 8,
            block_bytes: 4096,
            metadata_bytes: 0,
            discard_zeroes: false,
            unusable: Some(reason),
        };
        let report = NamespaceReport::from(info);
        assert_eq!(
            (report.usable, report.unusable.as_deref()),
            (false, Some(&*reason.to_string()))
        );
        let mut text = String::new();
        report.to_text(&mut text);
        assert!(
            text.trim_end()
                .ends_with("cannot be used: unsupported I/O command set: zoned (CSI 02h)"),
            "{text}"
        );
    }
}
