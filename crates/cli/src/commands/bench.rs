//! `bench`: Pinfold side by side with what it replaces.

mod iops;

use crate::args::BenchArgs;
use crate::failure::Failure;
use crate::output;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pinfold_bench::plot::Plot;
use pinfold_bench::published::Published;
use pinfold_bench::targets::Targets;
use pinfold_bench::{COUNTS_RMW, Listing, Options, Record, SUITES, Suite, Table, Turn};
use std::path::{Path, PathBuf};

/// How many runs are counted by default.
const RUNS: usize = 9;
const QUICK_RUNS: usize = 3;

/// Measures, and prints each suite when it is complete.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    if args.list {
        return Ok(output::text(&Listing.to_string())?);
    }
    let options = Options {
        runs: args.runs.unwrap_or(if args.quick { QUICK_RUNS } else { RUNS }),
        quick: args.quick,
    };
    if let Some(folder) = &args.plot {
        // Before the measurement, which takes a while.
        std::fs::create_dir_all(folder)
            .map_err(|error| Failure::Plot { path: folder.clone(), error })?;
    }
    if COUNTS_RMW {
        output::error("this build counts read-modify-writes, so times and baselines are left out");
    } else if !args.json {
        output::error(
            "read-modify-writes are left out: they are counted by a build with --features count-rmw",
        );
    }
    let mut all: Vec<Record> = Vec::new();
    let mut has_device = false;
    for suite in selected(&args.suites) {
        // A suite that was named fails; of all suites, those that cannot run are left out.
        if let Some(why) = suite.unable().filter(|_| args.suites.is_empty()) {
            output::error(format_args!("{} is left out: {why}", suite.name));
            continue;
        }
        let records = measure(suite.name, |watch| Ok(suite.run(options, watch)?))?;
        show(args, (suite.name, suite.about), records, &mut all)?;
        has_device |= suite.name == "vfio";
    }
    // Last, since it rebinds the device, and catches the signals.
    if has_device && !COUNTS_RMW {
        match iops::requirements() {
            Err(why) => {
                output::error(format_args!(
                    "vfio: the comparison with the kernel's driver is left out: {why}"
                ));
            }
            Ok(requirements) => {
                let records = measure("vfio", |watch| iops::run(&requirements, options, watch))?;
                show(args, ("vfio-iops", iops::ABOUT), records, &mut all)?;
            }
        }
    }
    if !args.json {
        output::text(&Published { records: &all, quick: args.quick }.to_string())?;
        output::text(&Targets { records: &all, quick: args.quick }.to_string())?;
    }
    Ok(())
}

/// Returns the named suites, each once; all of them if none is named.
fn selected(names: &[String]) -> Vec<Suite> {
    let wanted = |suite: &&Suite| names.is_empty() || names.iter().any(|name| name == suite.name);
    SUITES.iter().filter(wanted).copied().collect()
}

/// Runs a suite, with a progress line on a terminal.
fn measure(
    name: &'static str,
    run: impl FnOnce(&dyn Fn(Turn)) -> Result<Vec<Record>, Failure>,
) -> Result<Vec<Record>, Failure> {
    // Drawn between runs only: a thread that draws would be measured, too.
    let line = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{prefix}: {wide_msg}") {
        line.set_style(style);
    }
    line.set_prefix(name);
    let records = run(&|turn: Turn| {
        line.set_message(format!("round {} of {}, {}", turn.round, turn.rounds, turn.subject));
        line.tick();
    });
    line.finish_and_clear();
    records
}

/// Prints the records, plots them on request, and adds them to `all`.
fn show(
    args: &BenchArgs,
    (name, about): (&str, &str),
    records: Vec<Record>,
    all: &mut Vec<Record>,
) -> Result<(), Failure> {
    if let Some(folder) = &args.plot {
        write_plot(folder, (name, about), &records)?;
    }
    if args.json {
        output::text(
            &records.iter().fold(String::new(), |text, record| text + &record.to_json() + "\n"),
        )?;
    } else {
        let gap = if all.is_empty() { "" } else { "\n" };
        output::text(&format!("{gap}{name}: {about}\n{}", Table(&records)))?;
    }
    all.extend(records);
    Ok(())
}

fn write_plot(
    folder: &Path,
    (name, about): (&str, &str),
    records: &[Record],
) -> Result<(), Failure> {
    let path: PathBuf = folder.join(name).with_extension("svg");
    let title = format!("pinfold bench {name}: {about}");
    let picture = Plot { title: &title, records }.to_string();
    std::fs::write(&path, picture).map_err(|error| Failure::Plot { path, error })
}
