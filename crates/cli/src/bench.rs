//! `bench`: head to head with what Pinfold replaces.

mod iops;
pub(crate) mod kernel;

use crate::args::BenchArgs;
use crate::failure::Failure;
use crate::output;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pinfold_bench::plot::Plot;
use pinfold_bench::published::Published;
use pinfold_bench::targets::Targets;
use pinfold_bench::{COUNTS_RMW, Listing, Options, Record, SUITES, Suite, Table, Turn};
use std::path::{Path, PathBuf};

/// How many runs are counted where the user does not say.
const RUNS: usize = 9;
const QUICK_RUNS: usize = 3;

/// Measures, and prints each suite as it is done.
pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    if args.list {
        return output::text(&Listing.to_string());
    }
    let options =
        Options { runs: args.runs.unwrap_or(if args.quick { QUICK_RUNS } else { RUNS }), quick: args.quick };
    if let Some(folder) = &args.plot {
        // Before the measurement, which takes a while, and not after it.
        std::fs::create_dir_all(folder).map_err(|error| Failure::Plot { path: folder.clone(), error })?;
    }
    if COUNTS_RMW {
        output::error("this build counts read-modify-writes, so times and baselines are left out");
    } else if !args.json {
        output::error(
            "read-modify-writes are left out: they are counted by a build with --features count-rmw",
        );
    }
    let mut all: Vec<Record> = Vec::new();
    let mut real = false;
    for suite in chosen(&args.suites) {
        // Who names a suite wants to know that it fails; who wants all there is gets the rest.
        if let Some(why) = suite.unable().filter(|_| args.suites.is_empty()) {
            output::error(format_args!("{} is left out: {why}", suite.name));
            continue;
        }
        let records = measured(suite.name, |watch| Ok(suite.run(options, watch)?))?;
        show(args, (suite.name, suite.about), records, &mut all)?;
        real |= suite.name == "vfio";
    }
    // Last, because it hands the device over, and catches the signals.
    if real && !COUNTS_RMW {
        match iops::able() {
            Err(why) => {
                output::error(format_args!(
                    "vfio: requests a second beside the kernel's driver are left out: {why}"
                ));
            }
            Ok(able) => {
                let records = measured("vfio", |watch| iops::run(&able, options, watch))?;
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

/// Each suite that was named, once; all of them where none was.
fn chosen(names: &[String]) -> Vec<Suite> {
    let wanted = |suite: &&Suite| names.is_empty() || names.iter().any(|name| name == suite.name);
    SUITES.iter().filter(wanted).copied().collect()
}

/// What `run` measures, with a line on a terminal that says how far it is.
fn measured(
    name: &'static str,
    run: impl FnOnce(&dyn Fn(Turn)) -> Result<Vec<Record>, Failure>,
) -> Result<Vec<Record>, Failure> {
    // Drawn between runs only: a thread that ticks would be measured, too.
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

/// Prints the records, draws them where that is asked for, and adds them to `all`.
fn show(
    args: &BenchArgs,
    (name, about): (&str, &str),
    records: Vec<Record>,
    all: &mut Vec<Record>,
) -> Result<(), Failure> {
    if let Some(folder) = &args.plot {
        plot(folder, (name, about), &records)?;
    }
    if args.json {
        output::text(&records.iter().fold(String::new(), |text, record| text + &record.to_json() + "\n"))?;
    } else {
        let gap = if all.is_empty() { "" } else { "\n" };
        output::text(&format!("{gap}{name}: {about}\n{}", Table(&records)))?;
    }
    all.extend(records);
    Ok(())
}

fn plot(folder: &Path, (name, about): (&str, &str), records: &[Record]) -> Result<(), Failure> {
    let path: PathBuf = folder.join(name).with_extension("svg");
    let title = format!("pinfold bench {name}: {about}");
    let picture = Plot { title: &title, records }.to_string();
    std::fs::write(&path, picture).map_err(|error| Failure::Plot { path, error })
}
