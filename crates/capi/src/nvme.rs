//! NVMe controllers: a device of the domain, or a model of one behind the software IOMMU.

use crate::arena::{ARENAS, pf_arena_t};
use crate::claims::{self, Opened};
use crate::domain::{DOMAINS, State, pf_domain_t, text};
use crate::errno::Errno;
use crate::failure::{Counted, Failure, call, fail, store};
use crate::handle::Table;
use crate::options::{Options, fill, read_needed};
use crate::queue::transfer::Lost;
use crate::region::Hold;
use libc::{EACCES, EBUSY, EFBIG, EINVAL, EIO, ENODEV, ENOMEM, ENOSPC, ENOTSUP, ENXIO, ETIMEDOUT};
use pinfold::Arena;
use pinfold::vfio::DeviceError;
use pinfold_nvme::driver::{self, Config, Controller, Namespace, Vector};
use pinfold_nvme::vfio::{PciController, PciError};
use pinfold_nvme::{Interrupt, Registers};
use pinfold_nvme_model::{
    self as model, FileMedia, Media, MemoryMedia, ModelConfig, ModelController, ModelError,
};
use std::ffi::{c_char, c_int};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An NVMe controller.
pub struct pf_nvme_t {
    pub(crate) device: Arc<Device>,
}

pub(crate) static NVMES: Table<pf_nvme_t> = Table::new(9, "controller");

pub(crate) type Driver = Controller<Arc<dyn Registers>, Arena>;

/// The most bytes of one request; the driver splits a request above the controller's largest
/// transfer into several commands.
pub(crate) const MAX_TRANSFER: u64 = 64 << 20;
/// The most bytes of a model in memory, whose table has 40 bytes for each 2 MiB.
const MOST_MEMORY: u64 = 1 << 44;
/// The block size of a model, unless the options say another.
const MODEL_BLOCK: u32 = 512;

/// The state that the handles of a controller and of its queues share.
pub(crate) struct Device {
    pub(crate) controller: Driver,
    pub(crate) state: Arc<State>,
    /// The interrupts that no queue has.
    vectors: Mutex<Vec<Vector>>,
    /// Queues that exist.
    queues: AtomicUsize,
    /// Memory of requests that were given up: free again once the controller has been seen
    /// disabled.
    lost: Mutex<Vec<Lost>>,
    /// Dropped after the controller.
    backing: Backing,
    /// Dropped last: the arena of the rings is not ended before.
    #[expect(dead_code, reason = "held")]
    hold: Hold,
}

