//! A pool's parameters, the tags that name holders of its pages, the two addresses of a page that
//! is freed explicitly ([`RawPage`]), and what the pool needs of its environment: chunks that can
//! be revoked, and cache maintenance.

use super::error::RevokeError;
use crate::addr::Iova;
use crate::dma_pool::ChunkSource;
use crate::frame::{Frame, Order};
use crate::mem::DmaMemory;
use crate::share::Shared;
use alloc::boxed::Box;
use alloc::sync::Arc;
use core::ptr::NonNull;

/// A page pool's parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// The size of a page: 4 KiB times 2^order, up to 2 MiB.
    pub order: Order,
    /// The capacity of the ring in pages: a power of two, up to 2^20.
    pub ring: u32,
    /// The offset in a page at which the device starts to write, in bytes: headroom for headers.
    pub offset: usize,
    /// The number of bytes from `offset` on that the device may write; 0 for the rest of the page.
    pub max_len: usize,
    /// The most pages that may be in use at a time: allocated, not returned. At least 1; `u64::MAX`
    /// for as many as the source has. An alloc beyond it is refused
    /// ([`AllocError::Limit`](super::AllocError::Limit)).
    pub max_in_use: u64,
}

impl Default for Config {
    /// Returns the parameters for pages of 4 KiB, a ring of 1024, a device that may write whole
    /// pages, and no limit.
    fn default() -> Self {
        Self { order: Order::PAGE, ring: 1024, offset: 0, max_len: 0, max_in_use: u64::MAX }
    }
}

/// The name of a page's holder, valid in the pool that returned it. For another pool it is
/// [`NONE`](Self::NONE).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Tag {
    /// The number of its pool.
    pub(super) pool: u64,
    /// The number of the name in its pool, from 1; 0 for none.
    pub(super) name: u32,
}

impl Tag {
    /// No name (the default).
    pub const NONE: Self = Self { pool: 0, name: 0 };
}

/// A page pool's source, which may be able to revoke a device's access to a chunk that is still in
/// use. Without methods of its own it cannot.
///
/// # Safety
/// Implementers guarantee: after `hide` returned `Ok` no device reaches the chunk, and its memory
/// stays valid and is allocated to no other caller until `release_hidden`. After a
/// [permanent](RevokeError::Unmap) error the chunk is quarantined: its memory stays valid
/// and is allocated to no other caller, forever, and the pool does not release it. Any other error
/// is as if `hide` had not been called: the chunk is released by [`release`](ChunkSource::release).
/// A chunk whose `hide` panics is quarantined too; the others are hidden before the panic goes on.
pub unsafe trait RevocableSource: ChunkSource {
    /// Revokes the device's access and waits until that has completed.
    ///
    /// # Errors
    /// [`RevokeError`]: the device may still reach the chunk.
    ///
    /// # Safety
    /// It is a run that [`acquire`](ChunkSource::acquire) returned for this order, not released and
    /// not hidden since.
    unsafe fn hide(&self, frame: Frame, order: Order) -> Result<(), RevokeError> {
        let _ = (frame, order);
        Err(RevokeError::NotAsked)
    }

    /// Releases a hidden run. A source with a `hide` of its own has this, too: by default it is
    /// `release`, which would revoke once more.
    ///
    /// # Safety
    /// `hide` returned `Ok` for it, it has not been released since, and the caller no longer
    /// accesses it.
    unsafe fn release_hidden(&self, frame: Frame, order: Order) {
        // SAFETY: the run was acquired and not released, and the caller no longer accesses it.
        unsafe { self.release(frame, order) };
    }
}

macro_rules! forward {
    ($($holder:ty $(=> $sized:ident)?),*) => {$(
        // SAFETY: every call is forwarded to a source that gives these guarantees.
        unsafe impl<S: RevocableSource $(+ ?$sized)?> RevocableSource for $holder {
            unsafe fn hide(&self, frame: Frame, order: Order) -> Result<(), RevokeError> {
                // SAFETY: the caller upholds the contract of the same method.
                unsafe { S::hide(self, frame, order) }
            }
            unsafe fn release_hidden(&self, frame: Frame, order: Order) {
                // SAFETY: the caller upholds the contract of the same method.
                unsafe { S::release_hidden(self, frame, order) };
            }
        }
    )*};
}

