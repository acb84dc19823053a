//! `check`: runs a program that opens VFIO against model devices, and reports what its driver does
//! wrong.

use crate::args::{CheckArgs, CheckDevice, FailOn, SoftOptions, TargetSpec};
use crate::failure::{Exit, Failure};
use crate::output;
use crate::setup::resolve::refuse_to_replace;
use crate::signal;
use crate::units::counted;
use pinfold_check::{
    CheckConfig, CheckReport, DeviceConfig, DeviceModel, Ending, Fate, Finding, KINDS, Severity,
    run as run_program,
};
use pinfold_nvme_model::{FileMedia, Media, MemoryMedia};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

/// The exit code of a run with findings, and of a program that was killed at its time limit.
const FOUND: u8 = 3;
const TIME_LIMIT: u8 = 124;
/// What `memory-gone` says where the calls by which memory goes are not looked at.
const WATCH_MEMORY: &str = "with --watch-memory the call that takes the memory away is reported";
/// The group of the first device; the others follow.
const FIRST_GROUP: u32 = 7;

#[derive(Serialize)]
struct JsonReport<'a> {
    findings: &'a [Finding],
    counts: &'a BTreeMap<&'static str, u64>,
    suppressed: u64,
    commands: u64,
    seed: Option<u64>,
    devices: Vec<JsonDevice<'a>>,
    exit_code: Option<u8>,
    signal: Option<u8>,
    time_limit: bool,
    stopped: bool,
}

#[derive(Serialize)]
struct JsonDevice<'a> {
    address: String,
    knobs: &'a [String],
    #[serde(flatten)]
    fate: Fate,
}

/// Returns the devices that the program finds: the controllers, then the disks.
fn devices(args: &CheckArgs) -> Result<Vec<DeviceConfig>, Failure> {
    let only = [CheckDevice::only()];
    let controllers = match args.nvme.is_empty() && args.virtio_blk.is_empty() {
        true => &only[..],
        false => &args.nvme,
    };
    let controllers = controllers.iter().map(|device| (device, true));
    let all = controllers.chain(args.virtio_blk.iter().map(|device| (device, false)));
    let mut devices = Vec::new();
    for (number, (device, is_nvme)) in (0u32..).zip(all) {
        let media: Arc<dyn Media> = match &device.target {
            TargetSpec::SoftMemory(size, _) => {
                Arc::new(MemoryMedia::new(size.0).map_err(|error| Failure::CheckFile {
                    attempt: "allocate the memory of",
                    name: device.to_string(),
                    error,
                })?)
            }
            TargetSpec::SoftImage(path, _) => {
                // The program may write it.
                let free = refuse_to_replace(path, device).map_err(io::Error::other);
                let opened = free.and_then(|()| FileMedia::open(path, None));
                Arc::new(opened.map_err(|error| Failure::CheckFile {
                    attempt: "open the image",
                    name: device.to_string(),
                    error,
                })?)
            }
            // The parser accepts no other.
            TargetSpec::File(_) | TargetSpec::Pci { .. } => continue,
        };
        let bdf = match device.bdf {
            Some(bdf) => bdf,
            None => format!("0000:{:02x}:00.0", number + 1)
                .parse()
                .map_err(|_| Failure::CheckDevices { number: number + 1 })?,
        };
        let group = device.group.unwrap_or(FIRST_GROUP + number);
        let SoftOptions { block_bytes, not_ready } = device.target.soft_options();
        let model = match is_nvme {
            true => DeviceModel::Nvme { block_bytes, not_ready },
            false => DeviceModel::VirtioBlk,
        };
        devices.push(DeviceConfig { bdf, group, media, model });
    }
    Ok(devices)
}

/// Runs the program and reports; returns the exit code.
pub(crate) fn run(args: &CheckArgs) -> Result<ExitCode, Failure> {
    if let Some(path) = &args.report {
        may_write(path).map_err(|error| report_error(path, error))?;
    }
    for (number, knob) in args.knob.iter().enumerate() {
        let before = args.knob.iter().take(number).find(|other| other.name() == knob.name());
        if let Some(before) = before {
            return Err(Failure::CheckKnobs { first: *before, second: *knob });
        }
    }
    let devices = devices(args)?;
    let mut config = CheckConfig::new(devices, args.program.clone());
    config.hostile = args.hostile;
    config.knobs.clone_from(&args.knob);
    config.iova_bits = args.iova_bits;
    config.iommufd = !args.type1_only;
    config.watch_memory = args.watch_memory;
    config.time_limit = args.time_limit.map(|limit| limit.0);
    config.suppress = suppressed(args)?;
    signal::raise(&config.stop).map_err(Failure::Signals)?;
    let mut report = run_program(&config)?;
    if !config.watch_memory {
        let gone = report.findings.iter_mut().filter(|finding| finding.id == "memory-gone");
        gone.for_each(|finding| finding.details.push(WATCH_MEMORY.to_owned()));
    }
    let text = match args.json {
        true => json(args, &config, &report)?,
        false => text(args, &config, &report),
    };
    match &args.report {
        Some(path) => std::fs::write(path, &text).map_err(|error| {
            // Not lost, since the run may have been long.
            output::report(&text);
            report_error(path, error)
        })?,
        None => output::report(&text),
    }
    let limit = match args.fail_on {
        FailOn::Error => Severity::Error,
        FailOn::Warning => Severity::Warning,
        FailOn::Note => Severity::Note,
    };
    if report.worst().is_some_and(|worst| worst >= limit) {
        return Ok(Exit::Command(FOUND).into());
    }
    Ok(match report.ending {
        Ending::Exit(code) => ExitCode::from(code),
        Ending::Signal(signal) => ExitCode::from(signal.saturating_add(128)),
        Ending::TimeLimit => ExitCode::from(TIME_LIMIT),
        Ending::Stopped => Exit::Interrupted.into(),
    })
}

