//! `nvme`: what a controller is, which namespaces it has, and how it is.

mod text;

use crate::args::{Memory, NvmeArgs, Protect, StackArgs};
use crate::failure::Failure;
use crate::open::{Device, Medium, OpenError, Place, Use, domain_of};
use crate::output;
use crate::stack::Stack;
use crate::targets::spec::TargetSpec;
use pinfold_nvme::driver::{Health, Identity, NamespaceInfo};
use serde::Serialize;

/// What a controller says.
#[derive(Clone, Debug, Serialize)]
struct Report {
    /// `nvme`.
    command: &'static str,
    /// As the user named it.
    target: String,
    controller: ControllerReport,
    namespaces: Vec<NamespaceReport>,
    /// What the SMART log says; not there where the controller does not have it.
    smart: Option<SmartReport>,
    /// What could not be asked, and why.
    notes: Vec<String>,
}

/// Identify controller.
#[derive(Clone, Debug, Serialize)]
struct ControllerReport {
    model: String,
    serial: String,
    firmware: String,
    subsystem: String,
    vendor: u16,
    controller_id: u16,
    version: (u16, u8, u8),
    /// Not there where it sets no limit.
    mdts_bytes: Option<u64>,
    max_transfer_bytes: u32,
    max_queue_entries: u32,
    queues: u16,
    highest_namespace: u32,
    can_discard: bool,
    volatile_cache: bool,
}

/// An active namespace.
#[derive(Clone, Debug, Serialize)]
struct NamespaceReport {
    nsid: u32,
    blocks: u64,
    capacity_blocks: u64,
    used_blocks: u64,
    block_bytes: u64,
    metadata_bytes: u16,
    bytes: u64,
    discard_zeroes: bool,
    /// Whether this driver can use it.
    usable: bool,
    /// Why not.
    unusable: Option<String>,
}

/// SMART / health information.
#[derive(Clone, Debug, Serialize)]
struct SmartReport {
    critical_warning: u8,
    temperature_kelvin: u16,
    available_spare_percent: u8,
    spare_threshold_percent: u8,
    used_percent: u8,
    bytes_read: u64,
    bytes_written: u64,
    host_reads: u64,
    host_writes: u64,
    busy_minutes: u64,
    power_cycles: u64,
    power_on_hours: u64,
    unsafe_shutdowns: u64,
    media_errors: u64,
    error_entries: u64,
    warning_minutes: u32,
    critical_minutes: u32,
    sensors_kelvin: Vec<u16>,
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

/// Asks the controller, and prints what it says.
pub(crate) fn run(args: &NvmeArgs) -> Result<(), Failure> {
    let report = ask(&args.target)?;
    if args.json { output::json(&report) } else { output::text(&report.to_text()) }
}

fn ask(spec: &TargetSpec) -> Result<Report, Failure> {
    let place = Place::controller(spec)?;
    let domain = domain_of(&[&place])?;
    let Place { name, medium: Medium::Controller(medium), .. } = place else {
        return Err(OpenError::NoController(spec.to_string()).into());
    };
    let how = Use { block: 4096, depth: 1, jobs: 16, poll: true };
    let args = StackArgs { protect: Protect::Static, memory: Memory::Auto };
    let stack = Stack::build(args, domain, (1, how.block), 1)?;
    let device = Device::open(&name, medium, &stack, how)?;
    let controller = device.controller(&name, &stack, how)?;
    let driver = |error| OpenError::Driver { name: name.clone(), error };
    let namespaces =
        controller.scan_namespaces().map_err(driver)?.into_iter().map(NamespaceReport::from).collect();
    let mut notes = Vec::new();
    let smart = controller.health().map_err(|error| notes.push(format!("no SMART log: {error}"))).ok();
    Ok(Report {
        command: "nvme",
        target: spec.to_string(),
        controller: controller.identify().into(),
        namespaces,
        smart: smart.map(SmartReport::from),
        notes,
    })
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
        assert_eq!((report.usable, report.unusable.as_deref()), (false, Some(&*reason.to_string())));
        let mut text = String::new();
        report.to_text(&mut text);
        assert!(
            text.trim_end().ends_with("cannot be used: its I/O command set is zoned, not NVM (CSI 02h)"),
            "{text}"
        );
    }
}
