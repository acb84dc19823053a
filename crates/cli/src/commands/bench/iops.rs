//! I/Os per second: Pinfold's driver beside the kernel's with fio, on one controller, which changes
//! its driver in turn.
//!
//! Random 4 KiB reads of the first namespace, 64 in flight; it is never written. Every run opens
//! the device again and measures from the first request to the last completion.

use crate::args::{IoArgs, Protect, Rw, StackArgs, TargetSpec};
use crate::commands::io;
use crate::engine::worker::EngineError;
use crate::failure::Failure;
use crate::kernel::{self, Fio};
use crate::output;
use crate::signal::Interrupt;
use crate::units::{ByteSize, TimeSpan};
use pinfold::pci::{Bdf, BindError, Binder};
use pinfold::probe::Facts;
use pinfold_bench::harness::{Samples, Subject};
use pinfold_bench::{Harness, Metric, Options, Record, Turn};
use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

/// What it measures.
pub(super) const ABOUT: &str = "I/Os per second, random 4 KiB reads, 64 in flight: the kernel's driver with fio (io_uring, O_DIRECT), Pinfold's";
/// The one case.
const CASE: &str = "randread-4k-64";
const BLOCK: u64 = 4096;
const DEPTH: u32 = 64;
/// How long a run lasts.
const RUN: Duration = Duration::from_secs(2);
const QUICK_RUN: Duration = Duration::from_secs(1);
/// The file through which the kernel probes a device's driver.
const PROBE: &str = "/sys/bus/pci/drivers_probe";

/// What the measurement needs.
pub(super) struct Requirements {
    bdf: Bdf,
    fio: Fio,
}

/// Returns what the measurement needs, or why it is impossible.
pub(super) fn requirements() -> Result<Requirements, String> {
    let fio = Fio::find().ok_or("no fio on PATH: sudo apt-get install fio")?;
    let bound = Facts::here().vfio.bound.into_iter().filter_map(|bound| bound.address.parse().ok());
    let bdf = bound.into_iter().find(|bdf| kernel::is_nvme(*bdf));
    let bdf = bdf.ok_or("no NVMe controller is bound to vfio-pci: sudo pinfold bind BDF")?;
    if !kernel::has_driver() {
        return Err("the kernel's driver is not loaded: sudo modprobe nvme".to_owned());
    }
    match rustix::fs::access(PROBE, rustix::fs::Access::WRITE_OK) {
        Ok(()) => Ok(Requirements { bdf, fio }),
        Err(_) => Err(format!("only root may rebind {bdf}: run it with sudo")),
    }
}

/// The controller, which is bound to vfio-pci again when this is dropped.
struct Controller {
    bdf: Bdf,
    binder: Binder,
    /// The kernel's first namespace: both drivers read the same.
    nsid: Cell<Option<u32>>,
}

impl Controller {
    /// Binds it to vfio-pci.
    fn bind_vfio(&self) -> Result<(), BindError> {
        self.binder.bind(self.bdf, false).map(drop)
    }

    /// Binds it to the kernel's driver and returns its disk once it exists.
    fn bind_kernel(&self) -> Result<PathBuf, Failure> {
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
        if let Err(error) = self.bind_vfio() {
            output::error(format_args!(
                "{} could not be bound to vfio-pci again: {error}",
                self.bdf
            ));
        }
    }
}

/// A subject of the comparison.
enum Driver {
    /// fio, with further options.
    Kernel(&'static [&'static str]),
    /// Pinfold.
    Pinfold { protect: Protect, poll: bool },
}

/// The kernel's first: the others are compared with it.
const SUBJECTS: [(&str, Driver); 6] = [
    ("fio", Driver::Kernel(&[])),
    ("fio-batched", Driver::Kernel(kernel::BATCHED)),
    ("pinfold-static", Driver::Pinfold { protect: Protect::Static, poll: false }),
    ("pinfold-polled", Driver::Pinfold { protect: Protect::Static, poll: true }),
    ("pinfold-revoke", Driver::Pinfold { protect: Protect::Revoke, poll: false }),
    ("pinfold-strict", Driver::Pinfold { protect: Protect::Strict, poll: false }),
];

/// Measures; `watch` is called before each run. From here on the signals that end a program are
/// caught.
pub(super) fn run(
    requirements: &Requirements,
    options: Options,
    watch: &dyn Fn(Turn),
) -> Result<Vec<Record>, Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let controller =
        Controller { bdf: requirements.bdf, binder: Binder::new(), nsid: Cell::new(None) };
    let runtime = if options.quick { QUICK_RUN } else { RUN };
    let subjects = SUBJECTS.iter().map(|(name, driver)| {
        let (controller, interrupt) = (&controller, &interrupt);
        Subject::new(name, move |out: &mut Samples| {
            let rate = match driver {
                Driver::Kernel(options) => {
                    let reads = |disk: PathBuf| {
                        Ok(requirements.fio.reads(&disk, (BLOCK, DEPTH), runtime, options)?)
                    };
                    let ran = controller.bind_kernel().and_then(reads);
                    // fio was ended by the same signal; its output is irrelevant then.
                    if interrupt.is_raised() {
                        return Err(EngineError::Interrupted.into());
                    }
                    ran?
                }
                Driver::Pinfold { protect, poll } => {
                    controller.bind_vfio()?;
                    let args = io_args(
                        (requirements.bdf, controller.nsid.get()),
                        runtime,
                        *protect,
                        *poll,
                    );
                    io::measure(&args, interrupt)?.read.map_or(0.0, |read| read.iops)
                }
            };
            out.figure(CASE, Metric::Rate, "IOPS", rate);
            Ok(())
        })
    });
    Harness::new("vfio", options, watch).interleave(subjects.collect())
}

/// Returns the arguments of `io`.
fn io_args(
    (bdf, nsid): (Bdf, Option<u32>),
    runtime: Duration,
    protect: Protect,
    poll: bool,
) -> IoArgs {
    IoArgs {
        rw: Rw::Randread,
        bs: ByteSize(BLOCK),
        iodepth: DEPTH.into(),
        poll,
        runtime: Some(TimeSpan(runtime)),
        time_based: true,
        stack: StackArgs { protect, ..StackArgs::default() },
        ..IoArgs::new(TargetSpec::Vfio { bdf, nsid })
    }
}
