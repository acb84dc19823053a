//! A kernel runtime for a driver of `rdif-block`: registers by address, requests with memory from
//! `dma-api`, interrupts that are waited for. Shared by the examples and the tests.

use dma_api::{CpuDmaBuffer, DeviceDma, DmaDirection};
use mmio_api::{MapError, MmioAddr, MmioOp, MmioRaw};
use rdif_block::{
    CompletedRequest, CompletionSink, HardwareQueue, OwnedRequest, OwnedRequestBatch, RequestFlags,
    RequestId, RequestOp, SubmissionSink,
};
use std::error::Error;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How long a controller may take for anything.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Waits for an interrupt of a vector, for a short time; whether there was one.
pub(crate) type WaitIrq<'w> = dyn FnMut(u16) -> Result<bool> + 'w;

/// Where a driver finds its controller.
pub(crate) struct Registers {
    /// The start of the registers in this process, which outlive the driver.
    pub(crate) at: NonNull<u8>,
    pub(crate) len: usize,
}

/// Registers are mapped before the driver runs, so their address is theirs in this process.
pub(crate) struct Mapped;

impl MmioOp for Mapped {
    fn ioremap(&self, addr: MmioAddr, size: usize) -> std::result::Result<MmioRaw, MapError> {
        let virt = std::ptr::with_exposed_provenance_mut(addr.as_usize());
        let virt = NonNull::new(virt).ok_or(MapError::Invalid)?;
        // SAFETY: drivers are given the address and the length of `Registers`.
        Ok(unsafe { MmioRaw::new(addr, virt, size) })
    }

    fn iounmap(&self, _: &MmioRaw) {}
}

/// The reports of a queue.
#[derive(Default)]
pub(crate) struct Reports {
    accepted: usize,
    completed: Vec<CompletedRequest>,
}

impl SubmissionSink for Reports {
    fn accepted(&mut self, _: RequestId) {
        self.accepted += 1;
    }
}

impl CompletionSink for Reports {
    fn complete(&mut self, request: CompletedRequest) {
        self.completed.push(request);
    }
}

/// A disk behind a driver.
pub(crate) trait Blocks {
    /// Returns its queue, and the memory of its requests.
    fn queue(&mut self) -> (&mut dyn HardwareQueue, &DeviceDma);

    /// Waits for an interrupt, for a short time, and serves it.
    fn serve(&mut self, reports: &mut Reports, irq: &mut WaitIrq) -> Result<()>;

    /// Returns the number of blocks and their size.
    fn size(&mut self) -> (u64, usize) {
        let info = self.queue().0.info().device;
        (info.num_blocks, info.logical_block_size)
    }

    /// Returns the most bytes of one request.
    fn max_bytes(&mut self) -> usize {
        let info = self.queue().0.info();
        info.limits.max_blocks_per_request as usize * info.device.logical_block_size
    }

    /// Writes `data` from block `lba` on.
    fn write(&mut self, lba: u64, data: &[u8], irq: &mut WaitIrq) -> Result<()> {
        self.submit(RequestOp::Write, lba, data)?;
        self.wait(irq).map(drop)
    }

    /// Reads into `data` from block `lba` on.
    fn read(&mut self, lba: u64, data: &mut [u8], irq: &mut WaitIrq) -> Result<()> {
        self.submit(RequestOp::Read, lba, data)?;
        self.wait(irq)?.data.ok_or("a read without data")?.copy_to_slice_cpu(data);
        Ok(())
    }

    /// Has the disk keep what was written, if it has a cache.
    fn flush(&mut self, irq: &mut WaitIrq) -> Result<()> {
        if self.queue().0.info().limits.supports_flush {
            self.submit(RequestOp::Flush, 0, &[])?;
            self.wait(irq)?;
        }
        Ok(())
    }

    /// Submits a request for as many bytes as `data` has.
    fn submit(&mut self, op: RequestOp, lba: u64, data: &[u8]) -> Result<()> {
        let (queue, dma) = self.queue();
        let info = queue.info();
        let align = info.limits.dma.constraints().align;
        let direction = match op {
            RequestOp::Write => DmaDirection::ToDevice,
            _ => DmaDirection::FromDevice,
        };
        let block_count = u32::try_from(data.len() / info.device.logical_block_size)?;
        let prepared = NonZeroUsize::new(data.len()).map(|len| {
            let mut buffer = CpuDmaBuffer::new_zero(dma, len, align, direction)?;
            if op == RequestOp::Write {
                buffer.copy_from_slice_cpu(data);
            }
            Ok::<_, dma_api::DmaError>(buffer.prepare_for_device())
        });
        let (data, flags) = (prepared.transpose()?, RequestFlags::NONE);
        let request = OwnedRequest { op, lba, block_count, data, flags };
        let mut batch: OwnedRequestBatch = [request].into_iter().collect();
        let mut reports = Reports::default();
        let result = queue.submit_batch_owned(&mut batch, &mut reports);
        if result.accepted() != 1 || reports.accepted != 1 {
            return Err(format!("the driver refuses a request: {:?}", result.disposition()).into());
        }
        Ok(queue.commit_submissions()?)
    }

    /// Waits until a request has completed.
    fn wait(&mut self, irq: &mut WaitIrq) -> Result<CompletedRequest> {
        let (started, mut reports) = (Instant::now(), Reports::default());
        let request = loop {
            if let Some(request) = reports.completed.pop() {
                break request;
            }
            if started.elapsed() > LIMIT {
                return Err("a request does not complete".into());
            }
            self.serve(&mut reports, irq)?;
        };
        request.result?;
        Ok(request)
    }
}
