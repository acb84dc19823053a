//! The suite `io`: `pinfold io` and fio on the same file with the same options: random reads with 64
//! in flight, O_DIRECT, io_uring.
//!
//! fio runs with plain options (`fio`) and with what makes it faster (`fio-tuned`): requests
//! submitted and reaped 32 at a time, the file registered, plain reads for vectored ones, and the
//! file opened with O_NONBLOCK as Pinfold does, so that the kernel does not pass a request that
//! would wait to a worker. fio has no option for that: a preloaded library sets the flag, where there
//! is a C compiler. All have registered buffers, and none keeps a map of the blocks it has read. The
//! buffers of all are reserved hugepages if there are enough, else pages of 4 KiB.
//!
//! Processor time is that of the whole process, from its start to its end, kernel workers included.

use super::Entry;
use super::program::{self, Data};
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Harness, Samples, Subject};
use crate::record::{Metric, Record};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The cases.
pub(super) const CASES: &[Entry] = &[
    ("randread-8m-disk", "random reads of 8 MiB of a file on a disk: bandwidth, CPU time"),
    ("randread-4k-disk", "the same of 4 KiB"),
    ("randread-8m-tmpfs", "random reads of 8 MiB of a file in memory"),
    ("randread-4k-tmpfs", "the same of 4 KiB"),
];

/// The subjects.
pub(super) const SUBJECTS: &[Entry] = &[
    ("pinfold", "pinfold io"),
    ("fio", "fio with its defaults, and registered buffers"),
    ("fio-tuned", "fio with batches of 32, the file registered, O_NONBLOCK"),
];

/// Case, whether its file is in memory, the size of a request.
const READS: [(&str, bool, &str); 4] = [
    ("randread-8m-disk", false, "8M"),
    ("randread-4k-disk", false, "4k"),
    ("randread-8m-tmpfs", true, "8M"),
    ("randread-4k-tmpfs", true, "4k"),
];
/// The programs besides Pinfold's, and their packages.
const PROGRAMS: [(&str, &str); 1] = [("fio", "fio")];
const DEPTH: u32 = 64;
/// The data, MiB, and the least of it, in a quick run: as many requests of 8 MiB as are in flight.
const MIB: usize = 1 << 10;
const LEAST_MIB: usize = 512;
/// The hugepages of 2 MiB for 64 requests of 8 MiB, and some more.
const HUGEPAGES: u64 = 272;
/// The length of a run.
const RUN: Duration = Duration::from_secs(2);
const QUICK_RUN: Duration = Duration::from_secs(1);
/// The most runs: they take seconds.
const MOST_RUNS: usize = 6;

/// Returns why this machine cannot measure the suite, if so.
pub(super) fn unable() -> Option<String> {
    program::missing(&PROGRAMS).map(|error| error.to_string())
}

/// Measures the suite.
///
/// # Errors
/// [`BenchError::NoPrograms`] where a program is not installed, or the failure of one.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    if let Some(error) = program::missing(&PROGRAMS) {
        return Err(error);
    }
    let quick = harness.options().quick;
    let harness = match quick {
        true => harness.once(),
        false => harness.with_runs(harness.options().runs.min(MOST_RUNS)),
    };
    let duration = if quick { QUICK_RUN } else { RUN };
    let bytes = harness.scale(MIB).max(LEAST_MIB) << 20;
    let (own, huge) = (program::own()?, has_hugepages());
    let _thp = (!huge).then(WithoutThp::new);
    let preload = Preload::build();
    let mut records = Vec::new();
    for in_memory in [false, true] {
        let wanted: Vec<_> = READS
            .into_iter()
            .filter(|(case, memory, _)| *memory == in_memory && harness.wants(case))
            .collect();
        if wanted.is_empty() {
            continue;
        }
        let folder = if in_memory { program::in_memory() } else { program::on_disk() };
        let data = Data::create(&folder, bytes)?;
        for (case, _, block) in wanted {
            let job = Job { case, block, data: &data, duration, huge };
            let subjects = vec![
                Subject::new("pinfold", |out: &mut Samples| job.pinfold(out, &own)),
                Subject::new("fio", |out: &mut Samples| job.fio(out, None)),
                Subject::new("fio-tuned", |out: &mut Samples| job.fio(out, Some(&preload))),
            ];
            records.extend(harness.interleave(subjects)?);
        }
    }
    Ok(records)
}

