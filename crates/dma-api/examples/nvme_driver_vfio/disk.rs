//! `nvme-driver`, unmodified, as its kernel would run it. Also used by the tests.

use super::block::{Blocks, LIMIT, Mapped, Registers, Reports, Result, WaitIrq};
use dma_api::DeviceDma;
use nvme_driver::{Config, Nvme, NvmeBlockDriver};
use rdif_block::{
    BlockController, ControllerEvent, ControllerState, ControllerUpdate, HardIrqHandler,
    HardwareQueue, IrqEndpoint,
};
use std::time::Instant;

/// The vectors of the admin queue and of the I/O queue.
const VECTORS: [u16; 2] = [0, 1];

/// A disk behind the driver.
pub(crate) struct Disk {
    controller: NvmeBlockDriver,
    queue: Box<dyn HardwareQueue>,
    handlers: Vec<(usize, Box<dyn HardIrqHandler>)>,
    dma: DeviceDma,
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

impl Blocks for Disk {
    fn queue(&mut self) -> (&mut dyn HardwareQueue, &DeviceDma) {
        (&mut *self.queue, &self.dma)
    }

    fn serve(&mut self, reports: &mut Reports, irq: &mut WaitIrq) -> Result<()> {
        if irq(VECTORS[1])? {
            acknowledge(&mut self.handlers, VECTORS[1])?;
            self.queue.drain_completions(reports)?;
        }
        Ok(())
    }
}

fn endpoint(endpoint: IrqEndpoint) -> (usize, Box<dyn HardIrqHandler>) {
    (endpoint.source_id(), endpoint.into_handler())
}

/// Executes the next step of the controller's state machine.
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
