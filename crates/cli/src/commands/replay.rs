//! `replay`: a recorded trace through every policy.

use crate::args::{ReplayArgs, TimingArg};
use crate::failure::Failure;
use crate::output;
use crate::report::replay::{Report, Row};
use crate::units::grouped;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pinfold::soft::{Effect, SoftConfig};
use pinfold_bench::policy::PolicyKind;
use pinfold_bench::replay::{Outcome, Picture, Places, ReplayError, Timing, Trace, TraceError, replay_all};
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// What `--how` prints.
const HOW: &str = include_str!("replay/how.txt");

/// Reads the trace, replays it, and prints the report.
pub(crate) fn run(args: &ReplayArgs) -> Result<(), Failure> {
    // Without `--how` there is a trace.
    let Some(path) = args.trace.as_ref().filter(|_| !args.how) else { return Ok(output::text(HOW)?) };
    if let Some(folder) = &args.svg {
        // Before the replay, which takes a while.
        std::fs::create_dir_all(folder).map_err(|error| Failure::Svg { path: folder.clone(), error })?;
    }
    let line = progress();
    let trace = read(path, args.limit, &line)?;
    let timing = match args.timing {
        TimingArg::Fast => Timing::Fast,
        TimingArg::Original => Timing::Original,
    };
    let table_bytes = usize::try_from(args.table_bytes.0).unwrap_or(usize::MAX);
    let config = SoftConfig { effect: Effect::AtLast, table_bytes, ..SoftConfig::default() };
    let places = Places::new(&trace).map_err(ReplayError::Prepare)?;
    let mut by_policy: Vec<Vec<Outcome>> = Vec::new();
    for kind in selected(&args.policies) {
        line.set_prefix(kind.name());
        let watch = |done: usize| {
            line.set_message(format!("operation {}", grouped(done as u64)));
            line.tick();
        };
        by_policy.push(replay_all(&trace, kind, &places, &config, timing, &watch)?);
    }
    line.finish_and_clear();
    if let Some(folder) = &args.svg {
        draw(folder, &trace, &by_policy)?;
    }
    let report = Report::new(path, args.timing, args.mapped, &trace, &by_policy);
    Ok(output::text(&if args.json { report.to_json()? } else { report.to_text() })?)
}

/// Creates a progress line. Drawn by the thread that works, and between operations only: a thread that draws would be
/// measured, too.
fn progress() -> ProgressBar {
    let line = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{prefix}: {wide_msg}") {
        line.set_style(style);
    }
    line
}

fn read(path: &Path, limit: u64, line: &ProgressBar) -> Result<Trace, Failure> {
    let name = path.display().to_string();
    let failed = |error| Failure::Trace { name: name.clone(), error };
    let input: Box<dyn Read> = if path.as_os_str() == "-" {
        Box::new(io::stdin().lock())
    } else {
        Box::new(File::open(path).map_err(|error| failed(TraceError::Read(error)))?)
    };
    line.set_prefix(name.clone());
    let watch = |lines| {
        line.set_message(format!("line {}", grouped(lines)));
        line.tick();
    };
    Trace::read(input, limit, &watch).map_err(failed)
}

/// Returns the named policies, each once, in the order of the ladder; all of them if none is named.
fn selected(names: &[PolicyKind]) -> impl Iterator<Item = PolicyKind> {
    PolicyKind::ALL.into_iter().filter(|kind| names.is_empty() || names.contains(kind))
}

/// Writes a picture for each device as recorded, and for each policy.
fn draw(folder: &Path, trace: &Trace, by_policy: &[Vec<Outcome>]) -> Result<(), Failure> {
    let write = |name: &str, subject: &str, picture: Picture<'_>| {
        let path = folder.join(format!("{name}-{subject}.svg"));
        std::fs::write(&path, picture.to_string()).map_err(|error| Failure::Svg { path, error })
    };
    let names = file_names(trace.devices.iter().map(|device| &*device.name));
    for (at, (device, name)) in trace.devices.iter().zip(names).enumerate() {
        write(&name, Row::RECORDED, device.picture())?;
        for outcome in by_policy.iter().filter_map(|outcomes| outcomes.get(at)) {
            write(&name, outcome.policy.name(), outcome.picture(device))?;
        }
    }
    Ok(())
}

/// Returns names of files for devices, each different.
fn file_names<'n>(devices: impl Iterator<Item = &'n str>) -> Vec<String> {
    let mut taken = HashSet::new();
    let unique = |device| {
        let name = file_name(device);
        let others = (2u64..).map(|number| format!("{name}~{number}"));
        let free = core::iter::once(name.clone()).chain(others).find(|name| !taken.contains(name));
        let free = free.unwrap_or(name);
        taken.insert(free.clone());
        free
    };
    devices.map(unique).collect()
}

/// Returns the name of a device with what is unusual in names of files replaced: a trace may contain anything.
fn file_name(device: &str) -> String {
    let usual = |c: char| if c.is_ascii_alphanumeric() || ".-_".contains(c) { c } else { '_' };
    let name: String = device.chars().take(64).map(usual).collect();
    // Hidden files would be missed.
    if name.starts_with('.') { format!("_{name}") } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices_stay_in_the_folder() {
        assert_eq!(file_name("0000:00:1f.2"), "0000_00_1f.2");
        assert_eq!(file_name("../../x/y"), "_.._.._x_y");
        assert_eq!(file_name(&"é".repeat(100)), "_".repeat(64));
    }

    #[test]
    fn devices_whose_names_differ_have_files_of_their_own() {
        let names = file_names(["x/y", "x_y", "x:y", "x_y~2"].into_iter());
        assert_eq!(names, ["x_y", "x_y~2", "x_y~3", "x_y_2"]);
    }

    #[test]
    fn policies_run_once_in_the_order_of_the_ladder() {
        let names = [PolicyKind::None, PolicyKind::Magazines, PolicyKind::None];
        assert!(selected(&names).eq([PolicyKind::Magazines, PolicyKind::None]));
        assert!(selected(&[]).eq(PolicyKind::ALL));
    }
}
