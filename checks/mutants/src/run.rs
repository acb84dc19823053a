//! The tests, with a change on: which of them pass it, and whether one of them fails.

use crate::compile::Program;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

/// The tests of one program that pass a change; none by name where a thread without the name of a
/// test does.
pub type Passing = BTreeMap<usize, Option<BTreeSet<String>>>;

/// The result of a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Caught,
    Survived,
    /// No test passes it.
    NotReached,
}

/// The tests of a program that pass without a change, and how long they take.
pub struct Suite {
    tests: Vec<String>,
    time: Duration,
}

const LIMIT: Duration = Duration::from_secs(1800);

/// A run of `tests`.
fn command<'t>(program: &Program, tests: impl IntoIterator<Item = &'t String>) -> Command {
    let mut command = Command::new(&program.path);
    command
        .current_dir(&program.folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    match &program.arguments {
        Some(arguments) => command.args(arguments),
        None => command.arg("--exact").args(tests),
    };
    command
}

/// Runs all tests without a change; returns for each change which tests pass it, and the tests of
/// each program. A test that fails without a change is named and left out.
///
/// # Errors
/// A program cannot run.
pub fn record(
    ids: &[u32],
    programs: &[Program],
    folder: &Path,
    filter: &str,
) -> io::Result<(BTreeMap<u32, Passing>, Vec<Suite>)> {
    let mut passing: BTreeMap<u32, Passing> = BTreeMap::new();
    let mut suites = Vec::new();
    for (index, program) in programs.iter().enumerate() {
        let file = folder.join(format!("passed-{index}"));
        fs::remove_file(&file).or_else(|error| {
            if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
        })?;
        let mut tests = names(program, filter)?;
        if tests.is_empty() {
            suites.push(Suite { tests, time: Duration::ZERO });
            continue;
        }
        let begun = Instant::now();
        let recorded =
            succeeds(command(program, &tests).env("PINFOLD_MUTANT_RECORD", &file), LIMIT)?;
        // The changes that these pass are unknown.
        let any = if recorded { BTreeSet::new() } else { alone(program, &mut tests, &file)? };
        let time = begun.elapsed();
        for (id, by) in passed(&file, &tests) {
            passing.entry(id).or_default().insert(index, by);
        }
        for id in ids.iter().filter(|_| !any.is_empty()) {
            let by = passing.entry(*id).or_default().entry(index);
            if let Some(names) = by.or_insert_with(|| Some(BTreeSet::new())) {
                names.extend(any.iter().cloned());
            }
        }
        suites.push(Suite { tests, time });
    }
    Ok((passing, suites))
}

/// Runs each of `tests` alone, and leaves out those that fail; returns those that pass only while
/// nothing is recorded.
fn alone(
    program: &Program,
    tests: &mut Vec<String>,
    file: &PathBuf,
) -> io::Result<BTreeSet<String>> {
    let mut unrecorded = BTreeSet::new();
    let mut failed = BTreeSet::new();
    for test in &*tests {
        if succeeds(command(program, [test]).env("PINFOLD_MUTANT_RECORD", file), LIMIT)? {
            continue;
        }
        if succeeds(&mut command(program, [test]), LIMIT)? {
            unrecorded.insert(test.clone());
        } else {
            eprintln!("mutants: left out, fails without a change: {test} of {}", program.name);
            failed.insert(test.clone());
        }
    }
    tests.retain(|test| !failed.contains(test));
    Ok(unrecorded)
}

/// Returns the tests of `tests` that pass each change, as the program has written them to `file`.
fn passed(file: &Path, tests: &[String]) -> BTreeMap<u32, Option<BTreeSet<String>>> {
    let tests: BTreeSet<_> = tests.iter().map(String::as_str).collect();
    let mut found: BTreeMap<u32, Option<BTreeSet<String>>> = BTreeMap::new();
    let text = fs::read_to_string(file).unwrap_or_default();
    let lines = text.lines().filter_map(|line| {
        let (id, thread) = line.split_once(' ')?;
        Some((id.parse().ok()?, thread))
    });
    for (id, thread) in lines {
        match found.entry(id).or_insert_with(|| Some(BTreeSet::new())) {
            Some(names) if tests.contains(thread) => drop(names.insert(thread.to_owned())),
            // A thread that a test has started: any of them.
            other => *other = None,
        }
    }
    found
}

/// The tests of a program whose name contains `filter`, without the stress tests: those detect by
/// chance what others detect always.
fn names(program: &Program, filter: &str) -> io::Result<Vec<String>> {
    if program.arguments.is_some() {
        return Ok(vec![program.name.clone()]);
    }
    let output = Command::new(&program.path).arg("--list").current_dir(&program.folder).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
    let names = names.filter(|name| !name.contains("stress_") && name.contains(filter));
    Ok(names.map(str::to_owned).collect())
}

/// Runs the tests that pass a change, with it.
///
/// # Errors
/// A program cannot run.
pub fn attempt(
    id: u32,
    programs: &[Program],
    suites: &[Suite],
    passing: &Passing,
) -> io::Result<Outcome> {
    // The quick ones first: most changes need no other.
    let mut passing: Vec<_> = passing.iter().collect();
    passing.sort_by_key(|(index, _)| suites[**index].time);
    for (index, names) in &passing {
        let suite = &suites[**index];
        let mut command = match names {
            Some(names) => command(&programs[**index], names),
            None => command(&programs[**index], &suite.tests),
        };
        let limit = Duration::from_secs(20) + suite.time * 3;
        if !succeeds(command.env("PINFOLD_MUTANT", id.to_string()), limit)? {
            return Ok(Outcome::Caught);
        }
    }
    Ok(if passing.is_empty() { Outcome::NotReached } else { Outcome::Survived })
}

/// Returns whether a program succeeds within `limit`.
fn succeeds(command: &mut Command, limit: Duration) -> io::Result<bool> {
    Ok(wait(&mut command.spawn()?, limit)?.is_some_and(|status| status.success()))
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// Stands for a test program: `bad` fails always, `blind` while it is recorded, and `good`
    /// passes change 7 and detects it.
    const SCRIPT: &str = r#"#!/bin/sh
        if [ "$1" = --list ]; then
            printf '%s: test\n' good bad blind stress_all
            exit
        fi
        for name; do
            case $name in
                bad | stress_all) exit 1 ;;
                blind) [ -z "$PINFOLD_MUTANT_RECORD" ] || exit 1 ;;
                good)
                    [ -z "$PINFOLD_MUTANT_RECORD" ] || echo "7 good" >>"$PINFOLD_MUTANT_RECORD"
                    [ "$PINFOLD_MUTANT" != 7 ] || exit 1 ;;
            esac
        done
    "#;

    #[test]
    fn a_test_that_fails_without_a_change_is_left_out() {
        let folder = std::env::temp_dir().join(format!("pinfold-mutants-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("program");
        fs::write(&path, SCRIPT).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let name = "program".to_owned();
        let program = Program { path, folder: folder.clone(), name, arguments: None };
        let programs = [program];
        let (passing, suites) = record(&[7, 8], &programs, &folder, "").unwrap();
        assert_eq!(suites[0].tests, ["good", "blind"]);
        let by = |names: &[&str]| {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            Passing::from([(0, Some(names))])
        };
        assert_eq!(passing, BTreeMap::from([(7, by(&["good", "blind"])), (8, by(&["blind"]))]));
        let outcome = |id, passing: &Passing| attempt(id, &programs, &suites, passing).unwrap();
        assert_eq!(outcome(7, &passing[&7]), Outcome::Caught);
        assert_eq!(outcome(8, &passing[&8]), Outcome::Survived);
        assert_eq!(outcome(7, &Passing::from([(0, None)])), Outcome::Caught);
        assert_eq!(outcome(9, &Passing::new()), Outcome::NotReached);
        fs::remove_dir_all(&folder).unwrap();
    }

    /// It passes change 7, in a thread that has no name, and detects it.
    #[test]
    fn a_program_in_c_is_one_test() {
        let script = r#"#!/bin/sh
            [ "$1" = library ] || exit 1
            [ -z "$PINFOLD_MUTANT_RECORD" ] || echo "7 ?" >>"$PINFOLD_MUTANT_RECORD"
            [ "$PINFOLD_MUTANT" != 7 ]
        "#;
        let folder = std::env::temp_dir().join(format!("pinfold-mutants-c-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("program");
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let (name, arguments) = ("test-map".to_owned(), Some(vec!["library".to_owned()]));
        let programs = [Program { path, folder: folder.clone(), name, arguments }];
        let (passing, suites) = record(&[7, 8], &programs, &folder, "").unwrap();
        assert_eq!(suites[0].tests, ["test-map"]);
        assert_eq!(passing, BTreeMap::from([(7, Passing::from([(0, None)]))]));
        let outcome = |id| attempt(id, &programs, &suites, &passing[&7]).unwrap();
        assert_eq!((outcome(7), outcome(8)), (Outcome::Caught, Outcome::Survived));
        fs::remove_dir_all(&folder).unwrap();
    }
}
