//! Why a target could not be opened, and the numbers on the command line that it does not allow.

use super::stack::{MemoryError, StackError};
use crate::args::foreign::ENGINE;
use crate::args::target::SpecError;
use crate::output;
use crate::targets::nvme::QueueError;
use crate::units::ByteSize;
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
    /// Another program has locked the image.
    #[error(
        "{0} is in use: a program has locked it that writes it, or wants no other to (QEMU, or another `pinfold serve`; \
         lslocks shows it): end that first"
    )]
    InUse(String),
    /// A file that cannot be opened for writing where the file system is read-only.
    #[error(
        "{0} is on a read-only file system: use it for reading alone (serve -r, io --rw read), or name a copy elsewhere"
    )]
    ReadOnly(String),
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
    /// The targets and buffers of the run need more memory than is available.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The memory stack could not be set up.
    #[error(transparent)]
    Stack(#[from] StackError),
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
    #[error("{name}: {error}{}", output::limit(error.system()))]
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
    /// A queue of the controller could not be created.
    #[error("{name}: {error}")]
    Queue {
        /// The target.
        name: String,
        /// The error.
        error: QueueError,
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
    /// A unit would be taken from a machine that may have other uses.
    #[cfg(feature = "vtd")]
    #[error(
        "{0}: the program would take the IOMMU of this machine, behind which other devices then reach nothing: \
         --i-own-this-machine allows it (pinfold io --help); vfio: leaves it to the kernel"
    )]
    NotOwned(String),
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
        /// The number of requested jobs.
        jobs: usize,
        /// The number of queues of the controller.
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
        _ => output::files_or(error, ""),
    }
}

/// A number on the command line that the target does not allow.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum LimitError {
    /// `--bs 0`, `--bs 3`.
    #[error(
        "--bs {asked}: a request to {target} is a positive multiple of {block} bytes, its block"
    )]
    Block {
        /// The value.
        asked: u64,
        /// The target's block.
        block: usize,
        /// The target.
        target: String,
    },
    /// `--bs 1T`.
    #[error("--bs {asked}: one request to {target} moves at most {limit} bytes ({})", ByteSize(*.limit))]
    Transfer {
        /// The value.
        asked: u64,
        /// The target's largest request.
        limit: u64,
        /// The target.
        target: String,
    },
    /// `--iodepth 0`.
    #[error("--iodepth 0: at least one request must be in flight")]
    NoDepth,
    /// `--iodepth 1000000000`.
    #[error("--iodepth {asked}: {target} accepts at most {limit} requests in flight")]
    Depth {
        /// The value.
        asked: u64,
        /// The target's limit.
        limit: u64,
        /// The target.
        target: String,
    },
    /// `--size 100`: too small for one request.
    #[error(
        "--size {size}: the requests to {target} have {block} bytes (--bs), so it must be at least that"
    )]
    Region {
        /// The value, in bytes.
        size: u64,
        /// The size of a request.
        block: u64,
        /// The target.
        target: String,
    },
    /// `--bs 2M` on a smaller target.
    #[error(
        "--bs {block}: {target} has {available} bytes{}: lower --bs{}{}",
        after(*.offset),
        if *.is_bare { "; if it is a job file of fio's: " } else { "" },
        if *.is_bare { ENGINE } else { "" }
    )]
    LargeBlock {
        /// The value.
        block: u64,
        /// The target.
        target: String,
        /// The number of usable bytes.
        available: u64,
        /// The start of those bytes.
        offset: u64,
        /// Whether the target is the argument, where a job file's name could be.
        is_bare: bool,
    },
    /// A file without a byte.
    #[error(
        "{0} has 0 bytes, so there is nothing to read or to overwrite: name another file, or remove it and give the size of a \
         scratch file with --size"
    )]
    NoBytes(String),
    /// `--offset` at or beyond the end.
    #[error("--offset {given}: {target} has only {capacity} bytes: choose a lower offset")]
    OffsetBeyond {
        /// The value, in bytes or as a percentage.
        given: String,
        /// The target's capacity.
        capacity: u64,
        /// The target.
        target: String,
    },
    /// `--size` beyond the end that follows an offset.
    #[error(
        "--size {size}: {target} has {capacity} bytes, of which {available} follow {option} {offset}: lower one of both"
    )]
    BeyondOffset {
        /// The value, in bytes.
        size: u64,
        /// The target's capacity.
        capacity: u64,
        /// The number of bytes after the offset.
        available: u64,
        /// The option that the offset is from.
        option: &'static str,
        /// The offset.
        offset: u64,
        /// The target.
        target: String,
    },
    /// `--offset-increment` beyond the end.
    #[error(
        "--offset-increment {increment}: with --numjobs {jobs} the last job begins at byte {start}, and {target} has only \
         {capacity} bytes: lower one of both"
    )]
    IncrementBeyond {
        /// The value, in bytes.
        increment: u64,
        /// The number of jobs.
        jobs: u64,
        /// The start of the last one.
        start: u64,
        /// The target's capacity.
        capacity: u64,
        /// The target.
        target: String,
    },
    /// A percentage of a file that is created.
    #[error(
        "--{option} in per cent: {target} is created for the run, so it has no size yet: write bytes"
    )]
    ShareOfNothing {
        /// The option.
        option: &'static str,
        /// The target.
        target: String,
    },
    /// `--numjobs 100 --size 4k`.
    #[error(
        "--numjobs {jobs}: the part of {target} that is used has {blocks} requests, and each job needs at least one: lower \
         --numjobs or --bs"
    )]
    Jobs {
        /// The value.
        jobs: usize,
        /// The number of requests that fit.
        blocks: u64,
        /// The target.
        target: String,
    },
    /// A size beyond the target's.
    #[error("--size {size}: {target} has only {capacity} bytes")]
    Beyond {
        /// The value.
        size: u64,
        /// Its capacity.
        capacity: u64,
        /// The target.
        target: String,
    },
    /// `io NEW-FILE` or `io FOLDER` without a size.
    #[error(
        "{target} {state}: give the size of a scratch file with --size, or name a file that exists"
    )]
    SizeNeeded {
        /// The target.
        target: String,
        /// The state of the target.
        state: &'static str,
    },
    /// A source that holds only zeroes.
    #[error("{0} as a source holds only zeroes: name a file or an image")]
    EmptySource(String),
    /// `--offset 1`.
    #[error("--{option} {offset}: {target} is used in blocks of {block} bytes: write a multiple")]
    Offset {
        /// The option.
        option: &'static str,
        /// The value.
        offset: u64,
        /// The size of a block.
        block: u64,
        /// The target.
        target: String,
    },
}

fn after(offset: u64) -> String {
    if offset > 0 { format!(" after --offset {offset}") } else { String::new() }
}
