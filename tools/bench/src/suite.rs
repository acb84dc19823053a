//! The suites: the measurements, and the subjects that are compared.

mod buffer;
mod frame;
mod handle;
mod io;
mod iommu;
mod page_pool;
mod pool;
mod program;
mod protect;
mod receive;
mod serve;
mod testpmd;
mod vfio;

pub(crate) use vfio::KernelError;

use crate::error::BenchError;
use crate::harness::{Harness, Options, Progress};
use crate::record::Record;
use std::path::PathBuf;

/// A name and its meaning.
pub(crate) type Entry = (&'static str, &'static str);

/// A group of cases that are measured together.
#[derive(Clone, Copy)]
pub(crate) struct Suite {
    /// The name in records and on the command line.
    pub(crate) name: &'static str,
    /// The measurement, in one line.
    pub(crate) about: &'static str,
    /// Its cases, and what one operation of each is.
    cases: &'static [Entry],
    /// Its subjects, and what each is.
    subjects: &'static [Entry],
    run: fn(&Harness<'_>) -> Result<Vec<Record>, BenchError>,
    /// Returns why this machine cannot measure it, if so.
    unable: fn() -> Option<String>,
}

/// All suites.
const SUITES: &[Suite] = &[
    Suite {
        name: "pool",
        about: "DMA pools: pairs, queues, blocks at random, bulk, two threads",
        cases: pool::CASES,
        subjects: pool::SUBJECTS,
        run: pool::run,
        unable: || None,
    },
    Suite {
        name: "frame",
        about: "page frames: bulk, runs of 2 MiB, frees at random, the refill of an RPC server",
        cases: frame::CASES,
        subjects: frame::SUBJECTS,
        run: frame::run,
        unable: || None,
    },
    Suite {
        name: "page-pool",
        about: "pages that stay mapped: the consumer, the ring for other threads, a receive path",
        cases: page_pool::CASES,
        subjects: page_pool::SUBJECTS,
        run: page_pool::run,
        unable: || None,
    },
    Suite {
        name: "buffer",
        about: "registered buffers: register 1 GiB, gather 8 MiB, submit a read of 8 MiB",
        cases: buffer::CASES,
        subjects: buffer::SUBJECTS,
        run: buffer::run,
        unable: || None,
    },
    Suite {
        name: "iommu",
        about: "protection: what a driver pays for a transaction under every policy, map and revoke",
        cases: iommu::CASES,
        subjects: iommu::SUBJECTS,
        run: iommu::run,
        unable: || None,
    },
    Suite {
        name: "receive",
        about: "packets from a real socket (AF_XDP on a veth pair), by where their pages come from",
        cases: receive::CASES,
        subjects: receive::SUBJECTS,
        run: receive::run,
        unable: || None,
    },
    Suite {
        name: "serve",
        about: "network block servers with one client: pinfold serve, nbdkit, qemu-nbd",
        cases: serve::CASES,
        subjects: serve::SUBJECTS,
        run: serve::run,
        unable: serve::unable,
    },
    Suite {
        name: "protect",
        about: "the program under each --protect: pinfold io on a model controller, and a copy",
        cases: protect::CASES,
        subjects: protect::SUBJECTS,
        run: protect::run,
        unable: protect::unable,
    },
    Suite {
        name: "io",
        about: "pinfold io and fio on the same file: bandwidth, requests/s, CPU time",
        cases: io::CASES,
        subjects: io::SUBJECTS,
        run: io::run,
        unable: io::unable,
    },
    Suite {
        name: "testpmd",
        about: "pinfold receive and DPDK's testpmd on the same interface",
        cases: testpmd::CASES,
        subjects: testpmd::SUBJECTS,
        run: testpmd::run,
        unable: testpmd::unable,
    },
    Suite {
        name: "vfio",
        about: "mappings in the kernel's I/O page table, and the kernel's NVMe driver",
        cases: vfio::CASES,
        subjects: vfio::SUBJECTS,
        run: vfio::run,
        unable: vfio::unable,
    },
];

/// All suites with their cases and subjects explained, as `--list` prints them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Listing;

impl std::fmt::Display for Listing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, suite) in SUITES.iter().enumerate() {
            let gap = if index == 0 { "" } else { "\n" };
            writeln!(f, "{gap}{}: {}", suite.name, suite.about)?;
            for (heading, entries) in [("case", suite.cases), ("subject", suite.subjects)] {
                writeln!(f, "  {heading}")?;
                entries
                    .iter()
                    .try_for_each(|(name, about)| writeln!(f, "    {name:<16} {about}"))?;
            }
        }
        Ok(())
    }
}

