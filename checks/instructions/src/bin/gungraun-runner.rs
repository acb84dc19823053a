//! The program that the benchmarks start to run themselves under valgrind. Built here, so that
//! Cargo.lock fixes its version and those of all that it uses.

use std::process::ExitCode;

fn main() -> ExitCode {
    match gungraun_runner::runner::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gungraun-runner: {error:?}");
            ExitCode::FAILURE
        }
    }
}
