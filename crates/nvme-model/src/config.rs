//! The configuration of the model controller: namespaces, counters, errors.

use crate::media::Media;
use pinfold_nvme::spec::{PAGE_BYTES, SglSupport};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::{fmt, io};

/// Configures a model controller.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// The namespaces; the first has NSID 1.
    pub namespaces: Vec<Namespace>,
    /// MDTS: the largest transfer is `4096 << (mpsmin + mdts)` bytes; 0 means no limit, so that no
    /// controller has a limit of one page.
    pub mdts: u8,
    /// CAP.MPSMIN and CAP.MPSMAX, 0 to 4: the only size of a page (CC.MPS) is `4096 << mpsmin`
    /// bytes. Default: 0.
    pub mpsmin: u8,
    /// CAP.MQES: an I/O queue has at most `mqes + 1` entries. At least 1.
    pub mqes: u16,
    /// Number of I/O queue pairs, 1 to 255.
    pub queues: u16,
    /// CAP.TO, in units of 500 ms: how long the driver waits for a change of CSTS.RDY.
    pub timeout_500ms: u8,
    /// CAP.DSTRD, 0 to 8: doorbells are `4 << stride_shift` bytes apart.
    pub stride_shift: u8,
    /// Number of interrupt vectors, 0 to 2048; each is an eventfd.
    pub vectors: u16,
    /// RTD3E: how long a shutdown may take, in microseconds; 0 means not reported.
    pub rtd3_entry_us: u32,
    /// CRDT1 to CRDT3, in units of 100 ms: the delays that a status may ask for by CRD; 0 means
    /// none. A host that has not declared to wait for them (ACRE of "host behavior support") sees
    /// CRD 0.
    pub retry_delays: [u16; 3],
    /// For how long after each start I/O commands fail with
    /// [`NAMESPACE_NOT_READY`](pinfold_nvme::spec::Status::NAMESPACE_NOT_READY), with CRD 1 where
    /// CRDT1 is set. Default: 0.
    pub not_ready: Duration,
    /// The delay from CC.EN to CSTS.RDY. Default: 0.
    pub ready_delay: Duration,
    /// VWC: whether there is a volatile write cache. Default: true.
    pub volatile_cache: bool,
    /// VS: 2.0 is 20000h. Before 1.3 there are no identification descriptors, before 1.1 no list of
    /// active namespaces.
    pub version: u32,
    /// ACL, 0-based: the number of aborts that may be outstanding.
    pub acl: u8,
    /// Whether Abort aborts commands; otherwise it always reports that the command was not aborted,
    /// which Base 5.1 allows. Default: true.
    pub aborts: bool,
    /// AERL, 0-based: the number of asynchronous event requests that may be outstanding.
    pub aerl: u8,
    /// SGLS: whether I/O commands may use SGLs.
    pub sgls: SglSupport,
}

impl ModelConfig {
    /// Returns the size of a page in bytes.
    pub(crate) fn page_size(&self) -> usize {
        PAGE_BYTES << self.mpsmin
    }

    /// Creates the default configuration: transfers up to 1 MiB, 16 queue pairs of up to 1024
    /// entries, 10 s to become ready, no interrupts, no SGLs.
    pub fn new(namespaces: Vec<Namespace>) -> Self {
        Self {
            namespaces,
            mdts: 8,
            mpsmin: 0,
            mqes: 1023,
            queues: 16,
            timeout_500ms: 20,
            stride_shift: 0,
            vectors: 0,
            rtd3_entry_us: 0,
            retry_delays: [0; 3],
            not_ready: Duration::ZERO,
            ready_delay: Duration::ZERO,
            volatile_cache: true,
            version: 2 << 16,
            acl: 3,
            aborts: true,
            aerl: 0,
            sgls: SglSupport::Unsupported,
        }
    }
}

// Errors of the model controller.

