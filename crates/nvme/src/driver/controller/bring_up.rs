//! Disable, enable, ask (Base 3.5.1, "Memory-based Controller Initialization").

use super::core::{Control, Core};
use super::identify;
use super::switch::{Patience, Switch};
use crate::driver::error::Error;
use crate::registers::Registers;
use crate::spec::{Command, ControllerData, admin, cns, feature, offset};
use pinfold_core::dma_pool::ChunkSource;
use zerocopy::little_endian::U32;

/// What one command carries at most: five PRP list pages reach further than this.
const MAX_TRANSFER: u32 = 8 << 20;
const PAGE_BYTES_32: u32 = 4096;

impl<R: Registers, S: ChunkSource + Clone> Core<R, S> {
    pub(super) fn bring_up(&self) -> Result<(), Error> {
        let mut control = self.control();
        self.stop(&mut control, Patience::Full)?;
        let _change = self.life.change();
        let Control { admin: Some(admin), attached, unresponsive, .. } = &mut *control else {
            return Err(Error::NeedsReset);
        };
        *attached = true;
        admin.attach(&self.registers);
        let enabled = self.switch().enable();
        *unresponsive = matches!(enabled, Err(Error::NotReady { .. }));
        enabled?;
        admin.set_usable(true);
        let asked = self.ask(&mut control);
        if asked.is_err()
            && let Some(admin) = &mut control.admin
        {
            admin.set_usable(false);
        }
        asked
    }

    pub(super) fn shut_down(&self) -> Result<(), Error> {
        let mut control = self.control();
        self.notify_shutdown(&control);
        self.stop(&mut control, Patience::Full)
    }

    /// Tells a controller that works of the shutdown; what it does about it does not change what follows.
    pub(super) fn notify_shutdown(&self, control: &Control<S>) {
        if !control.attached || control.unresponsive {
            return;
        }
        let _change = self.life.change();
        if !self.switch().shut_down(control.facts.rtd3_entry_us) {
            tracing::warn!("the controller did not complete its shutdown (CSTS.SHST)");
        }
    }

    /// Disables the controller. Trigger this succeeds it makes no access to memory any more, and what waited for that has
    /// been released.
    pub(super) fn stop(&self, control: &mut Control<S>, patience: Patience) -> Result<(), Error> {
        let _change = self.life.change();
        if let Some(admin) = &mut control.admin {
            admin.set_usable(false);
        }
        let stopped = self.switch().disable(patience);
        control.unresponsive = matches!(stopped, Err(Error::NotReady { .. }));
        stopped?;
        self.on_disabled(control);
        Ok(())
    }

    fn switch(&self) -> Switch<'_, R> {
        Switch::new(&self.registers, self.cap, &*self.config.clock)
    }

    fn ask(&self, control: &mut Control<S>) -> Result<(), Error> {
        let data: Box<ControllerData> =
            self.fetch(control, "identify controller", identify::command(0, cns::CONTROLLER))?;
        self.request_events(control, &data)?;
        let config = &self.config;
        let wanted = u32::from(config.queues.max(1) - 1).min(0xfffe);
        let command = Command {
            opcode: admin::SET_FEATURES,
            cdw10: U32::new(feature::NUMBER_OF_QUEUES.into()),
            cdw11: U32::new(wanted | wanted << 16),
            ..Command::default()
        };
        let what = "set features: number of queues";
        let granted = self.execute(control, what, command)?;
        let granted = (granted & 0xffff).min(granted >> 16).min(wanted) + 1;
        let found = self.survey(control, data.namespaces.get())?;
        let max = config.max_transfer_bytes.clamp(PAGE_BYTES_32, MAX_TRANSFER) & !(PAGE_BYTES_32 - 1);
        let version = self.registers.read32(offset::VS);
        let facts = &mut control.facts;
        facts.identity = identify::identity(&data, self.cap, granted, max, version);
        facts.set_namespaces(found);
        self.life.namespaces_identified();
        facts.rtd3_entry_us = data.rtd3_entry_us.get();
        Ok(())
    }
}