fn report_error(path: &Path, error: io::Error) -> Failure {
    Failure::CheckFile { attempt: "write the report to", name: path.display().to_string(), error }
}

/// Finds out whether a report can be written to `path`, and changes nothing there: it is written when
/// the program has ended.
fn may_write(path: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    match std::fs::metadata(path) {
        Ok(known) if known.is_file() || known.is_dir() => options.write(true).open(path).map(drop),
        // A pipe, whose reader may come later, or a link to a file that does not exist yet.
        Ok(_) => Ok(()),
        Err(_) if path.is_symlink() => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            options.write(true).create_new(true).open(path)?;
            std::fs::remove_file(path)
        }
        Err(error) => Err(error),
    }
}

/// Reads the identifiers of the file of `--suppress`: one a line, `#` begins a comment.
fn suppressed(args: &CheckArgs) -> Result<Vec<String>, Failure> {
    let Some(path) = &args.suppress else { return Ok(Vec::new()) };
    let file = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| Failure::CheckFile {
        attempt: "read the suppressions in",
        name: file.clone(),
        error,
    })?;
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    let ids: Vec<String> = lines.filter(|line| !line.is_empty()).map(str::to_owned).collect();
    match ids.iter().find(|id| KINDS.iter().all(|kind| kind.id != id.as_str())) {
        Some(unknown) => Err(Failure::CheckSuppressed { file, id: unknown.clone() }),
        None => Ok(ids),
    }
}

fn text(args: &CheckArgs, config: &CheckConfig, report: &CheckReport) -> String {
    let mut out = String::new();
    let worst_first = |severity| report.findings.iter().filter(move |f| f.severity == severity);
    for severity in [Severity::Error, Severity::Warning, Severity::Note] {
        for finding in worst_first(severity) {
            out.push_str(&finding.to_string());
        }
    }
    let total = |severity: Severity| -> u64 {
        let ids = KINDS.iter().filter(|kind| kind.severity == severity).map(|kind| kind.id);
        ids.filter_map(|id| report.counts.get(id)).sum()
    };
    let _ = writeln!(
        out,
        "check: {}; {}, {}, {}{}{}",
        counted(report.commands, "command"),
        counted(total(Severity::Error), "error"),
        counted(total(Severity::Warning), "warning"),
        counted(total(Severity::Note), "note"),
        match report.suppressed {
            0 => String::new(),
            suppressed => format!(", {suppressed} suppressed"),
        },
        match report.ending {
            Ending::Exit(0) => String::new(),
            Ending::Exit(code) => format!("; the program returned {code}"),
            Ending::Signal(signal) => format!("; signal {signal} ended the program"),
            Ending::TimeLimit => "; the program was killed at the time limit".to_owned(),
            Ending::Stopped => "; stopped by a signal, which ended the program".to_owned(),
        }
    );
    if report.commands == 0 {
        let devices: Vec<_> = config.devices.iter().map(|device| device.bdf.to_string()).collect();
        let _ = writeln!(out, "check: no device was used; there is {}", devices.join(", "));
    }
    let others: Vec<String> = report
        .counts
        .iter()
        .map(|(id, all)| {
            let printed = report.findings.iter().filter(|finding| finding.id == *id);
            (id, all.saturating_sub(printed.map(|finding| finding.count).sum()))
        })
        .filter(|(_, others)| *others > 0)
        .map(|(id, others)| format!("{others} {id}"))
        .collect();
    if !others.is_empty() {
        let others = others.join(", ");
        let _ = writeln!(out, "check: not printed, as three of the kind are: {others}");
    }
    for ((device, knobs), fate) in config.devices.iter().zip(&report.knobs).zip(&report.fates) {
        for (is_it, what, knob) in
            [(fate.failed, "failed", "cfs="), (fate.removed, "was removed", "remove=")]
        {
            let knob = knobs.iter().find(|own| own.starts_with(knob) && !own.ends_with("=0"));
            let cause = knob.map(|knob| format!(" ({knob})")).unwrap_or_default();
            if is_it {
                let _ = writeln!(out, "check: the device {} {what}{cause}", device.bdf);
            }
        }
    }
    if args.hostile.is_some() || !args.knob.is_empty() {
        let mut options = args.hostile.map(|seed| format!(" --hostile {seed}")).unwrap_or_default();
        for knob in &args.knob {
            let _ = write!(options, " --knob {knob}");
        }
        let _ = writeln!(out, "check:{options}");
        for (device, knobs) in config.devices.iter().zip(&report.knobs) {
            let _ = writeln!(out, "    {}: {}", device.bdf, knobs.join(" "));
        }
    }
    out
}

fn json(
    args: &CheckArgs,
    config: &CheckConfig,
    report: &CheckReport,
) -> Result<String, output::OutputError> {
    let devices = config.devices.iter().zip(&report.knobs).zip(&report.fates);
    let devices = devices
        .map(|((device, knobs), fate)| JsonDevice {
            address: device.bdf.to_string(),
            knobs,
            fate: *fate,
        })
        .collect();
    let (exit_code, signal) = match report.ending {
        Ending::Exit(code) => (Some(code), None),
        Ending::Signal(signal) => (None, Some(signal)),
        Ending::TimeLimit | Ending::Stopped => (None, None),
    };
    let mut line = serde_json::to_string(&JsonReport {
        findings: &report.findings,
        counts: &report.counts,
        suppressed: report.suppressed,
        commands: report.commands,
        seed: args.hostile,
        devices,
        exit_code,
        signal,
        time_limit: report.ending == Ending::TimeLimit,
        stopped: report.ending == Ending::Stopped,
    })?;
    line.push('\n');
    Ok(line)
}
