//! `pinfold-bench`: Pinfold side by side with what it replaces.
//!
//! The subjects of a case run interleaved in one process, so a ratio between them holds on a
//! machine whose speed drifts. Each figure is a median with its minimum and maximum; a figure that
//! comes from a model is marked. The program prints figures and no verdicts.
//!
//! The baselines are written from public descriptions; no kernel source is copied.
#![deny(unsafe_code)]

mod baseline;
mod error;
mod harness;
mod record;
mod suite;

use clap::Parser;
use clap::builder::RangedU64ValueParser;
use harness::{COUNTS_RMW, Options, Progress};
use record::{Record, Table};
use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write as _};
use std::process::ExitCode;
use std::sync::Arc;
use suite::{Listing, Selection};

/// The default number of counted runs.
const RUNS: usize = 9;
const QUICK_RUNS: usize = 3;

const LONG: &str = "\
The subjects of a case run in turn in one process, so that the ratio of two of them holds on a machine whose speed
drifts. Each figure is the median of the runs, with the minimum and the maximum beside it; the last column of the
table is the ratio to the case's first subject. Run nothing else meanwhile.

The suites serve, protect, io, testpmd and vfio run the program `pinfold`, which is looked for beside this one and then
on PATH. The suite vfio needs a device that is bound to vfio-pci. If that is an NVMe controller, the user is root and
fio is installed, its case randread-4k-64 compares the I/Os per second with fio on the kernel's driver: the controller
changes its driver in each round. It is never written. What cannot be measured is reported on standard error.

A line of --json:
  {\"suite\":\"pool\",\"case\":\"pair-64\",\"subject\":\"pinfold\",
   \"metric\":\"time\",\"unit\":\"ns/op\",\"median\":2.1,\"min\":2.0,\"max\":2.6,\"runs\":9}

metric is time, rate (per second), bytes, count or segments. A figure that depends on the model of an IOMMU has
\"modelled\":true. A build with --features count-rmw counts the read-modify-writes on shared memory per operation
instead of measuring times.

Exit codes:
  0    all was measured
  1    a subject failed; one line on standard error says why
  2    the command line asks for something unknown or impossible
  130  stopped by a signal; nothing is left behind, and the suite vfio gives the device its driver back first

";

const EXAMPLES: &str = "\
Examples:
  pinfold-bench
  pinfold-bench pool --quick
  pinfold-bench pool/pair-64 pool/remote-free iommu
  pinfold-bench frame --json --runs 21 > frame.json
  sudo pinfold-bench vfio";

/// Measure Pinfold side by side with what it replaces
#[derive(Debug, Parser)]
#[command(name = "pinfold-bench", version)]
#[command(after_long_help = format!("{LONG}{EXAMPLES}"), after_help = EXAMPLES)]
struct Args {
    /// The suites or single cases to run [default: all]
    #[arg(value_name = "SUITE[/CASE]", value_parser = Selection::parse)]
    selected: Vec<Selection>,

    /// Print one JSON object per line for each figure
    #[arg(long)]
    json: bool,

    /// Do less work, for rougher figures
    #[arg(long)]
    quick: bool,

    /// The number of measured runs, after a warm-up run [default: 9, or 3 with --quick]
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=1000))]
    runs: Option<usize>,

    /// Explain all cases and subjects, and measure nothing
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    // A handler, so that a write beyond `ulimit -f` fails, and does not end the program.
    let handled = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    let ended = handled.map_err(Into::into).and_then(|_| run(&Args::parse()));
    let Err(error) = ended else { return ExitCode::SUCCESS };
    if error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe) {
        // A reader that has closed its end of the pipe is not a failure.
        return ExitCode::SUCCESS;
    }
    report(&error.to_string());
    match error.downcast_ref::<error::BenchError>() {
        Some(error::BenchError::Interrupted) => ExitCode::from(130),
        _ => ExitCode::FAILURE,
    }
}

/// Measures, and prints each suite when it is complete.
fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    if args.list {
        return Ok(print(&Listing.to_string())?);
    }
    let options = Options {
        runs: args.runs.unwrap_or(if args.quick { QUICK_RUNS } else { RUNS }),
        quick: args.quick,
    };
    if COUNTS_RMW {
        report("this build counts read-modify-writes, so times and baselines are left out");
    }
    if !args.json {
        print(&format!("{}\n", machine()))?;
    }
    for (suite, cases) in Selection::suites(&args.selected) {
        // A suite that was named fails; of all suites, those that cannot run are left out.
        if let Some(why) = suite.unable().filter(|_| args.selected.is_empty()) {
            report(&format!("{} is left out: {why}", suite.name));
            continue;
        }
        let progress = |at: Progress| show_progress(suite.name, at);
        let measured = suite.run(options, &cases, &progress);
        clear_progress();
        show(args, suite.name, suite.about, &measured?)?;
    }
    Ok(())
}

/// Names the processor, its number, and the kernel.
fn machine() -> String {
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = processors.lines().find_map(|line| line.strip_prefix("model name"));
    let model = model.map_or("unknown processor", |rest| rest.trim_start_matches([' ', '\t', ':']));
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{model}, {count} processors, Linux {}", kernel.trim())
}

/// Draws a progress line on a terminal: between runs only, since a thread that draws would be
/// measured, too.
fn show_progress(suite: &str, at: Progress) {
    if io::stderr().is_terminal() {
        let line = format!("{suite}: round {} of {}, {}", at.round, at.rounds, at.subject);
        // A terminal that cannot be written has no reader.
        let _ = write!(io::stderr(), "\r\x1b[K{line}");
    }
}

fn clear_progress() {
    if io::stderr().is_terminal() {
        let _ = write!(io::stderr(), "\r\x1b[K");
    }
}

/// Prints the records.
fn show(args: &Args, name: &str, about: &str, records: &[Record]) -> io::Result<()> {
    if args.json {
        let lines =
            records.iter().fold(String::new(), |text, record| text + &record.to_json() + "\n");
        return print(&lines);
    }
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write!(text, "\n{name}: {about}\n{}", Table(records));
    print(&text)
}

fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    let what = |error: io::Error| {
        io::Error::new(error.kind(), format!("standard output could not be written: {error}"))
    };
    written.map_err(what)
}

/// Prints one line on standard error. If that fails too, only the exit code remains.
pub(crate) fn report(line: &str) {
    let _ = writeln!(io::stderr(), "pinfold-bench: {line}");
}
