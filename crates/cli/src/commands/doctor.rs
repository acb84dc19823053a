//! `doctor`: what this machine supports, what is missing, and the command that fixes it.

use crate::args::DoctorArgs;
use crate::failure::Failure;
use crate::output;
use pinfold::probe::{Facts, Finding, State};
use serde::Serialize;
use std::fmt::Write;

#[derive(Serialize)]
struct Report {
    findings: Vec<Line>,
}

#[derive(Serialize)]
struct Line {
    what: String,
    state: &'static str,
    detail: String,
    fix: Option<String>,
}

impl From<Finding> for Line {
    fn from(finding: Finding) -> Self {
        let Finding { what, state, detail, remedy } = finding;
        Self { what, state: state.name(), detail, fix: remedy }
    }
}

/// Examines the machine and prints the findings.
pub(crate) fn run(args: DoctorArgs) -> Result<(), Failure> {
    let findings: Vec<Finding> = Facts::here().findings();
    if args.json {
        let report = Report { findings: findings.into_iter().map(Line::from).collect() };
        return Ok(output::json(&report)?);
    }
    Ok(output::text(&to_text(&findings))?)
}

fn to_text(findings: &[Finding]) -> String {
    let mut out = String::new();
    let width = findings.iter().map(|finding| finding.what.chars().count()).max().unwrap_or(0);
    for Finding { what, state, detail, remedy } in findings {
        // Writing to a `String` does not fail.
        let _ = writeln!(out, "{:<8} {what:<width$}  {detail}", state.name());
        if let Some(remedy) = remedy {
            let _ = writeln!(out, "{:<8} {:<width$}  fix: {remedy}", "", "");
        }
    }
    let fixes = findings.iter().filter(|finding| finding.remedy.is_some()).count();
    let missing = findings.iter().filter(|finding| finding.state != State::Good).count();
    let _ = match missing {
        0 => writeln!(out, "\nnothing is missing"),
        _ => writeln!(out, "\n{missing} limited or missing, {fixes} with a fix"),
    };
    out
}
