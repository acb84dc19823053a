//! From what a user named to targets that can be read and written, with all that may be wrong about it.

mod place;
mod scratch;

pub(crate) use place::{BLOCK, Medium, Place};
pub(crate) use scratch::Scratch;

use crate::account::{DeviceAccount, PoolAccount};
use crate::stack::Stack;
use crate::target::Target;
use crate::target::file::FileTarget;
use crate::target::nvme::NvmeTarget;
use pinfold::uring::FileError;
use pinfold::{Arena, Buffer};
use pinfold_nvme::driver::{Config, Controller};
use pinfold_nvme::model::{
    FileMedia, Media, MemoryMedia, ModelConfig, ModelController, ModelError, ModelRegisters, Namespace,
};
use std::io;
use std::sync::Arc;
use std::time::Duration;

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
    /// A folder, a device, a pipe.
    #[error("{0} is not a regular file: name a file or an image")]
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
        "{0} exists, and a file given with --via is made for the run and removed: name one that does not exist"
    )]
    ScratchExists(String),
    /// The third target is the source.
    #[error("{0} is the source itself: going by way of it would write over it; name another target")]
    ViaIsSource(String),
    /// More than this machine's memory.
    #[error(
        "{name} would hold {needed} bytes in memory and this machine has {available} available: use an image \
         (truncate -s {needed} disk.img, then soft:disk.img)"
    )]
    NotEnoughMemory {
        /// Which.
        name: String,
        /// How many bytes it would hold.
        needed: u64,
        /// How many there are.
        available: u64,
    },
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
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => ": check the path",
        io::ErrorKind::PermissionDenied => ": check who may read and write it",
        io::ErrorKind::ReadOnlyFilesystem => ": choose a place on another file system",
        _ => "",
    }
}

/// A target that has been opened.
pub(crate) enum Opened<'d> {
    /// A file.
    File(Box<FileTarget<'d, Buffer>>),
    /// A model controller.
    Soft {
        /// Its driver, which is dropped first.
        target: Box<NvmeTarget<'d, Buffer, ModelRegisters, Arena>>,
        /// It runs until it is dropped.
        _model: ModelController,
    },
}

/// How long the driver waits for an answer: a model controller that has not answered by then never will.
const TIMEOUT: Duration = Duration::from_secs(10);

impl<'d> Opened<'d> {
    /// Opens `place` for requests of multiples of `block` bytes, up to `depth` at a time, from the buffers of `stack`.
    pub(crate) fn open(
        place: Place,
        stack: &'d Stack,
        (block, depth): (usize, usize),
    ) -> Result<Self, OpenError> {
        let Place { name, path, medium } = place;
        let media: Arc<dyn Media> = match medium {
            Medium::File(file) => {
                let file = FileTarget::new(file, &path, (block, depth), stack.fixed())?;
                return Ok(Self::File(Box::new(file)));
            }
            Medium::Image { file, bytes } => Arc::new(FileMedia::from_file(file, bytes)),
            Medium::Memory { bytes } => Arc::new(MemoryMedia::new(bytes)),
        };
        let model_error = |error| OpenError::Model { name: name.clone(), error };
        let namespace = Namespace::new(media, 512).map_err(model_error)?;
        let port = stack.port().ok_or_else(|| OpenError::NoNamespace(name.clone()))?;
        let model = ModelController::spawn(port, ModelConfig::new(vec![namespace])).map_err(model_error)?;
        let driver_error = |error| OpenError::Driver { name: name.clone(), error };
        let config = Config { timeout: TIMEOUT, ..Config::default() };
        let source = stack.control.clone().ok_or_else(|| OpenError::NoNamespace(name.clone()))?;
        let controller = Controller::start(model.registers(), source, config).map_err(driver_error)?;
        let namespace = controller.namespaces().first().copied();
        let namespace = namespace.ok_or_else(|| OpenError::NoNamespace(name.clone()))?;
        let target =
            NvmeTarget::new(name.clone(), (&stack.domain, stack.protect), (controller, namespace), depth)
                .map_err(driver_error)?;
        Ok(Self::Soft { target: Box::new(target), _model: model })
    }

    /// The target.
    pub(crate) fn target(&mut self) -> &mut dyn Target<Buffer> {
        match self {
            Self::File(file) => &mut **file,
            Self::Soft { target, .. } => &mut **target,
        }
    }

    /// What the controller did, where there is one.
    pub(crate) fn device_account(&self) -> Option<DeviceAccount> {
        match self {
            Self::File(_) => None,
            Self::Soft { target, .. } => Some(target.account()),
        }
    }

    /// The pools of its driver.
    pub(crate) fn pool_accounts(&self) -> Vec<PoolAccount> {
        match self {
            Self::File(_) => Vec::new(),
            Self::Soft { target, .. } => target.pools(),
        }
    }

    /// What fell back to something slower, and why.
    pub(crate) fn notes(&self) -> Vec<String> {
        match self {
            Self::File(file) => file.notes().collect(),
            Self::Soft { .. } => Vec::new(),
        }
    }

    /// How many bytes the file has now.
    pub(crate) fn file_bytes(&self) -> Result<Option<u64>, FileError> {
        match self {
            Self::File(file) => file.bytes().map(Some),
            Self::Soft { .. } => Ok(None),
        }
    }
}
