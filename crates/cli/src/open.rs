//! From what a user named to targets that can be read and written, with all that may be wrong about it.

mod device;
mod place;
mod scratch;

pub(crate) use device::Device;
pub(crate) use place::{BLOCK, ControllerMedium, Medium, Place, domain_of};
pub(crate) use scratch::scratch;

use crate::account::{DeviceReport, PoolReport};
use crate::memory::MemoryError;
use crate::stack::Stack;
use crate::targets::Target;
use crate::targets::file::FileTarget;
use crate::targets::nvme::NvmeTarget;
use pinfold::arena::BuildError;
use pinfold::uring::FileError;
use pinfold::{Arena, Buffer};
use pinfold_core::domain::BackendError;
use pinfold_nvme::Registers;
use pinfold_nvme::driver::Unusable;
use pinfold_nvme::vfio::PciError;
use pinfold_nvme_model::ModelError;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Why a target could not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    /// The system refused.
    #[error("{name}: {error}{}", hint(error))]
    System {
        /// Which.
        name: String,
        /// What it said.
        error: io::Error,
    },
    /// A folder, a pipe, a device that is none of blocks.
    #[error("{0} is not a regular file: name a file or an image, or a block device without soft:")]
    NotRegular(String),
    /// An image that is no whole number of blocks.
    #[error(
        "{name} has {bytes} bytes, which is no multiple of 512 and at least one: it is no image of a controller's \
         blocks; name it as a file, without soft:"
    )]
    ImageSize {
        /// Which.
        name: String,
        /// How many bytes it has.
        bytes: u64,
    },
    /// It would be written over.
    #[error("{0} holds data that would be written over: name another target, or say --force")]
    HoldsData(String),
    /// It would be made, and removed at the end.
    #[error(
        "{0} exists, and a file given with --via is made for the run and has no name during it: name one that does not exist"
    )]
    ScratchExists(String),
    /// The third target is the source.
    #[error("{0} is the source itself: going by way of it would write over it; name another target")]
    ViaIsSource(String),
    /// It would hold more than there is memory for.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A model controller on memory is at most so large.
    #[error("{name}: a controller on memory has at most {limit} bytes (1 TiB)")]
    TooLarge {
        /// Which.
        name: String,
        /// How many bytes it may have.
        limit: u64,
    },
    /// The file can not be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// There is no model controller.
    #[error("{name}: {error}")]
    Model {
        /// Which.
        name: String,
        /// Why not.
        error: ModelError,
    },
    /// The driver could not start the controller.
    #[error("{name}: {error}")]
    Driver {
        /// Which.
        name: String,
        /// Why not.
        error: pinfold_nvme::driver::Error,
    },
    /// A controller without a namespace.
    #[error("{0}: the controller has no namespace that can be used")]
    NoNamespace(String),
    /// A real controller is not to be had.
    #[error("{name}: {error}")]
    Pci {
        /// Which.
        name: String,
        /// Why not.
        error: PciError,
    },
    /// No memory to ask a real controller what it is.
    #[error("{name}: no DMA memory to start it: {error}")]
    Rings {
        /// Which.
        name: String,
        /// Why not.
        error: BuildError,
    },
    /// No I/O address space.
    #[error("no I/O address space: {0}")]
    Domain(BackendError),
    /// Two controllers that are not in one address space.
    #[error(
        "{first} and {other} are in different address spaces: in one run a real controller is the only controller"
    )]
    Mixed {
        /// The real one.
        first: String,
        /// The other one.
        other: String,
    },
    /// A file where a controller is asked for.
    #[error("{0} is no controller: name one as vfio:BDF, soft:SIZE or soft:IMAGE")]
    NoController(String),
    /// A namespace that it does not have.
    #[error("{name}: namespace {nsid} cannot be used: {reason}; pinfold nvme lists all")]
    NoSuchNamespace {
        /// Which.
        name: String,
        /// Which namespace was named.
        nsid: u32,
        /// Why it cannot be used.
        reason: Unusable,
    },
    /// More jobs than queues.
    #[error("{name}: --numjobs {jobs} needs as many queues, and the controller grants {granted}")]
    Queues {
        /// Which.
        name: String,
        /// How many were asked for.
        jobs: usize,
        /// How many there are.
        granted: u16,
    },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => ": check the path",
        io::ErrorKind::PermissionDenied => ": check who may read and write it",
        io::ErrorKind::ResourceBusy => ": it is in use: unmount it, or name another (lsblk shows who has it)",
        io::ErrorKind::ReadOnlyFilesystem => ": choose a place on another file system",
        _ => "",
    }
}

/// How a target is used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    /// Requests are multiples of so many bytes.
    pub(crate) block: usize,
    /// How many requests of a job are in flight at a time.
    pub(crate) depth: usize,
    /// How many jobs there are, each with a queue of its own; at least one.
    pub(crate) jobs: usize,
    /// Whether waits stay awake where they could sleep until an interrupt.
    pub(crate) poll: bool,
}

/// The queues of all jobs.
struct Jobs<T> {
    first: T,
    rest: Vec<T>,
}

