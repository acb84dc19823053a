//! What a page pool asks of the world beyond chunks.

use super::error::RevokeError;
use crate::addr::Iova;
use crate::dma_pool::ChunkSource;
use crate::frame::{Frame, Order};
use crate::mem::DmaMemory;
use crate::share::Shared;
use alloc::boxed::Box;
use alloc::sync::Arc;

/// A source that can take a device's access to a chunk away although the chunk is still in use.
///
/// # Safety
/// Implementers owe: after `hide` returned `Ok` no device reaches the chunk, and its memory is as valid as before and
/// still nobody else's, until `release_hidden` gets it back. After an error that is
/// [for ever](RevokeError::is_for_ever) its memory is valid and nobody else's for ever: the pool does not give it back. After any
/// other error it is as if `hide` had not been called: the chunk goes back by [`release`](ChunkSource::release).
pub unsafe trait RevocableSource: ChunkSource {
    /// Takes the device's access away: strict, it waits until that is so.
    ///
    /// # Errors
    /// [`RevokeError`]: the device may still reach the chunk.
    ///
    /// # Safety
    /// It is a run that [`acquire`](ChunkSource::acquire) returned for this order, not released and not hidden since.
    unsafe fn hide(&self, frame: Frame, order: Order) -> Result<(), RevokeError>;

    /// Takes a hidden run back.
    ///
    /// # Safety
    /// `hide` returned `Ok` for it, it was not released since, and the caller reaches it no more.
    unsafe fn release_hidden(&self, frame: Frame, order: Order);
}

macro_rules! forward {
    ($($holder:ty $(=> $sized:ident)?),*) => {$(
        // SAFETY: the guarantees are those of the source it points to.
        unsafe impl<S: RevocableSource $(+ ?$sized)?> RevocableSource for $holder {
            unsafe fn hide(&self, frame: Frame, order: Order) -> Result<(), RevokeError> {
                // SAFETY: the caller guarantees what is asked for.
                unsafe { S::hide(self, frame, order) }
            }
            unsafe fn release_hidden(&self, frame: Frame, order: Order) {
                // SAFETY: the caller guarantees what is asked for.
                unsafe { S::release_hidden(self, frame, order) };
            }
        }
    )*};
}

forward!(&S => Sized, Box<S> => Sized, Arc<S> => Sized, Shared<S>);

/// What a machine does whose devices do not see the processor's caches. On one that is coherent (x86-64, and most of the
/// others) there is nothing to do, which is what the methods do if nothing is said.
///
/// The pool calls them with the bytes that a device may have written, and no others: at most
/// [`max_len`](super::Config::max_len) from [`offset`](super::Config::offset).
pub trait SyncOps: Send + Sync {
    /// The device gets the bytes: what the processor wrote is written back, what it cached is dropped.
    fn for_device(&self, memory: DmaMemory<'_>, iova: Iova) {
        let _ = (memory, iova);
    }
    /// The processor gets the bytes that the device wrote.
    fn for_cpu(&self, memory: DmaMemory<'_>, iova: Iova) {
        let _ = (memory, iova);
    }
}