/// Why the model controller could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The block size is neither 512 nor 4096.
    #[error("unsupported block size of {block_bytes} bytes: the model supports 512 and 4096")]
    BlockSize {
        /// The requested size.
        block_bytes: u32,
    },
    /// The medium is smaller than one block.
    #[error("a medium of {bytes} bytes is smaller than one block of {block_bytes} bytes")]
    TooSmall {
        /// The medium's size.
        bytes: u64,
        /// The size of a block.
        block_bytes: u32,
    },
    /// A field of [`ModelConfig`] is out of range.
    #[error("{name} is {value}: the model supports {min} to {max}")]
    OutOfRange {
        /// The name of the field.
        name: &'static str,
        /// Its value.
        value: u64,
        /// The smallest valid value.
        min: u64,
        /// The largest valid value.
        max: u64,
    },
    /// The thread could not be started.
    #[error("cannot start the thread of the model controller: {}", pinfold::probe::threads::refusal(.0))]
    Thread(io::Error),
    /// The eventfd of an interrupt vector could not be created.
    #[error(
        "cannot create an eventfd for interrupt vector {vector} of the model controller: {error}"
    )]
    Vector {
        /// The vector.
        vector: u16,
        /// The system error.
        error: io::Error,
    },
}

impl ModelError {
    /// Returns the error of the system that refused it, if that is the reason: the program that has
    /// the model knows which of its limits that is.
    pub fn system(&self) -> Option<&io::Error> {
        match self {
            Self::Thread(error) | Self::Vector { error, .. } => Some(error),
            Self::BlockSize { .. } | Self::TooSmall { .. } | Self::OutOfRange { .. } => None,
        }
    }
}

// Counters of the model controller.

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) commands: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) bytes_read: AtomicU64,
    pub(crate) bytes_written: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) writes: AtomicU64,
    pub(crate) interrupts: AtomicU64,
    pub(crate) shutdowns: AtomicU64,
}

impl Counters {
    /// Adds without a read-modify-write: only one thread writes.
    pub(crate) fn add(counter: &AtomicU64, by: u64) {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
    }
}

/// Counters of a model controller since it was started.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ModelStats {
    /// Commands completed, admin and I/O.
    pub commands: u64,
    /// Commands completed with an error status.
    pub errors: u64,
    /// Bytes read from the media.
    pub bytes_read: u64,
    /// Bytes written to the media.
    pub bytes_written: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Valid doorbell writes.
    pub doorbells: u64,
    /// Doorbell writes with an invalid queue or value.
    pub bad_doorbells: u64,
    /// Shutdowns completed (CC.SHN).
    pub shutdowns: u64,
    /// Changes of CC.EN before CSTS.RDY had followed the last one: undefined results (Base
    /// 3.1.3.5).
    pub early_changes: u64,
}

impl fmt::Display for ModelStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} commands, {} errors; {} bytes read, {} bytes written; {} interrupts, {} doorbells ({} invalid); {} \
             shutdowns, {} early changes of CC.EN",
            self.commands,
            self.errors,
            self.bytes_read,
            self.bytes_written,
            self.interrupts,
            self.doorbells,
            self.bad_doorbells,
            self.shutdowns,
            self.early_changes
        )
    }
}

// Namespaces of the model controller.

/// A namespace of the model: a medium and its block size.
#[derive(Clone)]
pub struct Namespace {
    pub(crate) media: Arc<dyn Media>,
    block_shift: u32,
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Namespace({} blocks of {} bytes)", self.blocks(), self.block_bytes())
    }
}

impl Namespace {
    /// Creates a namespace on `media` with blocks of `block_bytes` (512 or 4096). A remainder at
    /// its end is not used.
    ///
    /// # Errors
    /// [`ModelError::BlockSize`] for another size, [`ModelError::TooSmall`] where there is not one
    /// block.
    pub fn new(media: Arc<dyn Media>, block_bytes: u32) -> Result<Self, ModelError> {
        if block_bytes != 512 && block_bytes != 4096 {
            return Err(ModelError::BlockSize { block_bytes });
        }
        let namespace = Self { block_shift: block_bytes.trailing_zeros(), media };
        match namespace.blocks() {
            0 => Err(ModelError::TooSmall { bytes: namespace.media.bytes(), block_bytes }),
            _ => Ok(namespace),
        }
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.media.bytes() >> self.block_shift
    }
    pub(crate) fn block_shift(&self) -> u32 {
        self.block_shift
    }
    pub(crate) fn block_bytes(&self) -> u64 {
        1 << self.block_shift
    }
}