impl Suite {
    /// Returns why this machine cannot measure it, for instance because it has no suitable device.
    pub(crate) fn unable(&self) -> Option<String> {
        (self.unable)()
    }

    /// Measures these cases of the suite, or all of it if none is named. Calls `progress` before
    /// each run.
    ///
    /// # Errors
    /// The first failure of a subject or of its setup.
    pub(crate) fn run(
        &self,
        options: Options,
        cases: &[&'static str],
        progress: &dyn Fn(Progress),
    ) -> Result<Vec<Record>, BenchError> {
        let harness = Harness::new(self.name, options, cases, progress);
        let mut records = (self.run)(&harness)?;
        // Cases that are measured by one run come together.
        records.retain(|record| harness.wants(record.case));
        Ok(records)
    }
}

/// A suite or one of its cases, as named on the command line.
#[derive(Clone, Copy)]
pub(crate) struct Selection {
    suite: &'static Suite,
    case: Option<&'static str>,
}

impl std::fmt::Debug for Selection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Selection")
            .field("suite", &self.suite.name)
            .field("case", &self.case)
            .finish()
    }
}

impl Selection {
    /// Parses `SUITE` or `SUITE/CASE`.
    ///
    /// # Errors
    /// The names that exist, if this one does not.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (suite, case) = text.split_once('/').map_or((text, None), |(s, c)| (s, Some(c)));
        let names = |entries: &mut dyn Iterator<Item = &'static str>| {
            entries.collect::<Vec<_>>().join(", ")
        };
        let Some(suite) = SUITES.iter().find(|known| known.name == suite) else {
            return Err(format!("the suites are {}", names(&mut SUITES.iter().map(|s| s.name))));
        };
        let Some(case) = case else { return Ok(Self { suite, case: None }) };
        match suite.cases.iter().find(|(known, _)| *known == case) {
            Some((case, _)) => Ok(Self { suite, case: Some(case) }),
            None => {
                let known = names(&mut suite.cases.iter().map(|(name, _)| *name));
                Err(format!("the cases of {} are {known}", suite.name))
            }
        }
    }

    /// Returns the suites that are selected, each once, with the cases that are selected of each:
    /// all suites if there is no selection, all cases of a suite that is named without one.
    pub(crate) fn suites(
        selected: &[Self],
    ) -> impl Iterator<Item = (&'static Suite, Vec<&'static str>)> {
        SUITES.iter().filter_map(move |suite| {
            let mut named = selected.iter().filter(|one| one.suite.name == suite.name).peekable();
            if named.peek().is_none() && !selected.is_empty() {
                return None;
            }
            let cases: Option<Vec<_>> = named.map(|one| one.case).collect();
            Some((suite, cases.unwrap_or_default()))
        })
    }
}

/// Returns how much memory can be allocated without swapping, if the kernel reports it.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// Returns a program: beside this one, else the first on PATH.
fn find_program(name: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let mut all =
        folder_of_this().into_iter().chain(std::env::split_paths(&folders)).map(|at| at.join(name));
    all.find(|path| rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok())
}

fn folder_of_this() -> Option<PathBuf> {
    std::env::current_exe().ok()?.parent().map(PathBuf::from)
}

#[cfg(test)]
mod tests;
