//! Memory for rings and buffers, and typed reads of what the controller wrote there.

use super::error::Error;
use pinfold_core::dma_pool::{ChunkSource, Coherent};
use pinfold_core::frame::Frame;
use pinfold_core::mem::{AccessError, DmaMemory};
use std::sync::Arc;
use zerocopy::{FromBytes, IntoBytes};

/// Frames that the controller can access. They are released by their last owner: the ring, or the
/// queue or [`PendingRelease`](super::inner::PendingRelease) that waits until the controller no
/// longer uses them.
pub(super) type DmaBuffer<S> = Arc<Coherent<S>>;

/// Allocates at least `bytes` zeroed bytes.
pub(super) fn allocate<S: ChunkSource + Clone>(
    source: &S,
    bytes: usize,
    what: &'static str,
) -> Result<DmaBuffer<S>, Error> {
    let run = Coherent::new(source.clone(), bytes as u64)
        .map_err(|error| Error::Source { what, error })?;
    if !run.iova().is_aligned(Frame::BYTES) {
        return Err(Error::BadSource { what });
    }
    run.zero();
    Ok(Arc::new(run))
}

/// Copies a `T` out of memory that the controller can write; the copy no longer changes.
#[inline]
pub(super) fn read<T: FromBytes + IntoBytes>(
    memory: DmaMemory<'_>,
    offset: usize,
) -> Result<T, AccessError> {
    let mut value = T::new_zeroed();
    memory.copy_to_slice(offset, value.as_mut_bytes())?;
    Ok(value)
}
