//! Requests a second: Pinfold's driver beside the kernel's with fio, on one controller, which goes from the one to the
//! other and back.
//!
//! It reads 4 KiB anywhere on the first namespace, 64 at a time, and never writes. Every run opens the device anew and
//! takes its figure from the first request to the last completion.

use super::kernel::{self, Fio};
use crate::args::{IoArgs, Memory, Protect, Rw, StackArgs};
use crate::failure::Failure;
use crate::io;
use crate::signal::Interrupt;
use crate::targets::spec::TargetSpec;
use crate::units::{ByteSize, TimeSpan};
use pinfold::pci::{Bdf, BindError, Binder};
use pinfold::probe::Facts;
use pinfold_bench::harness::{Samples, Subject};
use pinfold_bench::{Harness, Metric, Options, Record, Turn};
use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

/// What it measures.
pub(super) const ABOUT: &str = "requests a second, 4 KiB read anywhere, 64 at a time: the kernel's driver with fio (io_uring, O_DIRECT), Pinfold's";
/// The one case.
const CASE: &str = "randread-4k-64";
const BLOCK: u64 = 4096;
const DEPTH: u32 = 64;
/// How long a run is.
const RUN: Duration = Duration::from_secs(2);
const QUICK_RUN: Duration = Duration::from_secs(1);
/// What the kernel has to write to hand a device over.
const PROBE: &str = "/sys/bus/pci/drivers_probe";

/// What is needed to measure it.
pub(super) struct Able {
    bdf: Bdf,
    fio: Fio,
}

/// What is needed, or why it can not be measured here.
pub(super) fn able() -> Result<Able, String> {
    let fio = Fio::find().ok_or("no fio on PATH: sudo apt-get install fio")?;
    let bound = Facts::here().vfio.bound.into_iter().filter_map(|bound| bound.address.parse().ok());
    let bdf = bound.into_iter().find(|bdf| kernel::is_nvme(*bdf));
    let bdf = bdf.ok_or("no NVMe controller is bound to VFIO: `sudo pinfold bind BDF` gives it one")?;
    if !kernel::has_driver() {
        return Err("the kernel's driver is not there: sudo modprobe nvme".to_owned());
    }
    match rustix::fs::access(PROBE, rustix::fs::Access::WRITE_OK) {
        Ok(()) => Ok(Able { bdf, fio }),
        Err(_) => Err(format!("only root may give {bdf} to the kernel's driver and back: try it with sudo")),
    }
}

/// The controller, which is VFIO's again when this is dropped.
struct Controller {
    bdf: Bdf,
    binder: Binder,
    /// The namespace that the kernel names first: both drivers read the same.
    nsid: Cell<Option<u32>>,
}

impl Controller {
    /// Gives it to VFIO, if that has not got it.
    fn take(&self) -> Result<(), BindError> {
        self.binder.bind(self.bdf, false).map(drop)
    }

    /// Gives it to the kernel, if that has not got it; returns its disk once it is there.
    fn give(&self) -> Result<PathBuf, Failure> {
        match self.binder.unbind(self.bdf) {
            Ok(_) | Err(BindError::NotBound { driver: Some(_), .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let disk = kernel::disk(self.bdf)?;
        self.nsid.set(Some(disk.nsid));
        Ok(disk.node)
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        if let Err(error) = self.take() {
            crate::output::error(format_args!("{} is not VFIO's again: {error}", self.bdf));
        }
    }
}

/// Whose turn it is: fio's words, or Pinfold's.
enum Who {
    Kernel(&'static [&'static str]),
    Pinfold(Protect, bool),
}

/// The kernel's first: the figures of the others are compared with those of the first.
const SUBJECTS: [(&str, Who); 6] = [
    ("fio", Who::Kernel(&[])),
    ("fio-batched", Who::Kernel(kernel::BATCHED)),
    ("pinfold-static", Who::Pinfold(Protect::Static, false)),
    ("pinfold-polled", Who::Pinfold(Protect::Static, true)),
    ("pinfold-revoke", Who::Pinfold(Protect::Revoke, false)),
    ("pinfold-strict", Who::Pinfold(Protect::Strict, false)),
];

/// Measures it; `watch` is told of each run before it is made. From here on the signals that end a program are caught.
pub(super) fn run(able: &Able, options: Options, watch: &dyn Fn(Turn)) -> Result<Vec<Record>, Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let controller = Controller { bdf: able.bdf, binder: Binder::new(), nsid: Cell::new(None) };
    let runtime = if options.quick { QUICK_RUN } else { RUN };
    let subjects = SUBJECTS.iter().map(|(name, who)| {
        let (controller, interrupt) = (&controller, &interrupt);
        Subject::new(name, move |out: &mut Samples| {
            let rate = match who {
                Who::Kernel(words) => {
                    let reads = |disk: PathBuf| Ok(able.fio.reads(&disk, (BLOCK, DEPTH), runtime, words)?);
                    let ran = controller.give().and_then(reads);
                    // It was ended by the same signal; what it says then is of no interest.
                    if interrupt.asked() {
                        return Err(crate::copy::error::PumpError::Interrupted.into());
                    }
                    ran?
                }
                Who::Pinfold(protect, poll) => {
                    controller.take()?;
                    let args = words((able.bdf, controller.nsid.get()), runtime, *protect, *poll);
                    io::measure(&args, interrupt)?.read.map_or(0.0, |read| read.iops)
                }
            };
            out.figure(CASE, Metric::Rate, "IOPS", rate);
            Ok(())
        })
    });
    Harness::new("vfio", options, watch).interleave(subjects.collect())
}

/// What `pinfold io` is told.
fn words((bdf, nsid): (Bdf, Option<u32>), runtime: Duration, protect: Protect, poll: bool) -> IoArgs {
    IoArgs {
        target: TargetSpec::Vfio { bdf, nsid },
        rw: Rw::Randread,
        bs: ByteSize(BLOCK),
        iodepth: DEPTH.into(),
        size: None,
        numjobs: 1,
        poll,
        runtime: Some(TimeSpan(runtime)),
        time_based: true,
        rwmixread: 50,
        verify: false,
        bsrange: None,
        number_ios: None,
        force: false,
        stack: StackArgs { protect, memory: Memory::Auto },
        json: false,
    }
}
