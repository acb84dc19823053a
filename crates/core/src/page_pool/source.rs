//! What a page pool needs of its environment besides chunks: revocation, and cache maintenance.

use super::error::RevokeError;
use crate::addr::Iova;
use crate::dma_pool::ChunkSource;
use crate::frame::{Frame, Order};
use crate::mem::DmaMemory;
use crate::share::Shared;
use alloc::boxed::Box;
use alloc::sync::Arc;

/// A source that can revoke a device's access to a chunk that is still in use.
///
/// # Safety
/// Implementers guarantee: after `hide` returned `Ok` no device reaches the chunk, and its memory
/// stays valid and is allocated to no other caller until `release_hidden`. After a
/// [permanent](RevokeError::is_permanent) error the chunk is quarantined: its memory stays valid
/// and is allocated to no other caller, forever, and the pool does not release it. Any other error
/// is as if `hide` had not been called: the chunk is released by [`release`](ChunkSource::release).
/// A chunk whose `hide` panics is quarantined too.
pub unsafe trait RevocableSource: ChunkSource {
    /// Revokes the device's access and waits until that has completed.
    ///
    /// # Errors
    /// [`RevokeError`]: the device may still reach the chunk.
    ///
    /// # Safety
    /// It is a run that [`acquire`](ChunkSource::acquire) returned for this order, not released and
    /// not hidden since.
    unsafe fn hide(&self, frame: Frame, order: Order) -> Result<(), RevokeError>;

    /// Releases a hidden run.
    ///
    /// # Safety
    /// `hide` returned `Ok` for it, it has not been released since, and the caller no longer
    /// accesses it.
    unsafe fn release_hidden(&self, frame: Frame, order: Order);
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