enum Backing {
    /// It runs until it is dropped.
    Model(#[expect(dead_code, reason = "held")] ModelController),
    /// A device of the domain.
    Pci(PciController, #[expect(dead_code, reason = "held")] Opened),
}

/// A queue's share of its controller: counted, with the interrupt that is its own.
pub(crate) struct Lease {
    pub(crate) device: Arc<Device>,
    pub(crate) vector: Option<Vector>,
}

impl Lease {
    /// Counts a queue, with an interrupt if it is to have one.
    ///
    /// # Errors
    /// `ENOSPC`: no interrupt is left.
    pub(crate) fn new(device: &Arc<Device>, interrupt: bool) -> Result<Self, Failure> {
        let vector = match interrupt {
            false => None,
            true => Some(device.vectors().pop().ok_or_else(|| {
                fail!(
                    ENOSPC,
                    "the controller has no interrupt left: create the queue without PF_QUEUE_INTERRUPT"
                )
            })?),
        };
        device.queues.fetch_add(1, Ordering::Relaxed);
        Ok(Self { device: Arc::clone(device), vector })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.device.vectors().extend(self.vector.take());
        // Release: the end of the queue comes before the controller's.
        self.device.queues.fetch_sub(1, Ordering::Release);
    }
}

impl Device {
    fn new(
        registers: Arc<dyn Registers>,
        (rings, hold): (Arena, Hold),
        config: Config,
        state: Arc<State>,
        (vectors, backing): (Vec<Vector>, Backing),
    ) -> Result<Self, Failure> {
        let controller =
            Controller::start(registers, rings, config).map_err(|error| Failure::from(&error))?;
        Ok(Self {
            controller,
            state,
            vectors: Mutex::new(vectors),
            queues: AtomicUsize::new(0),
            lost: Mutex::default(),
            backing,
            hold,
        })
    }

    fn vectors(&self) -> MutexGuard<'_, Vec<Vector>> {
        self.vectors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the memory of a request that was given up.
    pub(crate) fn keep_lost(&self, lost: Lost) {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).push(lost);
    }

    /// Returns the namespace with this number, the first usable one for 0.
    ///
    /// # Errors
    /// `ENODEV`: there is none, or the driver does not support it.
    pub(crate) fn namespace(&self, nsid: u32) -> Result<Namespace, Failure> {
        if nsid == 0 {
            let first = self.controller.namespaces().first().copied();
            return first.ok_or_else(|| {
                fail!(ENODEV, "the controller has no namespace that this library supports")
            });
        }
        self.controller.namespace(nsid).map_err(|error| fail!(ENODEV, "namespace {nsid}: {error}"))
    }

    /// Shuts the controller down, and frees the memory of lost requests.
    fn end(&self) -> Result<(), Failure> {
        let disabled = self.controller.disable();
        for lost in self.lost.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            lost.end();
        }
        disabled.map_err(|error| Failure::from(&error))?;
        if let Backing::Pci(pci, _) = &self.backing
            && let Err(error) = pci.device().set_bus_master(false)
        {
            return Err(Failure::from(&error));
        }
        Ok(())
    }
}

/// Options of a controller. Set `struct_size` to its sizeof, and unused fields to 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_nvme_opts {
    /// sizeof(struct pf_nvme_opts).
    pub struct_size: usize,
    /// The device's address, as it was attached to the domain; NULL: a model of a controller, which
    /// runs in a thread of this process, behind the software IOMMU.
    pub bdf: *const c_char,
    /// A model's medium: a file, which is created if there is none, and grown to `size`; NULL:
    /// memory.
    pub path: *const c_char,
    /// A model's size in bytes; 0: that of the file. At most 16 TiB in memory.
    pub size: u64,
    /// A model's block: 512 or 4096; 0: 512.
    pub block_bytes: u32,
    /// 0.
    pub flags: u32,
}

// SAFETY: a size, two pointers, a word and two halves of a word, without padding.
unsafe impl Options for pf_nvme_opts {
    const DEFAULT: Self = Self {
        struct_size: 0,
        bdf: std::ptr::null(),
        path: std::ptr::null(),
        size: 0,
        block_bytes: 0,
        flags: 0,
    };
}

/// For pf_nvme_info.flags: the controller discards (PF_DISCARD).
pub const PF_NVME_DISCARD: u32 = 1 << 0;
/// For pf_nvme_info.flags: what is discarded reads as zeroes.
pub const PF_NVME_DISCARD_ZEROES: u32 = 1 << 1;

/// The capabilities of a controller and one of its namespaces.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pf_nvme_info {
    /// sizeof(struct pf_nvme_info): the caller sets it.
    pub struct_size: usize,
    /// Bytes of the namespace.
    pub capacity: u64,
    /// The most bytes of one request.
    pub max_transfer: u64,
    /// The most bytes of one command: a larger request becomes several.
    pub max_command: u32,
    /// The unit of offsets and lengths, bytes.
    pub block_bytes: u32,
    /// The most requests of a queue.
    pub max_depth: u32,
    /// The namespace's number.
    pub nsid: u32,
    /// PF_NVME_* bits.
    pub flags: u32,
    /// 0.
    pub reserved: u32,
}

