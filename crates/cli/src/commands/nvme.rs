//! `nvme`: a controller's identity, namespaces and health.

use crate::args::{NvmeArgs, Protect, StackArgs, TargetSpec};
use crate::failure::Failure;
use crate::output;
use crate::report::nvme::{NamespaceReport, NvmeReport, SmartReport};
use crate::setup::device::Device;
use crate::setup::error::OpenError;
use crate::setup::memory::BufferNeed;
use crate::setup::options::TargetOptions;
use crate::setup::resolve::{Medium, ResolvedTarget, domain_of};
use crate::setup::stack::Stack;

/// Identifies the controller and prints the report.
pub(crate) fn run(args: &NvmeArgs) -> Result<(), Failure> {
    let report = identify(&args.target)?;
    Ok(if args.json { output::json(&report) } else { output::text(&report.to_string()) }?)
}

fn identify(spec: &TargetSpec) -> Result<NvmeReport, Failure> {
    let target = ResolvedTarget::controller(spec)?;
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
        moves: false,
    };
    let args = StackArgs { protect: Protect::Static, ..StackArgs::default() };
    let stack = Stack::build(
        args,
        domain,
        BufferNeed { count: 1, bytes: 4096, ..BufferNeed::default() },
        1,
    )?;
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