forward!(&S => Sized, Box<S> => Sized, Arc<S> => Sized, Shared<S>);

/// Cache maintenance for machines whose devices do not snoop the processor's caches. Coherent
/// machines (x86-64 and most others) need none, so the methods do nothing by default.
///
/// The pool calls them only with bytes that a device may have written: at most
/// [`max_len`](super::Config::max_len) from [`offset`](super::Config::offset).
///
/// A method that panics loses no page. A raw page that was to be freed stays allocated, and an
/// alloc changes nothing. A [`Page`](super::Page) or [`Fragment`](super::Fragment) that was dropped
/// or recycled is returned all the same: its bytes may not have been passed to the device. Once a
/// method has panicked, none is called while a thread unwinds (with the feature `std`, which
/// tells): a second panic there would end the process.
///
/// ```
/// use pinfold_core::addr::Iova;
/// use pinfold_core::mem::DmaMemory;
/// use pinfold_core::page_pool::{Config, CreateError, PagePool, RevocableSource, SyncOps};
///
/// // By the processor's instructions for a cache line of 64 bytes.
/// # fn clean_and_invalidate(_: *mut u8) {}
/// # fn invalidate(_: *mut u8) {}
/// struct Lines;
///
/// impl SyncOps for Lines {
///     fn for_device(&self, memory: DmaMemory<'_>, _: Iova) {
///         let first = memory.as_ptr().as_ptr();
///         (0..memory.len()).step_by(64).for_each(|at| clean_and_invalidate(first.wrapping_add(at)));
///     }
///     fn for_cpu(&self, memory: DmaMemory<'_>, _: Iova) {
///         let first = memory.as_ptr().as_ptr();
///         (0..memory.len()).step_by(64).for_each(|at| invalidate(first.wrapping_add(at)));
///     }
/// }
///
/// fn receive(source: impl RevocableSource + 'static) -> Result<PagePool, CreateError> {
///     PagePool::with_sync(source, "rx", Config::default(), Box::new(Lines))
/// }
///
/// /// Copies a packet out of the page that the device has written.
/// fn packet(page: &mut pinfold_core::page_pool::Page, len: usize) -> Vec<u8> {
///     page.sync_for_cpu(len); // only these bytes are synced for the device again
///     let mut bytes = vec![0; len];
///     page.memory().copy_to_slice(0, &mut bytes).expect("at most a page");
///     bytes
/// }
/// ```
pub trait SyncOps: Send + Sync {
    /// Passes the bytes to the device: writes back and invalidates the processor's cache lines.
    fn for_device(&self, memory: DmaMemory<'_>, iova: Iova) {
        let _ = (memory, iova);
    }
    /// Passes the bytes that the device wrote to the processor.
    fn for_cpu(&self, memory: DmaMemory<'_>, iova: Iova) {
        let _ = (memory, iova);
    }
}

/// The addresses of a page, for the processor and for the device. `Copy`, so the pool checks what
/// is freed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RawPage {
    pub(super) ptr: NonNull<u8>,
    pub(super) iova: Iova,
}

// SAFETY: two addresses; accessing the memory through them is `unsafe` or goes through `DmaMemory`.
unsafe impl Send for RawPage {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawPage {}

impl RawPage {
    /// Returns the page with these addresses, for callers that store them elsewhere. Checked when
    /// it is used.
    pub const fn from_parts(ptr: NonNull<u8>, iova: Iova) -> Self {
        Self { ptr, iova }
    }

    /// Returns the page's address in this process.
    pub const fn as_ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Returns the page's address for the device.
    pub const fn iova(&self) -> Iova {
        self.iova
    }
}