// SAFETY: a size, two words and six halves of words, without padding.
unsafe impl Options for pf_nvme_info {
    const DEFAULT: Self = Self {
        struct_size: 0,
        capacity: 0,
        max_transfer: 0,
        max_command: 0,
        block_bytes: 0,
        max_depth: 0,
        nsid: 0,
        flags: 0,
        reserved: 0,
    };
}

/// Opens an NVMe controller: resets it, enables it, and finds its namespaces.
///
/// @domain: the domain that the controller is in.
/// @arena: memory for its rings and lists, of this domain; pf_arena_destroy() refuses it until
/// pf_nvme_destroy(). 2 MiB are enough for a queue of 32; where it lacks memory for lists, requests
/// wait for each other.
/// @opts: the options: `bdf`, or a model's `path` or `size`.
/// @out: where the handle is stored.
///
/// Return: 0, or -errno: EINVAL (a model without a size, or of an unsupported block or size;
/// unknown flags); ENODEV (`bdf` is not attached to the domain, or not there); EBUSY (a controller
/// is open on it); ENOTSUP (a model in a device's domain; not an NVMe controller, or one that lacks
/// what is needed); ENXIO (the arena is not in this domain); ENOMEM; EIO or ETIMEDOUT (the
/// controller does not answer as it should); errors of the file; E2BIG; EBADF; EFAULT; ENFILE.
/// Thread: any. It blocks until the controller answers. Allocates. Ends with pf_nvme_destroy().
/// Since 0.2.
///
/// # Safety
/// `opts` is null or points to as many bytes as its first field says, and its strings are null or C
/// strings; `out` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_nvme_open(
    domain: *mut pf_domain_t,
    arena: *mut pf_arena_t,
    opts: *const pf_nvme_opts,
    out: *mut *mut pf_nvme_t,
) -> c_int {
    call(|| {
        crate::failure::check_out(out, "out")?;
        let state = Arc::clone(&DOMAINS.get(domain)?.state);
        // SAFETY: as the caller promises.
        let opts = unsafe { read_needed(opts) }?;
        if opts.flags != 0 {
            return Err(fail!(EINVAL, "flags {:#x}: there are none, set them to 0", opts.flags));
        }
        let rings = rings(arena, &state)?;
        let device = if opts.bdf.is_null() {
            let (media, block_bytes) = {
                // SAFETY: as the caller promises of `path`.
                let media = unsafe { medium(&opts) }?;
                (media, if opts.block_bytes == 0 { MODEL_BLOCK } else { opts.block_bytes })
            };
            let namespace =
                model::Namespace::new(media, block_bytes).map_err(|error| Failure::from(&error))?;
            open_model(state, rings, ModelConfig::new(vec![namespace]), Config::default())?.0
        } else {
            // SAFETY: as the caller promises.
            let bdf = unsafe { text(opts.bdf, "bdf") }?;
            open_pci(state, rings, bdf)?
        };
        let handle = NVMES.insert(pf_nvme_t { device: Arc::new(device) })?;
        // SAFETY: as the caller promises.
        unsafe { store(out, handle, "out") }?;
        Ok(0)
    })
}

/// Returns the arena as memory of this domain, and what keeps it from being ended.
pub(crate) fn rings(arena: *mut pf_arena_t, state: &Arc<State>) -> Result<(Arena, Hold), Failure> {
    let arena = ARENAS.get(arena)?;
    let domains = arena.domains.lock().unwrap_or_else(PoisonError::into_inner);
    let memory = match domains.iter().position(|other| Arc::ptr_eq(other, state)) {
        Some(0) => Ok(arena.arena.clone()),
        // Mapped there already, so this finds it.
        Some(_) => arena.arena.map_into(&state.domain).map_err(|error| Failure::from(&error)),
        None => Err(fail!(
            ENXIO,
            "the arena is not in the controller's domain: create it there, or call pf_arena_map_into"
        )),
    };
    Ok((memory?, Hold::new(&arena.region)))
}

