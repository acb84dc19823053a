//! The commands about this machine and its devices: `doctor` reports its support, what is missing,
//! and the command that fixes it; `bind` and `unbind`, a device's driver; `nvme`, a controller's
//! identity, namespaces and health; `pools`, the DMA pools of a short workload.

use super::io;
use crate::args::{
    BindArgs, DoctorArgs, IoArgs, MachineArgs, NvmeArgs, PoolsArgs, Protect, Rw, SoftOptions,
    StackArgs, TargetSpec, UnbindArgs,
};
use crate::engine::worker::EngineError;
use crate::failure::Failure;
use crate::output;
use crate::report::nvme::{NamespaceReport, NvmeReport, SmartReport};
use crate::report::stack::PoolReport;
use crate::setup::error::OpenError;
use crate::setup::open::{Device, TargetOptions};
use crate::setup::resolve::{Medium, ResolvedTarget, domain_of};
use crate::setup::stack::{self, BufferNeed, Stack};
use crate::signal::Interrupt;
use crate::units::ByteSize;
use pinfold::pci::{Bdf, BindError, Binder, DriverChange};
use pinfold::probe::{Facts, Finding, State};
use serde::Serialize;
use std::fmt::Write;

#[derive(Serialize)]
struct DoctorReport {
    findings: Vec<FindingReport>,
}

#[derive(Serialize)]
struct FindingReport {
    what: String,
    state: &'static str,
    detail: String,
    fix: Option<String>,
}

impl From<Finding> for FindingReport {
    fn from(finding: Finding) -> Self {
        let Finding { what, state, detail, remedy } = finding;
        Self { what, state: state.name(), detail, fix: remedy }
    }
}

/// Examines the machine and prints the findings.
pub(crate) fn doctor(args: DoctorArgs) -> Result<(), Failure> {
    let facts = Facts::here();
    let mut findings: Vec<Finding> = facts.findings();
    // Beside the other interface of the kernel that takes registered memory.
    let at = findings.iter().position(|finding| finding.what == "io_uring").map_or(0, |at| at + 1);
    findings.insert(at, pinfold_xdp::probe::finding(&facts));
    if args.json {
        let report =
            DoctorReport { findings: findings.into_iter().map(FindingReport::from).collect() };
        return Ok(output::json(&report)?);
    }
    Ok(output::text(&findings_to_text(&findings))?)
}

fn findings_to_text(findings: &[Finding]) -> String {
    let mut out = String::new();
    let width = findings.iter().map(|finding| finding.what.chars().count()).max().unwrap_or(0);
    for Finding { what, state, detail, remedy } in findings {
        // Writing to a `String` does not fail.
        let _ = writeln!(out, "{:<8} {what:<width$}  {detail}", state.name());
        if let Some(remedy) = remedy {
            let _ = writeln!(out, "{:<8} {:<width$}  fix: {remedy}", "", "");
        }
    }
    let fixes = findings.iter().filter(|finding| finding.remedy.is_some()).count();
    let missing = findings.iter().filter(|finding| finding.state != State::Good).count();
    let _ = match missing {
        0 => writeln!(out, "\nnothing is missing"),
        _ => writeln!(out, "\n{missing} limited or missing, {fixes} with a fix"),
    };
    out
}

#[derive(Serialize)]
struct DriverReport {
    device: String,
    from: Option<String>,
    to: Option<String>,
    group: Option<u32>,
    others: Vec<String>,
}

impl From<&DriverChange> for DriverReport {
    fn from(change: &DriverChange) -> Self {
        Self {
            device: change.bdf.to_string(),
            from: change.from.clone(),
            to: change.to.clone(),
            group: change.group,
            others: change.others.iter().map(|other| other.address.clone()).collect(),
        }
    }
}

/// Binds each device to vfio-pci, one after the other.
pub(crate) fn bind(args: &BindArgs) -> Result<(), Failure> {
    rebind(&args.devices, args.json, |binder, bdf| binder.bind(bdf, args.force))
}

