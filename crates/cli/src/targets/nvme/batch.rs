//! Queues requests: one, or a batch of reads whose buffers are mapped by one call.

use super::command::Mapped;
use super::{BATCH, NvmeTarget};
use crate::targets::error::TargetError;
use crate::targets::target::{Io, RejectedBatch, Request, SubmitError};
use pinfold_core::access::FromDevice;
use pinfold_core::dma_pool::ChunkSource;
use pinfold_core::domain::Pinned;
use pinfold_nvme::Registers;
use pinfold_nvme::driver::Rejected;

impl<'d, B: Pinned, R: Registers, S: ChunkSource + Clone> NvmeTarget<'d, B, R, S> {
    /// Queues reads in their order. All of their buffers are mapped, at contiguous addresses up to
    /// 1 MiB, or none.
    pub(super) fn read_many(&mut self, requests: Vec<Request<B>>) -> Result<(), RejectedBatch<B>> {
        let (ios, buffers): (Vec<Io>, Vec<B>) =
            requests.into_iter().map(|Request { io, buffer }| (io, buffer)).unzip();
        let mapped = self.domain.map_many(buffers, FromDevice).map_err(|failed| RejectedBatch {
            queued: 0,
            buffers: failed.payloads,
            error: Box::new(TargetError::Domain {
                target: self.info.name.clone(),
                error: failed.error,
            }),
        })?;
        let mut reads = ios.into_iter().zip(mapped);
        let mut queued = 0;
        while let Some((io, buffer)) = reads.next() {
            if let Err(SubmitError { buffer, error }) = self.queue_up(io, Mapped::Read(buffer)) {
                let unmapped = reads.filter_map(|(_, buffer)| self.domain.unmap(buffer).ok());
                let buffers = buffer.into_iter().chain(unmapped).collect();
                return Err(RejectedBatch { queued, buffers, error: Box::new(error) });
            }
            queued += 1;
        }
        Ok(())
    }

    /// Queues a request whose buffer is mapped.
    pub(super) fn queue_up(&mut self, io: Io, buffer: Mapped<'d, B>) -> Result<(), SubmitError<B>> {
        self.start(io, buffer).map_err(|Rejected { payload, reason }| SubmitError {
            buffer: payload.unmap(&mut self.domain).ok(),
            error: TargetError::Rejected { target: self.info.name.clone(), reason },
        })?;
        self.requests += 1;
        // One doorbell for many: the next poll or wait rings for the rest.
        if self.unsubmitted.len() >= BATCH {
            self.ring_doorbell();
        }
        Ok(())
    }
}
