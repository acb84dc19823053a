//! The suite `protect`: the cost of protection on the main path, with each `--protect` in turn:
//! `pinfold io` on a model controller, and the copy of `make run`.
//!
//! A flush and its wait are modelled at 1 us. With `batch` and `revoke` one job has as many buffers
//! more as its depth, for those that wait for their flush; the controller has as many requests as
//! the depth at most with each. A copy is timed from the start of the program to its end.

use super::Entry;
use super::program::{self, Data};
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Harness, Samples, Subject};
use crate::record::{Metric, Record};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The cases.
pub(super) const CASES: &[Entry] = &[
    ("randread-4k-1-1-jobs", "random reads of 4 KiB, 1 in flight, on the model controller"),
    ("randread-4k-2-1-jobs", "the same with 2 in flight"),
    ("randread-4k-4-1-jobs", "the same with 4 in flight"),
    ("randread-4k-8-1-jobs", "the same with 8 in flight"),
    ("randread-4k-16-1-jobs", "the same with 16 in flight"),
    ("randread-4k-64-1-jobs", "the same with 64 in flight"),
    ("randread-4k-64-4-jobs", "the same by four jobs with a queue each"),
    ("copy", "a file of random bytes through the model controller into a second file"),
];

/// The subjects: the words of `--protect`.
pub(super) const SUBJECTS: &[Entry] = &[
    ("strict", "a flush that the job waits for; what completes together shares it"),
    ("revoke", "a flush for each request; the job goes on"),
    ("batch", "a flush for what completes together; the job goes on"),
    ("static", "mapped once, never flushed"),
];

/// Case, depth, jobs, and the subjects that are measured.
const JOBS: [(&str, u32, u32, &[&str]); 7] = [
    ("randread-4k-1-1-jobs", 1, 1, &["strict", "batch", "static"]),
    ("randread-4k-2-1-jobs", 2, 1, &["strict", "batch", "static"]),
    ("randread-4k-4-1-jobs", 4, 1, &["strict", "batch", "static"]),
    ("randread-4k-8-1-jobs", 8, 1, &["strict", "batch", "static"]),
    ("randread-4k-16-1-jobs", 16, 1, &["strict", "batch", "static"]),
    ("randread-4k-64-1-jobs", 64, 1, &["strict", "revoke", "batch", "static"]),
    ("randread-4k-64-4-jobs", 64, 4, &["batch", "static"]),
];
const COPY: &str = "copy";
/// The size of the file that is copied, MiB.
const MIB: usize = 256;
/// The length of a run of `io`.
const RUN: Duration = Duration::from_secs(2);
const QUICK_RUN: Duration = Duration::from_millis(200);
/// The most runs: they take seconds.
const MOST_RUNS: usize = 5;

/// Returns why this machine cannot measure the suite, if so.
pub(super) fn unable() -> Option<String> {
    program::own().err().map(|error| error.to_string())
}

/// Measures the suite.
///
/// # Errors
/// [`BenchError::NoPrograms`] without the program `pinfold`, or its failure.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    let own = program::own()?;
    let quick = harness.options().quick;
    let harness = match quick {
        true => harness.once(),
        false => harness.with_runs(harness.options().runs.min(MOST_RUNS)),
    };
    let duration = if quick { QUICK_RUN } else { RUN };
    let mut records = Vec::new();
    for (case, depth, jobs, protects) in JOBS.into_iter().filter(|(case, ..)| harness.wants(case)) {
        let subjects = protects.iter().map(|&protect| {
            let own = &own;
            Subject::new(protect, move |out: &mut Samples| {
                let rate = reads(own, depth, jobs, protect, duration)?;
                out.modelled(case, Metric::Rate, "IOPS", rate);
                Ok::<_, BenchError>(())
            })
        });
        records.extend(harness.interleave(subjects.collect())?);
    }
    if harness.wants(COPY) {
        let data = Data::create(&program::on_disk(), harness.scale(MIB) << 20)?;
        let subjects = SUBJECTS.iter().map(|&(protect, _)| {
            let (own, data) = (&own, &data);
            Subject::new(protect, move |out: &mut Samples| {
                let rate = copied(own, data, protect)?;
                out.modelled(COPY, Metric::Rate, "MiB/s", rate);
                Ok::<_, BenchError>(())
            })
        });
        records.extend(harness.interleave(subjects.collect())?);
    }
    Ok(records)
}

/// Returns the IOPS of `pinfold io`.
fn reads(
    own: &Path,
    depth: u32,
    jobs: u32,
    protect: &str,
    duration: Duration,
) -> Result<f64, BenchError> {
    let mut command = Command::new(own);
    command.args(["io", "soft:512M", "--rw", "randread", "--bs", "4k"]);
    command.args(["--time-based", "--json", "--protect", protect]);
    command.args([format!("--iodepth={depth}"), format!("--numjobs={jobs}")]);
    command.arg(format!("--runtime={}ms", duration.as_millis()));
    let (text, ..) = program::run(&mut command)?;
    program::figure("pinfold", &text, "/read/iops")
}

/// A copy that is removed when this is dropped.
struct Copied(PathBuf);

impl Drop for Copied {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Returns the MiB per second of a copy, which is compared.
fn copied(own: &Path, data: &Data, protect: &str) -> Result<f64, BenchError> {
    let copy = Copied(data.path().with_extension("copy"));
    let mut command = Command::new(own);
    // The controller must hold the file.
    let via = format!("soft:{}M", 512.max(data.bytes() >> 20));
    command.arg("copy").arg(data.path()).arg(&copy.0);
    command.args(["--quiet", "--via", &via, "--protect", protect]);
    // Writes back the data of the previous run, so that this does not happen during the next one.
    rustix::fs::sync();
    let began = Instant::now();
    program::run(&mut command)?;
    let elapsed = began.elapsed();
    if !same(data.path(), &copy.0).map_err(BenchError::Scratch)? {
        return Err(BenchError::Client {
            client: "pinfold".to_owned(),
            reason: format!("copy --protect {protect}: the copy differs"),
        });
    }
    #[expect(clippy::cast_precision_loss, reason = "far less than 2^52 bytes")]
    let mib = data.bytes() as f64 / f64::from(1 << 20);
    Ok(mib / elapsed.as_secs_f64())
}

/// Returns whether two files have the same contents.
fn same(a: &Path, b: &Path) -> std::io::Result<bool> {
    let (mut a, mut b) = (File::open(a)?, File::open(b)?);
    if a.metadata()?.len() != b.metadata()?.len() {
        return Ok(false);
    }
    let (mut left, mut right) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    loop {
        let len = a.read(&mut left)?;
        let (Some(left), Some(right)) = (left.get(..len), right.get_mut(..len)) else {
            return Ok(false);
        };
        b.read_exact(right)?;
        if left != right {
            return Ok(false);
        }
        if len == 0 {
            return Ok(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_that_differs_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let bytes = vec![7; (1 << 20) + 5];
        std::fs::write(path("a"), &bytes).unwrap();
        for (name, change, is_same) in
            [("b", None, true), ("c", Some((1 << 20) + 4), false), ("d", Some(0), false)]
        {
            let mut other = bytes.clone();
            if let Some(at) = change {
                other[at] = 8;
            }
            std::fs::write(path(name), other).unwrap();
            assert_eq!(same(&path("a"), &path(name)).unwrap(), is_same, "{name}");
        }
        std::fs::write(path("short"), &bytes[1..]).unwrap();
        assert!(!same(&path("a"), &path("short")).unwrap());
    }
}
