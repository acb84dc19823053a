//! `ahci-driver`, unmodified, as its kernel would run it.

use super::block::{Blocks, LIMIT, Mapped, Registers, Reports, Result, WaitIrq};
use ahci_driver::{AhciConfig, AhciHost};
use dma_api::DeviceDma;
use rdif_block::{
    BBlockController, BlockControllerGroup, ControlEvent, ControllerEvent, ControllerState,
    GroupControllerEvent, GroupIrqEvent, GroupIrqSink, HardwareQueue, SharedHardIrqHandler,
};
use std::time::Instant;

/// The disk at the first port with one.
pub(crate) struct Disk {
    host: AhciHost,
    port: BBlockController,
    queue: Box<dyn HardwareQueue>,
    handler: Box<dyn SharedHardIrqHandler>,
    source: usize,
    dma: DeviceDma,
}

/// The events of the port that an interrupt reports.
#[derive(Default)]
struct Events(Vec<ControlEvent>);

impl GroupIrqSink for Events {
    fn publish(&mut self, event: GroupIrqEvent) {
        self.0.push(event.control());
    }
}

impl Disk {
    /// Starts the controller and its first port.
    pub(crate) fn start(registers: &Registers, dma: DeviceDma, irq: &mut WaitIrq) -> Result<Self> {
        mmio_api::init(&Mapped);
        let at = registers.at.as_ptr().expose_provenance();
        let mmio = mmio_api::ioremap(at.into(), registers.len)?;
        let mut host = AhciHost::new("ahci".to_owned(), mmio, dma.clone(), AhciConfig::generic())?;
        let started = Instant::now();
        let mut update = host.advance(GroupControllerEvent::Start)?;
        while let ControllerState::RegisterPending { retry_after } = update.controller_state() {
            in_time(started)?;
            std::thread::sleep(retry_after);
            update = host.advance(GroupControllerEvent::RegisterRetry)?;
        }
        let endpoint = update.take_irq_endpoints().pop().ok_or("no interrupt")?;
        let (source, handler) = (endpoint.source_id(), endpoint.into_handler());
        let member = update.take_members().into_iter().next().ok_or("no disk")?;
        let mut port = member.into_controller();
        let mut update = port.advance(ControllerEvent::Start { target_queues: 1 })?;
        while let ControllerState::RegisterPending { retry_after } = update.controller_state() {
            in_time(started)?;
            std::thread::sleep(retry_after);
            update = port.advance(ControllerEvent::RegisterRetry)?;
        }
        let queue = update.take_queues().pop().ok_or("no queue")?;
        let mut disk = Self { host, port, queue, handler, source, dma };
        disk.port.advance(ControllerEvent::Rearm { source_id: source })?;
        disk.host.advance(GroupControllerEvent::Rearm { source_id: source })?;
        // Until the disk is identified.
        while disk.port.advance(ControllerEvent::OnlineSmp { target_queues: 1 }).is_err() {
            in_time(started)?;
            disk.serve(&mut Reports::default(), irq)?;
        }
        Ok(disk)
    }

    /// Stops the port, its queue, and the controller.
    pub(crate) fn stop(mut self) -> Result<()> {
        let started = Instant::now();
        self.port.advance(ControllerEvent::QuiesceIrqs)?;
        let mut update = self.port.advance(ControllerEvent::Shutdown)?;
        while update.controller_state() != ControllerState::Shutdown {
            in_time(started)?;
            update = self.port.advance(ControllerEvent::RegisterRetry)?;
        }
        self.queue.shutdown(&mut Reports::default())?;
        self.host.advance(GroupControllerEvent::QuiesceIrqs)?;
        self.host.advance(GroupControllerEvent::Shutdown)?;
        Ok(())
    }
}

impl Blocks for Disk {
    fn queue(&mut self) -> (&mut dyn HardwareQueue, &DeviceDma) {
        (&mut *self.queue, &self.dma)
    }

    fn serve(&mut self, reports: &mut Reports, irq: &mut WaitIrq) -> Result<()> {
        if irq(0)? {
            let mut events = Events::default();
            self.handler.ack(&mut events);
            for event in events.0 {
                self.queue.drain_completions(reports)?;
                self.port.advance(ControllerEvent::Irq(event))?;
                // The handler masked it.
                self.port.advance(ControllerEvent::Rearm { source_id: self.source })?;
            }
        }
        Ok(())
    }
}

fn in_time(started: Instant) -> Result<()> {
    if started.elapsed() > LIMIT { Err("the controller does not answer".into()) } else { Ok(()) }
}