/// # Safety
/// `path` of the options is null or a C string.
unsafe fn medium(opts: &pf_nvme_opts) -> Result<Arc<dyn Media>, Failure> {
    if opts.path.is_null() {
        if opts.size > MOST_MEMORY {
            let size = opts.size;
            return Err(fail!(
                EINVAL,
                "a model of {size} bytes in memory: at most {MOST_MEMORY}; name a file in `path`"
            ));
        }
        let media = MemoryMedia::new(opts.size);
        return Ok(Arc::new(media.map_err(|error| fail!(ENOMEM, "{error}"))?));
    }
    // SAFETY: as the caller promises.
    let path = unsafe { text(opts.path, "path") }?;
    let size = (opts.size > 0).then_some(opts.size);
    match FileMedia::open(Path::new(path), size) {
        Ok(media) => Ok(Arc::new(media)),
        Err(error) => {
            let errno = match error.kind() {
                std::io::ErrorKind::FileTooLarge => EFBIG,
                std::io::ErrorKind::InvalidInput => EINVAL,
                _ => error.raw_os_error().unwrap_or(EIO),
            };
            Err(Failure::new(errno, format!("cannot open {path} as a model's medium: {error}")))
        }
    }
}

/// Starts a model with one interrupt for each queue; returns the faults that it can be made to
/// have, too.
pub(crate) fn open_model(
    state: Arc<State>,
    rings: (Arena, Hold),
    mut model: ModelConfig,
    config: Config,
) -> Result<(Device, model::Faults), Failure> {
    let Some(port) = state.domain.port() else {
        return Err(fail!(
            ENOTSUP,
            "this domain is a device's, and a model needs one of pf_domain_soft: name the device in `bdf`"
        ));
    };
    model.vectors = model.queues.saturating_add(1);
    let vectors = model.vectors;
    let model = ModelController::spawn(port, model).map_err(|error| Failure::from(&error))?;
    let vectors = (1..vectors).rev().filter_map(|number| {
        let interrupt: Arc<dyn Interrupt> = model.interrupt(number)?;
        Some(Vector { number, interrupt })
    });
    let (vectors, faults) = (vectors.collect(), model.faults());
    let registers: Arc<dyn Registers> = Arc::new(model.registers());
    let held = (vectors, Backing::Model(model));
    Ok((Device::new(registers, rings, config, state, held)?, faults))
}

fn open_pci(state: Arc<State>, rings: (Arena, Hold), bdf: &str) -> Result<Device, Failure> {
    let bdf = claims::address(bdf)?;
    // First: from now on it is not detached.
    let opened = Opened::new(bdf)?;
    let Some(device) = state.device(bdf) else {
        return Err(fail!(
            ENODEV,
            "{bdf} is not attached to this domain: create the domain by pf_domain_vfio, or call pf_domain_attach"
        ));
    };
    let config = Config::default();
    // Number 0 is the admin queue's.
    let pci = PciController::from_device(device, u32::from(config.queues) + 1)
        .map_err(|error| Failure::from(&error))?;
    let mut vectors: Vec<Vector> = (1..).map_while(|number| pci.vector(number)).collect();
    vectors.reverse();
    let registers: Arc<dyn Registers> = pci.registers();
    Device::new(registers, rings, config, state, (vectors, Backing::Pci(pci, opened)))
}

/// Shuts a controller down and ends its handle. Memory of requests that were given up (PF_LOST) is
/// no longer in use after that.
///
/// @nvme: the controller; NULL does nothing.
///
/// Return: 0, or -errno: EBUSY (it has queues); EBADF. EIO, ENODEV or ETIMEDOUT: the controller
/// could not be disabled; the handle has ended nevertheless, and what the controller may still
/// reach stays in use for good: its rings, and the memory of requests that were given up.
/// Thread: any. It blocks until the controller has written back what it caches, at most a minute.
/// Since 0.2.
#[unsafe(no_mangle)]
pub extern "C" fn pf_nvme_destroy(nvme: *mut pf_nvme_t) -> c_int {
    call(|| {
        if nvme.is_null() {
            return Ok(0);
        }
        let ended =
            NVMES.remove(nvme, |nvme| match nvme.device.queues.load(Ordering::Acquire) {
                0 => Ok(()),
                queues => Err(fail!(
                    EBUSY,
                    "the controller has {}: call pf_queue_destroy first",
                    Counted(queues as u64, "queue")
                )),
            })?;
        ended.device.end().map(|()| 0)
    })
}

