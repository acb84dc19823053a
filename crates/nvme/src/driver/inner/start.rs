//! Enabling a controller and reading what it is (Base 3.5.1, "Memory-based Controller
//! Initialization").

use super::state::{Control, Inner};
use crate::driver::enable::{EnableControl, ReadyWait};
use crate::driver::error::Error;
use crate::driver::identity::{self, Identity};
use crate::driver::retry::RetryDelays;
use crate::registers::Registers;
use crate::spec::{Command, ControllerData, Cqe, PAGE_BYTES, admin, cns, feature, offset};
use pinfold_core::dma_pool::ChunkSource;
use zerocopy::little_endian::U32;

/// The largest transfer of one command: five PRP list pages reach further.
const MAX_TRANSFER: u32 = 8 << 20;
const PAGE_BYTES_32: u32 = 4096;

impl<R: Registers, S: ChunkSource + Clone> Inner<R, S> {
    /// Disables and enables the controller and identifies it.
    pub(in crate::driver) fn start(&self) -> Result<(), Error> {
        let mut control = self.control();
        self.stop(&mut control, ReadyWait::Reported)?;
        let _transition = self.shared.begin_transition();
        control.admin.as_mut().ok_or(Error::NeedsReset)?.attach(&*self.registers);
        control.attached = true;
        let enabled = self.enable_control().enable();
        control.unresponsive = matches!(enabled, Err(Error::NotReady { .. }));
        enabled?;
        control.set_usable(true);
        self.identify(&mut control).inspect_err(|_| control.set_usable(false))
    }

    pub(in crate::driver) fn shut_down(&self) -> Result<(), Error> {
        let mut control = self.control();
        self.notify_shutdown(&control);
        self.stop(&mut control, ReadyWait::Reported)
    }

    /// Notifies a working controller of the shutdown. Its response does not affect what follows.
    pub(super) fn notify_shutdown(&self, control: &Control<S>) {
        if !control.attached || control.unresponsive {
            return;
        }
        let _transition = self.shared.begin_transition();
        if !self.enable_control().shut_down(control.info.rtd3_entry_us) {
            tracing::warn!("the controller did not complete its shutdown (CSTS.SHST)");
        }
    }

    /// Disables the controller. After success it makes no more accesses to memory, and what waited
    /// for that has been released.
    pub(super) fn stop(&self, control: &mut Control<S>, wait: ReadyWait) -> Result<(), Error> {
        let _transition = self.shared.begin_transition();
        control.set_usable(false);
        let stopped = self.enable_control().disable(wait);
        control.unresponsive = matches!(stopped, Err(Error::NotReady { .. }));
        stopped?;
        self.on_disabled(control);
        Ok(())
    }

    fn enable_control(&self) -> EnableControl<'_, R> {
        EnableControl::new(&self.registers, &*self.config.clock)
    }

    fn identify(&self, control: &mut Control<S>) -> Result<(), Error> {
        let command = Command::identify(0, cns::CONTROLLER);
        let data: Box<ControllerData> = self.fetch(control, "identify controller", command)?;
        if !data.supports_entries(Command::BYTES, Cqe::BYTES) {
            return Err(Error::EntrySize { sqes: data.sqes, cqes: data.cqes });
        }
        let delays = RetryDelays::new(&data);
        self.enable_retry_delays(control, delays)?;
        self.enable_events(control, &data)?;
        let queues = self.request_queues(control)?;
        let found = self.scan_namespaces(control, data.namespaces.get())?;
        let max = self.config.max_transfer_bytes.clamp(PAGE_BYTES_32, MAX_TRANSFER)
            & !(PAGE_BYTES_32 - 1);
        let version = self.registers.read32(offset::VS);
        let info = &mut control.info;
        info.identity =
            Identity { queues, ..identity::decode(&data, self.registers.cap(), max, version) };
        info.set_namespaces(found);
        self.shared.namespaces_scanned();
        info.retry_delays = delays;
        info.rtd3_entry_us = data.rtd3_entry_us.get();
        Ok(())
    }

    /// Tells a controller with retry delays that the driver waits for them (ACRE; Base, "Host
    /// Behavior Support"). One that rejects the feature reports no CRD.
    fn enable_retry_delays(
        &self,
        control: &mut Control<S>,
        delays: RetryDelays,
    ) -> Result<(), Error> {
        control.usable_admin()?.set_retry_delays(delays);
        if !delays.any() {
            return Ok(());
        }
        let command = Command {
            opcode: admin::SET_FEATURES,
            cdw10: U32::new(feature::HOST_BEHAVIOR.into()),
            ..Command::default()
        };
        match self.send_data(
            control,
            "set features: host behavior",
            command,
            &[feature::ADVANCED_RETRY],
        ) {
            Ok(_) | Err(Error::Admin { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Requests I/O queue pairs; returns how many the controller granted (Base 5.27.1.5; all counts
    /// 0-based).
    fn request_queues(&self, control: &mut Control<S>) -> Result<u16, Error> {
        let limit = self.registers.max_queue_id();
        let wanted = u32::from(self.config.queues.clamp(1, limit.max(1)) - 1).min(0xfffe);
        let command = Command {
            opcode: admin::SET_FEATURES,
            cdw10: U32::new(feature::NUMBER_OF_QUEUES.into()),
            cdw11: U32::new(wanted | wanted << 16),
            ..Command::default()
        };
        let granted = self.execute(control, "set features: number of queues", command)?;
        let granted = (granted & 0xffff).min(granted >> 16).min(wanted) + 1;
        Ok(u16::try_from(granted).unwrap_or(u16::MAX))
    }
}

const _: () = assert!(PAGE_BYTES == PAGE_BYTES_32 as usize);
