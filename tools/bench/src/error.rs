//! The error of all suites.

use crate::baseline::BaselineError;
use pinfold_core::frame::FrameError;
use pinfold_core::mem::AccessError;
use pinfold_core::{dma_pool, gather, page_pool};
use pinfold_replay::policy::PolicyError;

/// Why a suite could not be measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    /// A baseline failed.
    #[error("a baseline failed: {0}")]
    Baseline(#[from] BaselineError),
    /// The memory for the subjects is unavailable.
    #[error("cannot allocate the memory for the measurement: {0}")]
    Arena(#[from] pinfold::arena::BuildError),
    /// The baselines need memory that no device can reach.
    #[error(transparent)]
    NotExclusive(#[from] pinfold::arena::NotExclusive),
    /// The domain for the subjects could not be created.
    #[error("cannot create the domain for the measurement: {0}")]
    Domain(#[from] pinfold_core::domain::BackendError),
    /// A pool could not be created.
    #[error(transparent)]
    Create(#[from] dma_pool::CreateError),
    /// No block, page or buffer could be allocated.
    #[error(transparent)]
    Alloc(#[from] dma_pool::AllocError),
    /// A pool refused to free a block or page.
    #[error(transparent)]
    Free(#[from] dma_pool::FreeError),
    /// A pool refused to free several blocks.
    #[error(transparent)]
    FreeBulk(#[from] dma_pool::BulkFreeError),
    /// A zone refused to allocate or free frames.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A payload could not be bounced.
    #[error(transparent)]
    Bounce(#[from] pinfold::memory::BounceError),
    /// A page pool could not be created.
    #[error(transparent)]
    CreatePages(#[from] page_pool::CreateError),
    /// An access is outside its memory.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// A buffer could not be described.
    #[error(transparent)]
    Register(#[from] pinfold_core::folio::BufferError),
    /// The program's own memory could not be pinned.
    #[error(transparent)]
    Pin(#[from] pinfold::folios::PinError),
    /// It could not be examined.
    #[error(transparent)]
    Examined(#[from] pinfold::folios::MemoryError),
    /// The program's own memory was not accepted.
    #[error("cannot give up the memory for the measurement: {0}")]
    Own(String),
    /// An offset is outside its buffer.
    #[error(transparent)]
    Outside(#[from] pinfold_core::folio::OutsideBuffer),
    /// The device profile is invalid.
    #[error(transparent)]
    Profile(#[from] gather::ProfileError),
    /// A range could not be gathered into segments.
    #[error(transparent)]
    Gather(#[from] gather::GatherError),
    /// A PRP list could not be built.
    #[error(transparent)]
    Prp(#[from] gather::LayoutError<dma_pool::AllocError>),
    /// The queue of a file failed.
    #[error(transparent)]
    File(#[from] pinfold::uring::FileError),
    /// The scratch file could not be used.
    #[error("cannot use the scratch file of the measurement: {0}")]
    Scratch(#[source] std::io::Error),
    /// A bulk call allocated fewer objects than are free.
    #[error("a bulk call allocated {got} of {asked} objects although all of them are free")]
    Short {
        /// The number requested.
        asked: usize,
        /// The number allocated.
        got: usize,
    },
    /// No device is bound to VFIO.
    #[error(
        "no device is bound to VFIO; bind one with `sudo pinfold bind BDF` (BDF: the address of the device)"
    )]
    NoDevice,
    /// Packets cannot be received on this machine.
    #[error("{0}")]
    NoNetwork(String),
    /// A thread could not be kept on a processor.
    #[error("cannot choose the processor of a thread: {0}")]
    Processor(#[source] std::io::Error),
    /// A call for the network failed.
    #[error(transparent)]
    Network(#[from] pinfold_xdp::system::CallError),
    /// A socket could not be opened.
    #[error(transparent)]
    OpenSocket(#[from] pinfold_xdp::OpenError),
    /// A socket failed.
    #[error(transparent)]
    Socket(#[from] pinfold_xdp::SocketError),
    /// Packets stopped arriving.
    #[error("{got} of {asked} packets arrived within {seconds} s")]
    Silent {
        /// The number of packets expected.
        asked: u64,
        /// The number of packets received.
        got: u64,
        /// The limit.
        seconds: u64,
    },
    /// A program that is to be measured is missing.
    #[error("{missing} missing: {fix}")]
    NoPrograms {
        /// The missing parts.
        missing: String,
        /// The way to get it.
        fix: String,
    },
    /// A server could not be started, or has ended.
    #[error("a server cannot be measured: {reason}; its command: {command}")]
    Server {
        /// Its command.
        command: String,
        /// The reason.
        reason: String,
    },
    /// A client failed.
    #[error("{client} failed: {reason}")]
    Client {
        /// Its name.
        client: String,
        /// The reason.
        reason: String,
    },
    /// No device bound to VFIO could be opened.
    #[error(transparent)]
    Device(#[from] pinfold::vfio::OpenError),
    /// A policy for DMA addresses failed.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// An address space refused to allocate or free addresses.
    #[error(transparent)]
    Iova(#[from] pinfold_core::iova::IovaError),
    /// An I/O page table could not be changed.
    #[error(transparent)]
    Table(#[from] pinfold_core::table::TableError),
    /// A range of addresses is invalid.
    #[error(transparent)]
    Range(#[from] pinfold_core::addr::RangeError),
    /// The device model faulted.
    #[error(transparent)]
    Fault(#[from] pinfold::soft::Fault),
    /// A baseline has no addresses, or does not know those that are freed.
    #[error("the addresses of a baseline are exhausted, or were not allocated")]
    Addresses,
    /// A signal arrived.
    #[error("interrupted")]
    Interrupted,
    /// Signals cannot be caught.
    #[error("cannot catch signals: {0}")]
    Signals(#[source] std::io::Error),
    /// A device could not be bound or unbound.
    #[error(transparent)]
    Bind(#[from] pinfold::pci::BindError),
    /// A client of a controller could not be measured.
    #[error(transparent)]
    Kernel(#[from] crate::suite::KernelError),
    /// A second thread could not be started.
    #[error("cannot start a second thread for the measurement: {0}")]
    NoThread(#[source] std::io::Error),
    /// A thread of the measurement ended early.
    #[error("a thread of the measurement ended before it had completed its work")]
    Thread,
}
