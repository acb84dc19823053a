//! The cases.

mod double_free;
mod early_memory;
mod entry_limit;
mod failed_map;
mod list_memory;
mod ring_border;
mod stale_mapping;

use crate::report::Report;
use std::error::Error;

/// A published failure.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// The failure, in one line.
    pub(crate) title: &'static str,
    /// Where it was published.
    pub(crate) issues: &'static [&'static str],
    run: fn(&mut Report) -> Result<(), Box<dyn Error>>,
}

impl Case {
    /// Runs the case. An error that it did not expect is a promise that did not hold.
    pub(crate) fn report(&'static self) -> Report {
        let mut report = Report::new(self);
        if let Err(error) = (self.run)(&mut report) {
            report.said("failed", error);
            report.promise("every step was possible", false);
        }
        report
    }
}

/// All cases, in the order of the page.
pub(crate) const CASES: &[Case] = &[
    Case {
        name: "stale_mapping",
        title: "after a part was unmapped, the device writes to pages that the program gave back",
        issues: &["https://github.com/spdk/spdk/issues/1705"],
        run: stale_mapping::run,
    },
    Case {
        name: "entry_limit",
        title: "an I/O address space has 65,535 entries, and one for each page is too many",
        issues: &[
            "https://github.com/spdk/spdk/issues/915",
            "https://github.com/spdk/spdk/issues/1142",
        ],
        run: entry_limit::run,
    },
    Case {
        name: "list_memory",
        title: "each queue pair sets megabytes aside for PRP lists",
        issues: &["https://github.com/xnvme/xnvme/issues/642"],
        run: list_memory::run,
    },
    Case {
        name: "ring_border",
        title: "a transfer crosses the border of two registered buffers, 1 GiB each at most",
        issues: &[
            "https://github.com/LMCache/LMCache/issues/4100",
            "https://github.com/anza-xyz/agave/pull/9790",
        ],
        run: ring_border::run,
    },
    Case {
        name: "early_memory",
        title: "memory is registered before the device is open",
        issues: &["https://github.com/chimera-nas/libevpl/pull/86"],
        run: early_memory::run,
    },
    Case {
        name: "failed_map",
        title: "a map fails, a line is logged, and the call reports success",
        issues: &["https://github.com/spdk/spdk/issues/3772"],
        run: failed_map::run,
    },
    Case {
        name: "double_free",
        title: "a block is freed twice, and a release build does not notice",
        issues: &["https://github.com/spdk/spdk/issues/3826"],
        run: double_free::run,
    },
];

/// A device's writes, a page each: how many arrived and how many faulted.
#[derive(Default)]
struct Writes {
    arrived: u64,
    faulted: u64,
}

impl Writes {
    /// Has the device write `value` to each page of the range.
    fn fill(&mut self, device: &pinfold::soft::Port, range: pinfold::IovaRange, value: u8) {
        let page = [value; PAGE];
        for number in 0..range.len() / PAGE as u64 {
            let at = range.start().checked_add(number * PAGE as u64);
            match at.map(|at| device.write(at, &page)) {
                Some(Ok(())) => self.arrived += 1,
                _ => self.faulted += 1,
            }
        }
    }
}

const PAGE: usize = 4096;