impl<T> Jobs<T> {
    fn new<E>(count: usize, mut make: impl FnMut(usize) -> Result<T, E>) -> Result<Self, E> {
        let first = make(0)?;
        let rest = (1..count).map(make).collect::<Result<_, _>>()?;
        Ok(Self { first, rest })
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        std::iter::once(&self.first).chain(&self.rest)
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        std::iter::once(&mut self.first).chain(&mut self.rest)
    }
}

type Namespaced<'d> = NvmeTarget<'d, Buffer, Arc<dyn Registers>, Arena>;

/// A target that has been opened, with a queue for each job.
pub(crate) struct Opened<'d> {
    queues: Queues<'d>,
    notes: Vec<String>,
}

enum Queues<'d> {
    /// Of a file.
    File(Box<Jobs<FileTarget<'d, Buffer>>>),
    /// Of a controller.
    Nvme {
        /// Dropped first, so that the controller is disabled before what it runs on goes.
        jobs: Box<Jobs<Namespaced<'d>>>,
        _device: Device,
    },
}

impl<'d> Opened<'d> {
    /// Opens `place` for use with the buffers of `stack`.
    pub(crate) fn open(place: Place, stack: &'d Stack, how: Use) -> Result<Self, OpenError> {
        let name = place.name.clone();
        let device = match place.medium {
            Medium::File(file) => return Self::file(&name, &file, &place.path, stack, how),
            Medium::Controller(medium) => Device::open(&name, medium, stack, how)?,
        };
        let driver_error = |error| OpenError::Driver { name: name.clone(), error };
        let (controller, namespace) = device.start(&name, stack, how)?;
        let granted = controller.identify().queues;
        if how.jobs > usize::from(granted) {
            return Err(OpenError::Queues { name, jobs: how.jobs, granted });
        }
        let mut notes = Vec::new();
        if !how.poll && !device.has_interrupts(how.jobs) {
            notes.push(format!("{name}: it has no interrupt for each job, so completions are polled for"));
        }
        let jobs = Jobs::new(how.jobs, |job| {
            let vector = device.vector(job, how);
            let domain = (&*stack.domain, stack.protect);
            let controller = (controller.clone(), namespace);
            NvmeTarget::new(name.clone(), domain, controller, how.depth, vector).map_err(driver_error)
        })?;
        Ok(Self { queues: Queues::Nvme { jobs: Box::new(jobs), _device: device }, notes })
    }

    fn file(
        name: &str,
        file: &File,
        path: &Path,
        stack: &'d Stack,
        Use { block, depth, jobs: count, poll }: Use,
    ) -> Result<Self, OpenError> {
        // The queue of a job that has a thread of its own goes there.
        let one_thread = count == 1;
        let jobs = Jobs::new(count, |_| {
            let file = file.try_clone();
            let file = file.map_err(|error| OpenError::System { name: name.to_owned(), error })?;
            FileTarget::new(file, path, (block, depth), stack.fixed(), (one_thread, poll))
                .map_err(OpenError::File)
        })?;
        let notes = jobs.first.notes().collect();
        Ok(Self { queues: Queues::File(Box::new(jobs)), notes })
    }

    /// The target, by the first job's queue.
    pub(crate) fn target(&mut self) -> &mut dyn Target<Buffer> {
        match &mut self.queues {
            Queues::File(jobs) => &mut jobs.first,
            Queues::Nvme { jobs, .. } => &mut jobs.first,
        }
    }

    /// The target, by the queue of each job.
    pub(crate) fn targets(&mut self) -> Vec<&mut (dyn Target<Buffer> + Send)> {
        match &mut self.queues {
            Queues::File(jobs) => {
                jobs.iter_mut().map(|t| -> &mut (dyn Target<Buffer> + Send) { t }).collect()
            }
            Queues::Nvme { jobs, .. } => {
                jobs.iter_mut().map(|t| -> &mut (dyn Target<Buffer> + Send) { t }).collect()
            }
        }
    }

    /// What the controller did, where there is one.
    pub(crate) fn device_report(&self) -> Option<DeviceReport> {
        let Queues::Nvme { jobs, .. } = &self.queues else { return None };
        let mut account = jobs.first.account();
        for job in jobs.iter().skip(1) {
            account.add(&job.account());
        }
        Some(account)
    }

    /// The pools of its driver.
    pub(crate) fn pool_reports(&self) -> Vec<PoolReport> {
        match &self.queues {
            Queues::File(_) => Vec::new(),
            Queues::Nvme { jobs, .. } => jobs.first.pools(),
        }
    }

    /// What fell back to something slower, and why.
    pub(crate) fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    /// How much the program must be allowed to lock, where a file's queue could not register its buffers.
    pub(crate) fn memlock_needed(&self) -> Option<u64> {
        match &self.queues {
            Queues::File(jobs) => jobs.iter().filter_map(FileTarget::memlock_needed).max(),
            Queues::Nvme { .. } => None,
        }
    }

    /// How many bytes the file has now.
    pub(crate) fn file_bytes(&self) -> Result<Option<u64>, FileError> {
        match &self.queues {
            Queues::File(jobs) => jobs.first.bytes().map(Some),
            Queues::Nvme { .. } => Ok(None),
        }
    }
}
