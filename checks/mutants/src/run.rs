//! The tests, with a change on: which of them pass it, and whether one of them fails.

use crate::compile::Program;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

/// The tests of one program that pass a change; none by name where a thread without the name of a
/// test does.
pub type Passing = BTreeMap<usize, Option<BTreeSet<String>>>;

/// How a change ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Caught,
    Survived,
    /// No test passes it.
    NotReached,
}

/// What every run leaves out: stress tests detect by chance what others detect always.
fn command(program: &Program, filter: &str) -> Command {
    let mut command = Command::new(&program.path);
    command
        .current_dir(&program.folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command.args(["--skip", "stress_"]);
    if !filter.is_empty() {
        command.arg(filter);
    }
    command
}

/// Runs all tests without a change; returns for each change who passes it, and for each program how
/// long it took.
///
/// # Errors
/// A program cannot run, or its tests fail.
pub fn record(
    ids: &[u32],
    programs: &[Program],
    folder: &Path,
    filter: &str,
) -> io::Result<(BTreeMap<u32, Passing>, Vec<Duration>)> {
    let mut passing: BTreeMap<u32, Passing> = BTreeMap::new();
    let mut times = Vec::new();
    for (index, program) in programs.iter().enumerate() {
        let file = folder.join(format!("passed-{index}"));
        fs::remove_file(&file).or_else(|error| {
            if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
        })?;
        let begun = Instant::now();
        let mut child = command(program, filter).env("PINFOLD_MUTANT_RECORD", &file).spawn()?;
        let limit = Duration::from_secs(1800);
        if wait(&mut child, limit)?.is_none_or(|status| !status.success()) {
            // Tests that count allocations fail because of the recording: any change may be theirs.
            if wait(&mut command(program, filter).spawn()?, limit)?
                .is_none_or(|status| !status.success())
            {
                let text = format!("the tests of {} fail without a change", program.path.display());
                return Err(io::Error::other(text));
            }
            for id in ids {
                passing.entry(*id).or_default().insert(index, None);
            }
            times.push(begun.elapsed());
            continue;
        }
        times.push(begun.elapsed());
        let tests = names(program)?;
        for line in fs::read_to_string(&file).unwrap_or_default().lines() {
            let Some((id, thread)) =
                line.split_once(' ').and_then(|(id, thread)| Some((id.parse().ok()?, thread)))
            else {
                continue;
            };
            let of_program = passing
                .entry(id)
                .or_default()
                .entry(index)
                .or_insert_with(|| Some(BTreeSet::new()));
            match of_program {
                Some(names) if tests.contains(thread) => drop(names.insert(thread.to_owned())),
                // A thread that a test has started: any of them.
                other => *other = None,
            }
        }
    }
    Ok((passing, times))
}

fn names(program: &Program) -> io::Result<BTreeSet<String>> {
    let output = Command::new(&program.path).arg("--list").current_dir(&program.folder).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// Runs the tests that pass a change, with it.
///
/// # Errors
/// A program cannot run.
pub fn attempt(
    id: u32,
    programs: &[Program],
    passing: &Passing,
    times: &[Duration],
    filter: &str,
) -> io::Result<Outcome> {
    for (index, names) in passing {
        let program = &programs[*index];
        let mut command = command(program, if names.is_some() { "" } else { filter });
        command.env("PINFOLD_MUTANT", id.to_string());
        if let Some(names) = names {
            command.arg("--exact").args(names);
        }
        let limit = Duration::from_secs(20) + times[*index] * 3;
        let ended = wait(&mut command.spawn()?, limit)?;
        if ended.is_none_or(|status| !status.success()) {
            return Ok(Outcome::Caught);
        }
    }
    Ok(if passing.is_empty() { Outcome::NotReached } else { Outcome::Survived })
}

/// Waits for a program, and kills it after `limit`.
fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let begun = Instant::now();
    let mut pause = Duration::from_millis(1);
    while begun.elapsed() < limit {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}