/// Binds each device to its previous driver.
pub(crate) fn unbind(args: &UnbindArgs) -> Result<(), Failure> {
    rebind(&args.devices, args.json, Binder::unbind)
}

/// Rebinds the devices. A signal ends it between two of them, so that none is left without a
/// driver.
fn rebind(
    devices: &[Bdf],
    json: bool,
    rebind_one: impl Fn(&Binder, Bdf) -> Result<DriverChange, BindError>,
) -> Result<(), Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let binder = Binder::new();
    devices.iter().try_for_each(|bdf| {
        if interrupt.is_raised() {
            return Err(EngineError::Interrupted.into());
        }
        print_change(&rebind_one(&binder, *bdf)?, json)
    })
}

fn print_change(change: &DriverChange, json: bool) -> Result<(), Failure> {
    if json {
        return Ok(output::json(&DriverReport::from(change))?);
    }
    Ok(output::text(&format!("{change}\n"))?)
}

/// Identifies the controller and prints the report.
pub(crate) fn nvme(args: &NvmeArgs) -> Result<(), Failure> {
    let report = identify(&args.target, args.machine)?;
    Ok(if args.json { output::json(&report) } else { output::text(&report.to_string()) }?)
}

fn identify(spec: &TargetSpec, machine: MachineArgs) -> Result<NvmeReport, Failure> {
    let target = ResolvedTarget::controller(spec, machine)?;
    let domain = domain_of(&[&target], None)?;
    let ResolvedTarget { name, medium: Medium::Controller(medium), .. } = target else {
        return Err(OpenError::NoController(spec.to_string()).into());
    };
    let options = TargetOptions {
        alignment: 4096,
        depth: 1,
        jobs: 16,
        jobs_option: "numjobs",
        poll: true,
        direct: true,
        one_thread: true,
    };
    let args = StackArgs { protect: Protect::Static, ..StackArgs::default() };
    let buffers = BufferNeed { count: 1, bytes: 4096, threads: 1, lower: "" };
    stack::check(Stack::need(buffers, 1, 0), args.memory).map_err(OpenError::from)?;
    let stack = Stack::build(args, domain, buffers, 1).map_err(OpenError::from)?;
    let device = Device::open(&name, medium, &stack, options)?;
    let controller = device.controller(&name, &stack, options)?;
    let driver = |error| OpenError::Driver { name: name.clone(), error };
    let namespaces = controller
        .scan_namespaces()
        .map_err(driver)?
        .into_iter()
        .map(NamespaceReport::from)
        .collect();
    let mut notes = Vec::new();
    let smart =
        controller.health().map_err(|error| notes.push(format!("no SMART log: {error}"))).ok();
    Ok(NvmeReport {
        command: "nvme",
        target: spec.to_string(),
        controller: controller.identify().into(),
        namespaces,
        smart: smart.map(SmartReport::from),
        notes,
    })
}

#[derive(Serialize)]
struct PoolsReport<'a> {
    pools: &'a [PoolReport],
}

/// Removes from an error the options that the user did not write and cannot lower.
fn without_options(failure: Failure) -> Failure {
    match failure {
        Failure::Open(OpenError::Memory(error)) => OpenError::Memory(error.of_fixed_sizes()).into(),
        Failure::Open(OpenError::Stack(error)) => OpenError::Stack(error.of_fixed_sizes()).into(),
        failure => failure,
    }
}

/// Runs a short workload on a model controller, and prints the DMA pools of its driver.
pub(crate) fn pools(args: PoolsArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let workload = IoArgs {
        rw: Rw::Randrw,
        bs: ByteSize(1 << 20),
        iodepth: 32,
        stack: args.stack,
        ..IoArgs::new(TargetSpec::SoftMemory(ByteSize(64 << 20), SoftOptions::default()))
    };
    let stack = io::measure(&workload, &interrupt).map_err(without_options)?.stack;
    if args.json {
        return Ok(output::json(&PoolsReport { pools: &stack.pools })?);
    }
    let mut text = stack.pools_to_kernel_text();
    text.push('\n');
    stack.pools_to_text(&mut text);
    Ok(output::text(&text)?)
}
