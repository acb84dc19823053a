//! The clients: fio's nbd engine, and nbdcopy.

use super::process::Server;
use crate::error::BenchError;
use crate::suite::program::{self, Data};
use std::process::Command;
use std::time::Duration;

/// The direction in which data moves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Direction {
    Read,
    Write,
}

/// A workload.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fio {
    pub(super) direction: Direction,
    /// Bytes of a request.
    pub(super) block: u64,
    /// Requests in flight.
    pub(super) depth: usize,
    pub(super) duration: Duration,
}

/// The report of fio.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Outcome {
    pub(super) requests: f64,
    pub(super) requests_per_s: f64,
    pub(super) bytes_per_s: f64,
    pub(super) p99: Duration,
}

impl Fio {
    /// Runs fio against a server.
    pub(super) fn run(&self, server: &Server) -> Result<Outcome, BenchError> {
        let rw = if self.direction == Direction::Read { "randread" } else { "randwrite" };
        let mut command = Command::new("fio");
        command.args(["--name=serve", "--ioengine=nbd", "--time_based", "--output-format=json"]);
        command.args([
            format!("--rw={rw}"),
            format!("--bs={}", self.block),
            format!("--iodepth={}", self.depth),
        ]);
        command.args([
            format!("--runtime={}ms", self.duration.as_millis()),
            format!("--uri={}", server.uri()),
        ]);
        let (out, ..) = program::run(&mut command)?;
        parse(&out, self.direction).ok_or_else(|| BenchError::Client {
            client: "fio".to_owned(),
            reason: format!(
                "its answer has no figures: {}",
                out.lines().next().unwrap_or_default()
            ),
        })
    }
}

/// Copies as much as there is data with nbdcopy: from the server to nowhere, or `source` to the
/// server.
pub(super) fn copy(direction: Direction, source: &Data, server: &Server) -> Result<(), BenchError> {
    let uri = server.uri();
    let mut command = Command::new("nbdcopy");
    match direction {
        Direction::Read => command.arg(uri).arg("null:"),
        Direction::Write => command.arg(source.path()).arg(uri),
    };
    program::run(&mut command).map(drop)
}

/// Finds the figures in fio's JSON, which notes may precede.
fn parse(out: &str, direction: Direction) -> Option<Outcome> {
    let object = program::json(out)?;
    let side = if direction == Direction::Read { "read" } else { "write" };
    let job = object.pointer("/jobs/0")?.get(side)?;
    let figure =
        |name| job.pointer(name)?.as_f64().filter(|figure| figure.is_finite() && *figure > 0.0);
    Some(Outcome {
        requests: figure("/total_ios")?,
        requests_per_s: figure("/iops")?,
        bytes_per_s: figure("/bw_bytes")?,
        p99: Duration::try_from_secs_f64(figure("/clat_ns/percentile/99.000000")? / 1e9).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_found_after_fios_notes_and_only_complete_ones() {
        let job = r#"{"total_ios": 10, "iops": 5.5, "bw_bytes": 22528, "clat_ns": {"percentile": {"99.000000": 2000}}}"#;
        let out = format!("fio: a note\n{{\"jobs\": [{{\"read\": {job}}}]}}");
        let expected = Outcome {
            requests: 10.0,
            requests_per_s: 5.5,
            bytes_per_s: 22_528.0,
            p99: Duration::from_micros(2),
        };
        assert_eq!(parse(&out, Direction::Read), Some(expected));
        assert_eq!(parse(&out, Direction::Write), None);
        for wrong in
            ["", "{}", "{\"jobs\": []}", &out.replace("5.5", "0"), &out.replace("2000", "-1")]
        {
            assert_eq!(parse(wrong, Direction::Read), None, "{wrong}");
        }
    }
}
