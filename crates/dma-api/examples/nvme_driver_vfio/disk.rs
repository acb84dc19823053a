//! `nvme-driver`, unmodified, as its kernel would run it: registers by address, memory through
//! `dma-api`, interrupts that are waited for. Also used by the tests.

use dma_api::{CpuDmaBuffer, DeviceDma, DmaDirection};
use mmio_api::{MapError, MmioAddr, MmioOp, MmioRaw};
use nvme_driver::{Config, Nvme, NvmeBlockDriver};
use rdif_block::{
    BlockController, CompletedRequest, CompletionSink, ControllerEvent, ControllerState,
    ControllerUpdate, HardIrqHandler, HardwareQueue, IrqEndpoint, OwnedRequest, OwnedRequestBatch,
    RequestFlags, RequestId, RequestOp, SubmissionSink,
};
use std::error::Error;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// How long the controller may take for anything.
const LIMIT: Duration = Duration::from_secs(60);
/// The vectors of the admin queue and of the I/O queue.
const VECTORS: [u16; 2] = [0, 1];

/// Where the driver finds its controller.
pub(crate) struct Registers {
    /// The start of the registers in this process, which outlive the driver.
    pub(crate) at: NonNull<u8>,
    pub(crate) len: usize,
}

/// Waits for an interrupt of a vector, for a short time; whether there was one.
pub(crate) type WaitIrq<'w> = dyn FnMut(u16) -> Result<bool> + 'w;

/// Registers are mapped before the driver runs, so their address is theirs in this process.
struct Mapped;

impl MmioOp for Mapped {
    fn ioremap(&self, addr: MmioAddr, size: usize) -> std::result::Result<MmioRaw, MapError> {
        let virt = std::ptr::with_exposed_provenance_mut(addr.as_usize());
        let virt = NonNull::new(virt).ok_or(MapError::Invalid)?;
        // SAFETY: `Disk::start` passes the address and the length of mapped registers.
        Ok(unsafe { MmioRaw::new(addr, virt, size) })
    }

    fn iounmap(&self, _: &MmioRaw) {}
}

/// A disk behind the driver.
pub(crate) struct Disk {
    controller: NvmeBlockDriver,
    queue: Box<dyn HardwareQueue>,
    handlers: Vec<(usize, Box<dyn HardIrqHandler>)>,
    dma: DeviceDma,
}

/// What the queue reports.
#[derive(Default)]
struct Reports {
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

impl Disk {
    /// Starts the controller.
    pub(crate) fn start(registers: &Registers, dma: DeviceDma, irq: &mut WaitIrq) -> Result<Self> {
        let config = Config::msix(dma.page_size(), VECTORS).map_err(|error| error.to_string())?;
        let at = registers.at.as_ptr().expose_provenance();
        let nvme = Nvme::new(at, registers.len, dma.clone(), &Mapped, config);
        let nvme = nvme.map_err(|error| error.to_string())?;
        let mut controller = NvmeBlockDriver::from_nvme(nvme);
        let mut handlers = Vec::new();
        let started = Instant::now();
        let mut update = controller.advance(ControllerEvent::Start { target_queues: 1 })?;
        let queue = loop {
            handlers.extend(update.take_irq_endpoints().into_iter().map(endpoint));
            if let Some(queue) = update.take_queues().pop() {
                break queue;
            }
            if started.elapsed() > LIMIT {
                return Err("the controller does not become ready".into());
            }
            update = next(&mut controller, &update, &mut handlers, irq)?;
        };
        Ok(Self { controller, queue, handlers, dma })
    }

    /// Returns the number of blocks and their size.
    pub(crate) fn size(&self) -> (u64, usize) {
        let info = self.queue.info().device;
        (info.num_blocks, info.logical_block_size)
    }

    /// Returns the most bytes of one request.
    pub(crate) fn max_bytes(&self) -> usize {
        let limits = self.queue.info().limits;
        limits.max_blocks_per_request as usize * self.queue.info().device.logical_block_size
    }

    /// Writes `data` from block `lba` on.
    pub(crate) fn write(&mut self, lba: u64, data: &[u8], irq: &mut WaitIrq) -> Result<()> {
        self.submit(RequestOp::Write, lba, data)?;
        self.wait(1, irq).map(drop)
    }

