//! Errors of binding and unbinding.

use crate::pci::bdf::Bdf;
use crate::pci::in_use::InUse;
use crate::pci::lookup::NoDevice;
use crate::sys::{Errno, kernel};
use std::fmt;
use std::path::PathBuf;

/// Why a device was not bound to VFIO, or not returned to its driver. Nothing has changed, except
/// where the error's [`Rollback`] says so.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// There is no such device.
    #[error(transparent)]
    NoDevice(#[from] NoDevice),
    /// The kernel module `vfio-pci` is not loaded.
    #[error("the driver vfio-pci is not loaded: {}", kernel::load("vfio-pci"))]
    NoDriver,
    /// No IOMMU translates the device's accesses.
    #[error(
        "{0} is in no IOMMU group: switch the IOMMU on in the firmware and on the kernel's command line \
         (`pinfold doctor` says what is missing)"
    )]
    NoIommu(Bdf),
    /// The device is in use.
    #[error("{bdf} is in use: {}; stop using it first, or pass --force", list(.uses))]
    InUse {
        /// The device.
        bdf: Bdf,
        /// What uses it.
        uses: Vec<InUse>,
    },
    /// A program has the device open through VFIO; an unbind would block until it closes it.
    #[error("{bdf} is open in a program ({node}): end it first; `sudo fuser -v {node}` names it")]
    Busy {
        /// The device.
        bdf: Bdf,
        /// The device node that is open.
        node: String,
    },
    /// The caller is not root.
    #[error("cannot write {}: permission denied; {}", path.display(), as_root())]
    Denied {
        /// The file.
        path: PathBuf,
    },
    /// A write to a file of the kernel failed.
    #[error("cannot write {}: {errno}; {rollback}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        errno: Errno,
        /// The state it left.
        rollback: Rollback,
    },
    /// The driver did not accept the device.
    #[error("{wanted} did not accept {bdf} (`dmesg | tail` says why); {rollback}")]
    DriverRefused {
        /// The device.
        bdf: Bdf,
        /// The driver.
        wanted: String,
        /// The state it left.
        rollback: Rollback,
    },
    /// The previous driver could not be recorded.
    #[error("cannot record the previous driver in {}: {errno}; nothing was changed", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The system's error.
        errno: Errno,
    },
    /// The device is not bound to VFIO.
    #[error("{bdf} is not bound to VFIO, but to {}", driver.as_deref().unwrap_or("no driver"))]
    NotBound {
        /// The device.
        bdf: Bdf,
        /// Its driver.
        driver: Option<String>,
    },
}

/// The state after a failed bind or unbind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rollback {
    /// As before.
    Complete,
    /// The previous driver did not accept the device again: it has none, or another.
    Incomplete(Bdf),
}

impl fmt::Display for Rollback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Complete => f.write_str("everything is as it was"),
            Self::Incomplete(bdf) => write!(
                f,
                "and the previous driver did not accept the device again: `echo {bdf} | sudo tee \
                 /sys/bus/pci/drivers_probe` offers it once more"
            ),
        }
    }
}

fn as_root() -> &'static str {
    if rustix::process::geteuid().is_root() {
        "although this is root: look at a user namespace, or a security module"
    } else {
        "run it as root (sudo)"
    }
}

fn list(uses: &[InUse]) -> String {
    uses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
