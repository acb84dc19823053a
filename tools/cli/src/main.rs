//! The `pinfold` program. A module imports only from those below it:
//!
//! | module | contents |
//! | --- | --- |
//! | [`commands`], [`failure`] | the commands; why one failed |
//! | [`report`] | what a run did, as text and as JSON |
//! | [`setup`], [`engine`] | from names to open targets and their memory; the engines that keep requests in flight |
//! | [`server`] | the network block server, from sockets to targets |
//! | [`packets`] | the threads that receive packets |
//! | [`targets`] | what bytes are read from and written to |
//! | [`args`] | the command line and the man page |
//! | [`units`], [`histogram`], [`random`], [`output`], [`signal`], [`progress`] | the basis of all |
// With the feature `vtd`, `setup::owned` opens a device unsafely.
#![cfg_attr(not(feature = "vtd"), forbid(unsafe_code))]
#![cfg_attr(feature = "vtd", deny(unsafe_code))]
// They panic if the stream cannot be written: `output` prints.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod args;
mod commands;
mod engine;
mod failure;
mod histogram;
mod output;
mod packets;
mod progress;
mod random;

mod report;
mod server;
mod setup;
mod signal;
mod targets;
mod units;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use commands::{check, copy, io, machine, receive, replay, serve};
use failure::{Exit, Failure};
use std::process::ExitCode;
use tracing_subscriber::filter::LevelFilter;

fn main() -> ExitCode {
    // Before there are threads.
    if rustix::process::getrlimit(rustix::process::Resource::As).current.is_some() {
        pinfold::probe::share_one_heap();
    }
    let ended = signal::survive_file_limit().map_err(Failure::Signals).and_then(|()| parse());
    ended.unwrap_or_else(|failure| {
        output::error(failure.line());
        failure.exit().into()
    })
}

/// Executes the command line; returns the exit code.
fn parse() -> Result<ExitCode, Failure> {
    match Cli::try_parse().map_err(args::foreign::with_alternative) {
        Ok(cli) => {
            init_log(cli.verbose);
            match cli.command {
                // Its exit code is the program's, or says that there are findings.
                Command::Check(args) => check::run(&args),
                command => run(command).map(|()| ExitCode::SUCCESS),
            }
        }
        Err(message) => output::clap(&message)
            .map(|()| if message.use_stderr() { Exit::Usage.into() } else { ExitCode::SUCCESS })
            .map_err(Failure::from),
    }
}

/// Runs a command.
fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Copy(args) => copy::run(&args),
        Command::Io(args) => io::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Check(args) => check::run(&args).map(drop),
        Command::Doctor(args) => machine::doctor(args),
        Command::Nvme(args) => machine::nvme(&args),
        Command::Pools(args) => machine::pools(args),
        Command::Replay(args) => replay::run(&args),
        Command::Receive(args) => receive::run(&args),
        Command::Bind(args) => machine::bind(&args),
        Command::Unbind(args) => machine::unbind(&args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "pinfold", &mut script);
            Ok(output::bytes(&script)?)
        }
        Command::Man { command } => {
            let page = args::man_page(Cli::command(), command.as_deref());
            Ok(output::bytes(&page.map_err(output::OutputError::Write)?)?)
        }
    }
}

/// Logs the libraries' messages on standard error: warnings always, more on request.
fn init_log(verbose: u8) {
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