    /// Reads into `data` from block `lba` on.
    pub(crate) fn read(&mut self, lba: u64, data: &mut [u8], irq: &mut WaitIrq) -> Result<()> {
        self.submit(RequestOp::Read, lba, data)?;
        let request = self.wait(1, irq)?.pop().ok_or("no request has completed")?;
        request.data.ok_or("a read without data")?.copy_to_slice_cpu(data);
        Ok(())
    }

    /// Submits a request for as many bytes as `data` has.
    pub(crate) fn submit(&mut self, op: RequestOp, lba: u64, data: &[u8]) -> Result<()> {
        let info = self.queue.info();
        let len = NonZeroUsize::new(data.len()).ok_or("a request of no bytes")?;
        let align = info.limits.dma.constraints().align;
        let direction = match op {
            RequestOp::Write => DmaDirection::ToDevice,
            _ => DmaDirection::FromDevice,
        };
        let mut buffer = CpuDmaBuffer::new_zero(&self.dma, len, align, direction)?;
        if op == RequestOp::Write {
            buffer.copy_from_slice_cpu(data);
        }
        let block_count = u32::try_from(data.len() / info.device.logical_block_size)?;
        let (data, flags) = (Some(buffer.prepare_for_device()), RequestFlags::NONE);
        let request = OwnedRequest { op, lba, block_count, data, flags };
        let mut batch: OwnedRequestBatch = [request].into_iter().collect();
        let mut reports = Reports::default();
        let result = self.queue.submit_batch_owned(&mut batch, &mut reports);
        if result.accepted() != 1 || reports.accepted != 1 {
            return Err(format!("the driver refuses a request: {:?}", result.disposition()).into());
        }
        Ok(self.queue.commit_submissions()?)
    }

    /// Waits until `count` requests have completed.
    pub(crate) fn wait(
        &mut self,
        count: usize,
        irq: &mut WaitIrq,
    ) -> Result<Vec<CompletedRequest>> {
        let (started, mut reports) = (Instant::now(), Reports::default());
        while reports.completed.len() < count {
            if started.elapsed() > LIMIT {
                return Err("a request does not complete".into());
            }
            if irq(VECTORS[1])? {
                acknowledge(&mut self.handlers, VECTORS[1])?;
                self.queue.drain_completions(&mut reports)?;
            }
        }
        for request in &reports.completed {
            request.result?;
        }
        Ok(reports.completed)
    }

    /// Stops the controller as the driver's interface says: interrupts, the controller, the queue.
    pub(crate) fn stop(mut self, irq: &mut WaitIrq) -> Result<()> {
        let started = Instant::now();
        self.controller.advance(ControllerEvent::QuiesceIrqs)?;
        let mut update = self.controller.advance(ControllerEvent::Shutdown)?;
        while update.controller_state() != ControllerState::Shutdown {
            if started.elapsed() > LIMIT {
                return Err("the controller does not stop".into());
            }
            update = next(&mut self.controller, &update, &mut self.handlers, irq)?;
        }
        self.queue.shutdown(&mut Reports::default())?;
        Ok(())
    }
}

fn endpoint(endpoint: IrqEndpoint) -> (usize, Box<dyn HardIrqHandler>) {
    (endpoint.source_id(), endpoint.into_handler())
}

/// Makes the next step of the controller's state machine.
fn next(
    controller: &mut NvmeBlockDriver,
    update: &ControllerUpdate,
    handlers: &mut [(usize, Box<dyn HardIrqHandler>)],
    irq: &mut WaitIrq,
) -> Result<ControllerUpdate> {
    Ok(match update.controller_state() {
        ControllerState::RegisterPending { retry_after } => {
            std::thread::sleep(retry_after);
            controller.advance(ControllerEvent::RegisterRetry)?
        }
        ControllerState::WaitingForIrq if irq(VECTORS[0])? => {
            let event = acknowledge(handlers, VECTORS[0])?;
            controller.advance(ControllerEvent::Irq(event))?
        }
        state => ControllerUpdate::state(state),
    })
}

/// Calls the driver's handler of an interrupt.
fn acknowledge(
    handlers: &mut [(usize, Box<dyn HardIrqHandler>)],
    vector: u16,
) -> Result<rdif_block::ControlEvent> {
    let mut all = handlers.iter_mut();
    let handler = all.find(|(source, _)| *source == usize::from(vector));
    let (_, handler) = handler.ok_or("an interrupt without a handler")?;
    Ok(handler.ack().control_event())
}