fn has_hugepages() -> bool {
    let free = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    let free = std::fs::read_to_string(free).ok().and_then(|text| text.trim().parse::<u64>().ok());
    free.is_some_and(|free| free >= HUGEPAGES)
}

/// This process, and the programs that it starts, without transparent hugepages.
struct WithoutThp;

impl WithoutThp {
    fn new() -> Self {
        // Without the call, small pages may be large ones: for all subjects.
        let _ = rustix::thread::disable_transparent_huge_pages(true);
        Self
    }
}

impl Drop for WithoutThp {
    fn drop(&mut self) {
        let _ = rustix::thread::disable_transparent_huge_pages(false);
    }
}

/// One case.
struct Job<'d> {
    case: &'static str,
    block: &'static str,
    data: &'d Data,
    duration: Duration,
    huge: bool,
}

impl Job<'_> {
    fn pinfold(&self, out: &mut Samples, own: &PathBuf) -> Result<(), BenchError> {
        let mut command = Command::new(own);
        command.arg("io").arg(self.data.path());
        command.args(["--rw", "randread", "--time-based", "--json", "--bs", self.block]);
        command.arg(format!("--iodepth={DEPTH}"));
        command.arg(format!("--runtime={}ms", self.duration.as_millis()));
        command.args(["--memory", if self.huge { "hugetlb-2m" } else { "plain" }]);
        let members = ["/read/iops", "/read/bytes_per_second", "/read/requests"];
        self.measure(out, "pinfold", command, members)
    }

    fn fio(&self, out: &mut Samples, tuned: Option<&Preload>) -> Result<(), BenchError> {
        let mut command = Command::new("fio");
        let mut filename = std::ffi::OsString::from("--filename=");
        filename.push(self.data.path());
        command.args(["--name=beside", "--readonly", "--rw=randread", "--ioengine=io_uring"]);
        command.args(["--direct=1", "--norandommap", "--fixedbufs", "--numjobs=1", "--time_based"]);
        command.args(["--output-format=json", &format!("--bs={}", self.block)]);
        command.arg(format!("--iodepth={DEPTH}"));
        command.arg(format!("--runtime={}ms", self.duration.as_millis()));
        command.arg(filename);
        match self.huge {
            true => command.args(["--mem=shmhuge", "--hugepage-size=2M"]),
            false => command.arg("--mem=malloc"),
        };
        if let Some(preload) = tuned {
            command.args(["--iodepth_batch_submit=32", "--iodepth_batch_complete_max=32"]);
            command.args(["--registerfiles=1", "--nonvectored=1"]);
            if let Some(library) = &preload.library {
                command.env("LD_PRELOAD", library).env("NONBLOCK_FILE", self.data.path());
            }
        }
        let members = ["/jobs/0/read/iops", "/jobs/0/read/bw_bytes", "/jobs/0/read/total_ios"];
        self.measure(out, "fio", command, members)
    }

    /// Runs a command, and records the figures of its JSON: I/Os and bytes per second, requests.
    fn measure(
        &self,
        out: &mut Samples,
        name: &str,
        mut command: Command,
        members: [&str; 3],
    ) -> Result<(), BenchError> {
        let (text, user, system) = program::run(&mut command)?;
        let [iops, bandwidth, requests] = members.map(|at| program::figure(name, &text, at));
        let (iops, bandwidth, requests) = (iops?, bandwidth?, requests?);
        let each = |time: Duration| time.as_secs_f64() * 1e6 / requests;
        let mut figure = |metric, unit, value| out.figure(self.case, metric, unit, value);
        figure(Metric::Rate, "MB/s", bandwidth / 1e6);
        figure(Metric::Rate, "IOPS", iops);
        figure(Metric::Count, "us user/request", each(user));
        figure(Metric::Count, "us system/request", each(system));
        figure(Metric::Count, "us CPU/request", each(user + system));
        Ok(())
    }
}

/// The library that opens the file with O_NONBLOCK, if it could be built.
struct Preload {
    library: Option<PathBuf>,
    source: PathBuf,
}

impl Preload {
    fn build() -> Self {
        let source = program::unique(&std::env::temp_dir(), "c");
        let library = source.with_extension("so");
        let written = std::fs::write(&source, include_str!("io/nonblock.c"));
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).arg("-ldl");
        let is_built = written.is_ok() && program::run(&mut cc).is_ok();
        Self { library: is_built.then_some(library), source }
    }
}

impl Drop for Preload {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.source);
        let _ = std::fs::remove_file(self.source.with_extension("so"));
    }
}
