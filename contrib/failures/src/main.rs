//! `pinfold-failures`: published failures of DMA in user space, and what happens here.
//!
//! Each case does what led to the failure, on the software IOMMU and with memory of this machine,
//! and prints what it counted. `docs/failures.md` is the page about them; its output blocks are
//! written by this program (`--page`).

mod cases;
mod page;
mod pages;
mod report;

use cases::{CASES, Case};
use clap::Parser;
use report::Report;
use std::path::PathBuf;
use std::process::ExitCode;

/// Shows published failures of DMA in user space, and what happens here.
///
/// Exits with 1 if a promise did not hold.
#[derive(Parser)]
#[command(name = "pinfold-failures", version)]
struct Args {
    /// The cases to run; all without a name.
    #[arg(value_name = "CASE")]
    cases: Vec<String>,
    /// Prints the names and titles of the cases.
    #[arg(long)]
    list: bool,
    /// Prints one JSON object a case.
    #[arg(long)]
    json: bool,
    /// Replaces the output blocks of this page by what the cases print now.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "list"])]
    page: Option<PathBuf>,
}

fn chosen(names: &[String]) -> Result<Vec<&'static Case>, String> {
    if names.is_empty() {
        return Ok(CASES.iter().collect());
    }
    names
        .iter()
        .map(|name| {
            CASES
                .iter()
                .find(|case| case.name == name)
                .ok_or_else(|| format!("there is no case {name:?}: `--list` prints their names"))
        })
        .collect()
}

fn main() -> ExitCode {
    let args = Args::parse();
    let cases = match chosen(&args.cases) {
        Ok(cases) => cases,
        Err(error) => {
            eprintln!("pinfold-failures: {error}");
            return ExitCode::from(2);
        }
    };
    if args.list {
        cases.iter().for_each(|case| println!("{:<15} {}", case.name, case.title));
        return ExitCode::SUCCESS;
    }
    let reports: Vec<Report> = cases
        .into_iter()
        .map(|case| {
            let report = case.report();
            match args.json {
                true => println!("{}", report.json()),
                false => println!("{report}"),
            }
            report
        })
        .collect();
    if let Some(path) = &args.page
        && let Err(error) = page::update(path, &reports)
    {
        eprintln!("pinfold-failures: {}: {error}", path.display());
        return ExitCode::FAILURE;
    }
    ExitCode::from(u8::from(!reports.iter().all(Report::held)))
}
