//! I/Os per second: Pinfold's driver beside the kernel's with fio, on one controller, which changes
//! its driver in turn.
//!
//! Random 4 KiB reads of the first namespace, 64 in flight; it is never written. Every run opens
//! the device again and measures from the first request to the last completion.

use super::kernel::{self, Fio, KernelError};
use crate::error::BenchError;
use crate::harness::{Harness, Samples, Subject};
use crate::record::{Metric, Record};
use pinfold::pci::{Bdf, BindError, Binder};
use pinfold::probe::Facts;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::cell::Cell;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The one case.
pub(super) const CASE: &str = "randread-4k-64";
const BLOCK: u64 = 4096;
const DEPTH: u32 = 64;
/// The length of a run.
const RUN: Duration = Duration::from_secs(2);
const QUICK_RUN: Duration = Duration::from_secs(1);
/// The file through which the kernel probes a device's driver.
const PROBE: &str = "/sys/bus/pci/drivers_probe";

/// The requirements of the measurement.
pub(super) struct Requirements {
    bdf: Bdf,
    fio: Fio,
    /// The program `pinfold`.
    pinfold: PathBuf,
}

/// Returns the requirements of the measurement, or why it is impossible.
pub(super) fn requirements() -> Result<Requirements, String> {
    let fio = Fio::find().ok_or("no fio on PATH: sudo apt-get install fio")?;
    let pinfold =
        crate::suite::find_program("pinfold").ok_or("no program pinfold beside this one")?;
    let bound = Facts::here().vfio.bound.into_iter().filter_map(|bound| bound.address.parse().ok());
    let bdf = bound.into_iter().find(|bdf| kernel::is_nvme(*bdf));
    let bdf = bdf.ok_or("no NVMe controller is bound to vfio-pci: sudo pinfold bind BDF")?;
    if !kernel::has_driver() {
        return Err("the kernel's driver is not loaded: sudo modprobe nvme".to_owned());
    }
    match rustix::fs::access(PROBE, rustix::fs::Access::WRITE_OK) {
        Ok(()) => Ok(Requirements { bdf, fio, pinfold }),
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
    fn bind_kernel(&self) -> Result<PathBuf, BenchError> {
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
            crate::report(&format!("{} could not be bound to vfio-pci again: {error}", self.bdf));
        }
    }
}

/// A subject of the comparison.
enum Driver {
    /// fio, with further options.
    Kernel(&'static [&'static str]),
    /// `pinfold io`, with further options.
    Pinfold(&'static [&'static str]),
}

/// The kernel's first: the others are compared with it.
const SUBJECTS: [(&str, Driver); 6] = [
    ("fio", Driver::Kernel(&[])),
    ("fio-batched", Driver::Kernel(kernel::BATCHED)),
    ("static", Driver::Pinfold(&["--protect", "static"])),
    ("static-polled", Driver::Pinfold(&["--protect", "static", "--poll"])),
    ("batch", Driver::Pinfold(&["--protect", "batch"])),
    ("strict", Driver::Pinfold(&["--protect", "strict"])),
];

/// Measures. From here on the signals that end a program are caught, and end the measurement
/// before the next run.
pub(super) fn run(
    requirements: &Requirements,
    harness: &Harness<'_>,
) -> Result<Vec<Record>, BenchError> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&interrupted))
            .map_err(BenchError::Signals)?;
    }
    let controller =
        Controller { bdf: requirements.bdf, binder: Binder::new(), nsid: Cell::new(None) };
    let runtime = if harness.options().quick { QUICK_RUN } else { RUN };
    let subjects = SUBJECTS.iter().map(|(name, driver)| {
        let (controller, interrupted) = (&controller, &interrupted);
        Subject::new(name, move |out: &mut Samples| {
            let rate = match driver {
                Driver::Kernel(options) => controller.bind_kernel().and_then(|disk| {
                    Ok(requirements.fio.reads(&disk, (BLOCK, DEPTH), runtime, options)?)
                }),
                Driver::Pinfold(options) => controller
                    .bind_vfio()
                    .map_err(BenchError::from)
                    .and_then(|()| Ok(reads(requirements, controller, runtime, options)?)),
            };
            // A client was ended by the same signal; its output is irrelevant then.
            if interrupted.load(Ordering::Relaxed) {
                return Err(BenchError::Interrupted);
            }
            out.figure(CASE, Metric::Rate, "IOPS", rate?);
            Ok(())
        })
    });
    harness.interleave(subjects.collect())
}

/// Returns the IOPS of `pinfold io` on the controller.
fn reads(
    requirements: &Requirements,
    controller: &Controller,
    runtime: Duration,
    options: &[&str],
) -> Result<f64, KernelError> {
    let namespace = controller.nsid.get().map(|nsid| format!("/{nsid}")).unwrap_or_default();
    let mut command = Command::new(&requirements.pinfold);
    command
        .arg("io")
        .arg(format!("vfio:{}{namespace}", controller.bdf))
        .args(["--rw", "randread", "--time-based", "--json"])
        .args([format!("--bs={BLOCK}"), format!("--iodepth={DEPTH}")])
        .arg(format!("--runtime={}", runtime.as_secs()))
        .args(options)
        .stdin(Stdio::null());
    kernel::rate_of(&requirements.pinfold, &mut command, "/read/iops")
}