/// Returns the capabilities of a controller and one of its namespaces.
///
/// @nvme: the controller.
/// @nsid: the namespace's number, from 1; 0: the first.
/// @info: where it is stored; the caller sets `struct_size`.
///
/// Return: 0, or -errno: ENODEV (no such namespace, or one that is not supported: the message says
/// why); EINVAL (`struct_size`); EFAULT; EBADF.
/// Thread: any. Allocates. Since 0.2.
///
/// # Safety
/// `info` is null, or as many bytes as its first field says can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pf_nvme_info(
    nvme: *mut pf_nvme_t,
    nsid: u32,
    info: *mut pf_nvme_info,
) -> c_int {
    call(|| {
        let nvme = NVMES.get(nvme)?;
        let namespace = nvme.device.namespace(nsid)?;
        let identity = nvme.device.controller.identify();
        let mut flags = 0;
        if identity.can_discard {
            flags |= PF_NVME_DISCARD;
            if namespace.discard_zeroes {
                flags |= PF_NVME_DISCARD_ZEROES;
            }
        }
        let max_depth = nvme.device.controller.max_depth();
        let found = pf_nvme_info {
            capacity: namespace.bytes(),
            max_transfer: MAX_TRANSFER,
            max_command: identity.max_transfer_bytes,
            block_bytes: namespace.block_bytes,
            max_depth: u32::try_from(max_depth).unwrap_or(u32::MAX),
            nsid: namespace.nsid,
            flags,
            ..pf_nvme_info::DEFAULT
        };
        // SAFETY: as the caller promises.
        unsafe { fill(info, &found, "info") }?;
        Ok(0)
    })
}

// The errno values of the driver's and the model's errors.

impl Errno for driver::Error {
    fn errno(&self) -> c_int {
        match self {
            Self::Gone => ENODEV,
            Self::NotReady { .. } | Self::AdminTimeout { .. } => ETIMEDOUT,
            Self::NoNvmCommandSet | Self::PageSize { .. } | Self::EntrySize { .. } => ENOTSUP,
            Self::Source { .. } | Self::Lists(_) | Self::NoMemory { .. } => ENOMEM,
            Self::OtherDomain | Self::BadSource { .. } => ENXIO,
            Self::Depth { .. } | Self::NotSent { .. } | Self::DataLength { .. } => EINVAL,
            Self::OwnedByDriver { .. } => EACCES,
            Self::NoQueueLeft { .. } => ENOSPC,
            _ => EIO,
        }
    }
}

impl Errno for ModelError {
    fn errno(&self) -> c_int {
        match self {
            Self::Thread(error) | Self::Vector { error, .. } => error.raw_os_error().unwrap_or(EIO),
            _ => EINVAL,
        }
    }
}

impl Errno for DeviceError {
    fn errno(&self) -> c_int {
        match self {
            Self::NoRegion { .. } => ENXIO,
            Self::Outside { .. } | Self::Interrupts { .. } => EINVAL,
            Self::InterruptsOn(_) => EBUSY,
            Self::NoReset(_) => ENOTSUP,
            Self::Kernel { errno, .. } => errno.raw(),
            _ => EIO,
        }
    }
}

impl Errno for PciError {
    fn errno(&self) -> c_int {
        match self {
            Self::Open(error) => error.errno(),
            Self::Device(error) => error.errno(),
            Self::Driver { error, .. } => error.errno(),
            _ => ENOTSUP,
        }
    }
}
