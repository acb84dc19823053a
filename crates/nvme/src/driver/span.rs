//! Memory for rings and buffers, from a chunk source.

use super::error::Error;
use pinfold_core::dma_pool::{ChunkSource, Coherent};
use pinfold_core::frame::Frame;
use std::sync::Arc;

/// A run of frames that the controller reaches. It goes back with its last owner: its ring, and the queue or the grave
/// that waits until the controller is done with it.
pub(super) type Span<S> = Arc<Coherent<S>>;

/// At least `bytes` bytes, all 0.
pub(super) fn take<S: ChunkSource + Clone>(
    source: &S,
    bytes: usize,
    what: &'static str,
) -> Result<Span<S>, Error> {
    let run = Coherent::new(source.clone(), bytes as u64).map_err(|error| Error::Source { what, error })?;
    if !run.iova().is_aligned(Frame::BYTES) {
        return Err(Error::BadSource { what });
    }
    run.zero();
    Ok(Arc::new(run))
}
