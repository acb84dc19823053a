//! The `pinfold` program.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`args`], [`units`], [`limits`], [`man`] | the command line, how sizes are written, what numbers may be, the page |
//! | [`copy`], [`io`], [`doctor`], [`nvme`], [`pools`], [`mod@bench`], [`bind`] | the commands |
//! | [`open`], [`stack`], [`memory`], [`fixes`] | from names to targets; the memory stack of a run, what it needs, what gets it more |
//! | [`target`], [`lane`] | what bytes are read from and written to; the requests in flight at one, and their times |
//! | [`account`], [`latency`], [`output`] | what a run did, as text and as JSON |
//! | [`signal`], [`progress`], [`failure`] | stopping, showing, and saying what went wrong |
#![forbid(unsafe_code)]
// They panic where the stream cannot be written: `output` prints.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod account;
mod args;
mod bench;
mod bind;
mod copy;
mod doctor;
mod failure;
mod fixes;
mod io;
mod lane;
mod latency;
mod limits;
mod man;
mod memory;
mod nvme;
mod open;
mod output;
mod pools;
mod progress;
mod signal;
mod stack;
mod targets;
mod units;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use failure::{Exit, Failure};
use std::process::ExitCode;
use tracing_subscriber::filter::LevelFilter;

fn main() -> ExitCode {
    let done = match Cli::try_parse() {
        Ok(cli) => {
            log(cli.verbose);
            run(cli.command).map(|()| ExitCode::SUCCESS)
        }
        Err(message) => output::clap(&message)
            .map(|()| if message.use_stderr() { Exit::Usage.into() } else { ExitCode::SUCCESS }),
    };
    done.unwrap_or_else(|failure| {
        output::error(failure.line());
        failure.exit().into()
    })
}

fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Copy(args) => copy::run(&args),
        Command::Io(args) => io::run(&args),
        Command::Doctor(args) => doctor::run(args),
        Command::Nvme(args) => nvme::run(&args),
        Command::Pools(args) => pools::run(args),
        Command::Bench(args) => bench::run(&args),
        Command::Bind(args) => bind::bind(&args),
        Command::Unbind(args) => bind::unbind(&args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "pinfold", &mut script);
            output::bytes(&script)
        }
        Command::Man => output::bytes(&man::page(Cli::command()).map_err(Failure::Output)?),
    }
}

/// What the floors below have to say goes to standard error: warnings always, more if asked.
fn log(verbose: u8) {
    let level = match verbose {
        0 => LevelFilter::WARN,
        1 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        // It would report a standard error that cannot be written there, and panic.
        .log_internal_errors(false)
        .with_target(false)
        .without_time()
        .init();
}
