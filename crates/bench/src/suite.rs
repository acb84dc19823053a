//! The suites: what is measured, and which subjects are compared.

pub mod buffer;
pub mod frame;
mod handle;
pub mod iommu;
pub(crate) mod longest;
mod machine;
pub mod page_pool;
pub mod pool;
pub mod receive;
mod reserved;
pub mod serve;
pub mod vfio;

use crate::error::BenchError;
use crate::harness::{Harness, Options, Turn};
use crate::record::Record;

/// A name, or several that differ in a size, and its meaning.
pub type Entry = (&'static str, &'static str);

/// A group of cases that are measured together.
#[derive(Clone, Copy)]
pub struct Suite {
    /// The name in records and on the command line.
    pub name: &'static str,
    /// What it measures, in one line.
    pub about: &'static str,
    /// Its cases, and what one operation of each is.
    pub cases: &'static [Entry],
    /// Its subjects, and what each is.
    pub subjects: &'static [Entry],
    run: fn(&Harness<'_>) -> Result<Vec<Record>, BenchError>,
    /// Returns why this machine cannot measure it, if so.
    unable: fn() -> Option<String>,
}

impl std::fmt::Debug for Suite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Suite").field("name", &self.name).finish_non_exhaustive()
    }
}

/// All suites.
pub const SUITES: &[Suite] = &[
    Suite {
        name: "pool",
        about: "DMA pools: the 373,959-block workload, pairs, bulk, two threads",
        cases: pool::CASES,
        subjects: pool::SUBJECTS,
        run: pool::run,
        unable: || None,
    },
    Suite {
        name: "frame",
        about: "page frames: pairs, bulk, 2 MiB runs, the refill of an RPC server",
        cases: frame::CASES,
        subjects: frame::SUBJECTS,
        run: frame::run,
        unable: || None,
    },
    Suite {
        name: "vfio",
        about: "mappings in the kernel's I/O page table: map and unmap by size and page size, beside an arena mapped as a whole",
        cases: vfio::CASES,
        subjects: vfio::SUBJECTS,
        run: vfio::run,
        unable: vfio::unable,
    },
    Suite {
        name: "page-pool",
        about: "pages that stay mapped: pairs by the consumer, the ring, the slow path, a receive path",
        cases: page_pool::CASES,
        subjects: page_pool::SUBJECTS,
        run: page_pool::run,
        unable: || None,
    },
    Suite {
        name: "buffer",
        about: "registered buffers: registering 1 GiB, locating an offset, gathering 8 MiB, submitting a read of 8 MiB",
        cases: buffer::CASES,
        subjects: buffer::SUBJECTS,
        run: buffer::run,
        unable: || None,
    },
    Suite {
        name: "iommu",
        about: "protection: request/response loops through every policy, addresses, tables, the life of a mapping",
        cases: iommu::CASES,
        subjects: iommu::SUBJECTS,
        run: iommu::run,
        unable: || None,
    },
    Suite {
        name: "receive",
        about: "packets from a real socket (AF_XDP on a veth pair), by where the pages of the fill ring come from",
        cases: receive::CASES,
        subjects: receive::SUBJECTS,
        run: receive::run,
        unable: || None,
    },
    Suite {
        name: "serve",
        about: "network block servers with one client: pinfold serve, nbdkit, qemu-nbd; random reads and writes, copies",
        cases: serve::CASES,
        subjects: serve::SUBJECTS,
        run: serve::run,
        unable: serve::unable,
    },
];

/// All suites with their cases and subjects explained, as `pinfold bench --list` prints them.
#[derive(Clone, Copy, Debug)]
pub struct Listing;

impl std::fmt::Display for Listing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, suite) in SUITES.iter().enumerate() {
            let gap = if index == 0 { "" } else { "\n" };
            writeln!(f, "{gap}{}: {}", suite.name, suite.about)?;
            for (heading, entries) in [("case", suite.cases), ("subject", suite.subjects)] {
                writeln!(f, "  {heading}")?;
                entries
                    .iter()
                    .try_for_each(|(name, about)| writeln!(f, "    {name:<36} {about}"))?;
            }
        }
        Ok(())
    }
}

impl Suite {
    /// Returns the suite of this name.
    pub fn named(name: &str) -> Option<Self> {
        SUITES.iter().find(|suite| suite.name == name).copied()
    }

    /// Returns why this machine cannot measure it, for instance because it has no suitable device.
    pub fn unable(&self) -> Option<String> {
        (self.unable)()
    }

    /// Measures the suite; `watch` is called before each run.
    ///
    /// # Errors
    /// The first failure of a subject or of its setup.
    pub fn run(&self, options: Options, watch: &dyn Fn(Turn)) -> Result<Vec<Record>, BenchError> {
        (self.run)(&Harness::new(self.name, options, watch))
    }
}

#[cfg(test)]
mod tests;
