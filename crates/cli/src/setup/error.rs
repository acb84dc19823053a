//! Why a target could not be opened.

use super::stack::MemoryError;
use crate::args::target::SpecError;
use pinfold::arena::BuildError;
use pinfold::pci::Bdf;
use pinfold::uring::FileError;
use pinfold_core::domain::BackendError;
use pinfold_nvme::driver::{self, Unusable};
use pinfold_nvme::vfio::PciError;
use pinfold_nvme_model::ModelError;
use std::io;

/// Why a target could not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    /// A system call failed.
    #[error("{name}: {error}{}", hint(error))]
    System {
        /// The target.
        name: String,
        /// The system's error.
        error: io::Error,
    },
    /// A folder, a pipe, a character device.
    #[error("{0} is not a regular file: name a file or an image, or a block device without soft:")]
    NotRegular(String),
    /// A file of /proc or of a cgroup.
    #[error(
        "{name} has a length of {bytes} bytes and holds more: it does not tell its length, as files in /proc; read it into \
         another file first (`cat`), and name that"
    )]
    NoLength {
        /// The target.
        name: String,
        /// Its length.
        bytes: u64,
    },
    /// An image that is not a whole number of blocks.
    #[error(
        "{name} has {bytes} bytes, and an image of a controller's blocks must be a multiple of {block}, and not empty: name it as a \
         file, without soft:{}", if *.block == 512 { "" } else { ", or leave block= out" }
    )]
    ImageSize {
        /// The target.
        name: String,
        /// Its length.
        bytes: u64,
        /// The controller's block.
        block: u32,
    },
    /// The target's data would be overwritten.
    #[error("{0} holds data that would be overwritten: name another target, or use --force")]
    HoldsData(String),
    /// A file that would be created for the run exists.
    #[error(
        "{0} exists, and this file is created for the run and has no name during it: name one that does not exist"
    )]
    ScratchExists(String),
    /// A file that would be created among devices.
    #[error(
        "{name} does not exist, and no file is created under {folder}: check the name (lsblk lists the block devices), or \
         name a path elsewhere for a scratch file"
    )]
    AmongDevices {
        /// The file.
        name: String,
        /// The folder of devices.
        folder: &'static str,
    },
    /// A folder for a scratch file that does not exist.
    #[error("{0} is no folder that exists: check the path, or make the folder first")]
    NoFolder(String),
    /// A symbolic link to nothing.
    #[error(
        "{0} is a symbolic link to what does not exist: check its target, or name a path for a scratch file"
    )]
    Dangling(String),
    /// The words that name the target do not.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The third target is the source.
    #[error(
        "{0} is the source itself, which a copy through it would overwrite: name another target"
    )]
    ViaIsSource(String),
    /// The target would hold more than the available memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A model controller with too much memory.
    #[error("{name}: a controller with memory has at most {limit} bytes (1 TiB): use an image")]
    TooLarge {
        /// The target.
        name: String,
        /// The limit.
        limit: u64,
    },
    /// The file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The model controller could not be started.
    #[error("{name}: {error}")]
    Model {
        /// The target.
        name: String,
        /// The error.
        error: ModelError,
    },
    /// The driver could not start the controller.
    #[error("{name}: {error}")]
    Driver {
        /// The target.
        name: String,
        /// The error.
        error: driver::Error,
    },
    /// The controller has no usable namespace.
    #[error("{0}: the controller has no usable namespace; pinfold nvme lists all with the reasons")]
    NoNamespace(String),
    /// A real controller could not be opened.
    #[error("{name}: {error}")]
    Pci {
        /// The target.
        name: String,
        /// The error.
        error: PciError,
    },
    /// No memory for the admin queue of a real controller.
    #[error("{name}: no DMA memory to start it: {error}")]
    Rings {
        /// The target.
        name: String,
        /// The error.
        error: BuildError,
    },
    /// No I/O address space.
    #[error("no I/O address space: {0}")]
    Domain(BackendError),
    /// Two controllers that cannot share an address space.
    #[error(
        "{first} and {other} are in different address spaces: in one run a real controller is the only controller"
    )]
    Mixed {
        /// The real one.
        first: String,
        /// The other one.
        other: String,
    },
    /// A file where a controller is required.
    #[error("{0} is not a controller: name one as vfio:BDF, soft:SIZE or soft:IMAGE")]
    NoController(String),
    /// A device file of the kernel's driver.
    #[error(
        "{name} is the kernel's device file of controller {bdf}: bind it with `sudo pinfold bind {bdf}` (the kernel's driver \
         leaves it, and its disks disappear), then `pinfold nvme {bdf}`"
    )]
    KernelController {
        /// The path.
        name: String,
        /// The controller.
        bdf: Bdf,
    },
    /// An NVMe device that is not a PCI device, or whose controller is not shown.
    #[error(
        "{0} is an NVMe device, but of no PCI controller that the kernel shows: only those can be bound and driven"
    )]
    NotPci(String),
    /// A device file that does not exist.
    #[error(
        "{name}: {error}; a controller that is bound to vfio-pci has no device file: name it by its address, which \
         `lspci -d ::0108` lists"
    )]
    NoDeviceFile {
        /// The path.
        name: String,
        /// The system's error.
        error: io::Error,
    },
    /// The named namespace cannot be used.
    #[error("{name}: namespace {nsid} cannot be used: {reason}; pinfold nvme lists all")]
    NoSuchNamespace {
        /// The target.
        name: String,
        /// Its identifier.
        nsid: u32,
        /// The reason.
        reason: Unusable,
    },
    /// An option of `io` that the target does not support.
    #[error("--{option}{}{value}: {reason}", if value.is_empty() { "" } else { " " })]
    Unsupported {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
        /// The reason, and the alternative.
        reason: String,
    },
    /// More jobs than queues.
    #[error(
        "{name}: --{option} {jobs} needs as many queues, and the controller grants {granted}: lower it"
    )]
    Queues {
        /// The target.
        name: String,
        /// The option.
        option: &'static str,
        /// How many were requested.
        jobs: usize,
        /// How many the controller has.
        granted: u16,
    },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => ": check the path",
        // Root passes every mode.
        io::ErrorKind::PermissionDenied if rustix::process::geteuid().is_root() => {
            ": although this is root; look at its attributes (lsattr), the control group of devices, or a security module"
        }
        io::ErrorKind::PermissionDenied => ": check its permissions",
        io::ErrorKind::ResourceBusy => {
            ": it is in use: unmount it, or name another (lsblk shows the user)"
        }
        io::ErrorKind::ReadOnlyFilesystem => ": name a path on another file system",
        _ => "",
    }
}
