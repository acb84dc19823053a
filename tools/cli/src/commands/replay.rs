//! `replay`: a recorded trace through every policy.

use crate::args::{ReplayArgs, TimingArg};
use crate::engine::worker::EngineError;
use crate::failure::Failure;
use crate::output;
use crate::report::replay::{Report, Row};
use crate::signal::Interrupt;
use crate::units::grouped;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pinfold::soft::{Effect, SoftConfig};
use pinfold_replay::policy::PolicyKind;
use pinfold_replay::{
    Limits, Outcome, Picture, Places, ReplayError, Timing, Trace, TraceError, replay_all,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::Path;

/// The text of `--how`.
const HOW: &str = include_str!("replay/how.txt");

/// Reads the trace, replays it, and prints the report: of what was replayed until a signal or a
/// failure.
pub(crate) fn run(args: &ReplayArgs) -> Result<(), Failure> {
    // Without `--how` there is a trace.
    let Some(path) = args.trace.as_ref().filter(|_| !args.how) else {
        return Ok(output::text(HOW)?);
    };
    if let Some(folder) = &args.svg {
        // Before the replay, which takes a while.
        std::fs::create_dir_all(folder)
            .map_err(|error| Failure::Svg { path: folder.clone(), error })?;
    }
    let name = path.display().to_string();
    let unread = |error| Failure::Trace { name: name.clone(), error: TraceError::Read(error) };
    // Before signals are caught: a FIFO without a writer is waited for here.
    let file = open(path).map_err(unread)?;
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let line = progress();
    let limits = Limits { operations: args.limit, bytes: args.memory.0 };
    let trace = read(&name, Input { file, interrupt: &interrupt }, &limits, &line)?;
    let timing = match args.timing {
        TimingArg::Fast => Timing::Fast,
        TimingArg::Original => Timing::Original,
    };
    let table_bytes = usize::try_from(args.table_bytes.0).unwrap_or(usize::MAX);
    let config = SoftConfig { effect: Effect::AtLast, table_bytes, ..SoftConfig::default() };
    let places = Places::new(&trace).map_err(ReplayError::Prepare)?;
    let svg = args.svg.as_deref();
    let mut result = svg.map_or(Ok(()), |folder| draw_recorded(folder, &trace));
    let mut by_policy: Vec<Vec<Outcome>> = Vec::new();
    for kind in selected(&args.policies) {
        line.set_prefix(kind.name());
        let keep_going = |done: usize| {
            line.set_message(format!("operation {}", grouped(done as u64)));
            line.tick();
            !interrupt.is_raised()
        };
        let replayed = result
            .and_then(|()| Ok(replay_all(&trace, kind, &places, &config, timing, &keep_going)?));
        result = match replayed {
            Ok(mut outcomes) => {
                let drawn = svg.map_or(Ok(()), |folder| draw(folder, &trace, &outcomes));
                // The memory of a policy is that of the next.
                outcomes.iter_mut().for_each(Outcome::forget_addresses);
                by_policy.push(outcomes);
                drawn
            }
            Err(failure) => Err(failure),
        };
        if interrupt.is_raised() {
            result = Err(EngineError::Interrupted.into());
        }
        if result.is_err() {
            break;
        }
    }
    line.finish_and_clear();
    // However it ended, the results of the earlier policies are reported.
    let failure = result.as_ref().err().map(Failure::line);
    let report = Report::new(path, args.timing, args.mapped, &trace, &by_policy, failure);
    let text = if args.json { report.to_json() } else { Ok(report.to_text()) };
    let printed = text.map_err(Failure::from).and_then(|text| Ok(output::text(&text)?));
    result.and(printed)
}

/// Creates a progress line. Drawn by the thread that works, and between operations only: a thread
/// that draws would be measured, too.
fn progress() -> ProgressBar {
    let line = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{prefix}: {wide_msg}") {
        line.set_style(style);
    }
    line
}

fn open(path: &Path) -> io::Result<File> {
    // A handle of its own: what standard input buffers could not be waited for.
    if path.as_os_str() == "-" {
        Ok(io::stdin().as_fd().try_clone_to_owned()?.into())
    } else {
        File::open(path)
    }
}

/// A trace that may come from a program that pauses. It ends early when a signal has arrived.
struct Input<'i> {
    file: File,
    interrupt: &'i Interrupt,
}

impl Read for Input<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let limit = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        loop {
            if self.interrupt.is_raised() {
                return Err(io::Error::other("interrupted"));
            }
            match poll(&mut [PollFd::new(&self.file, PollFlags::IN)], Some(&limit)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return self.file.read(buf),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

fn read(
    name: &str,
    input: Input<'_>,
    limits: &Limits,
    line: &ProgressBar,
) -> Result<Trace, Failure> {
    line.set_prefix(name.to_owned());
    let interrupt = input.interrupt;
    let keep_going = |lines| {
        line.set_message(format!("line {}", grouped(lines)));
        line.tick();
        !interrupt.is_raised()
    };
    Trace::read(input, limits, &keep_going).map_err(|error| match error {
        TraceError::Stopped => EngineError::Interrupted.into(),
        _ if interrupt.is_raised() => EngineError::Interrupted.into(),
        error => Failure::Trace { name: name.to_owned(), error },
    })
}

/// Returns the named policies, each once, in the order of the ladder; all of them if none is named.
fn selected(names: &[PolicyKind]) -> impl Iterator<Item = PolicyKind> {
    PolicyKind::ALL.into_iter().filter(|kind| names.is_empty() || names.contains(kind))
}

/// Writes a picture for each device as recorded.
fn draw_recorded(folder: &Path, trace: &Trace) -> Result<(), Failure> {
    let names = file_names(trace.devices.iter().map(|device| &*device.name));
    let mut devices = trace.devices.iter().zip(names);
    devices.try_for_each(|(device, name)| write(folder, &name, Row::RECORDED, &device.picture()))
}

/// Writes a picture for each device, as one policy replayed it.
fn draw(folder: &Path, trace: &Trace, outcomes: &[Outcome]) -> Result<(), Failure> {
    let names = file_names(trace.devices.iter().map(|device| &*device.name));
    let mut devices = trace.devices.iter().zip(names).zip(outcomes);
    devices.try_for_each(|((device, name), outcome)| {
        write(folder, &name, outcome.policy.name(), &outcome.picture(device))
    })
}

fn write(folder: &Path, name: &str, subject: &str, picture: &Picture<'_>) -> Result<(), Failure> {
    let path = folder.join(format!("{name}-{subject}.svg"));
    std::fs::write(&path, picture.to_string()).map_err(|error| Failure::Svg { path, error })
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

/// Returns the name of a device with what is unusual in names of files replaced: a trace may
/// contain anything.
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
        let names = [PolicyKind::None, PolicyKind::Lazy, PolicyKind::None];
        assert!(selected(&names).eq([PolicyKind::Lazy, PolicyKind::None]));
        assert!(selected(&[]).eq(PolicyKind::ALL));
    }
}
