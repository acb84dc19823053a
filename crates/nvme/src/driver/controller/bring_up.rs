//! Disable, enable, ask (Base 3.5.1, "Memory-based Controller Initialization").

use super::core::{Control, Core};
use super::identify;
use crate::driver::clock::{Backoff, Clock, SystemClock};
use crate::driver::error::Error;
use crate::registers::Registers;
use crate::spec::{Cap, Cc, Command, ControllerData, Csts, admin, cns, feature, offset};
use pinfold_core::dma_pool::ChunkSource;
use zerocopy::little_endian::U32;

/// What one command carries at most: five PRP list pages reach further than this.
const MAX_TRANSFER: u32 = 8 << 20;
const PAGE_BYTES_32: u32 = 4096;

impl<R: Registers, S: ChunkSource + Clone> Core<R, S> {
    pub(super) fn bring_up(&self) -> Result<(), Error> {
        let mut control = self.control();
        let _change = self.life.change();
        if let Some(admin) = &mut control.admin {
            admin.set_usable(false);
        }
        self.disable()?;
        self.on_disabled(&mut control);
        let Control { admin: Some(admin), .. } = &mut *control else { return Err(Error::NeedsReset) };
        admin.attach(&self.registers);
        self.registers.write32(offset::CC, Cc::ENABLED.0);
        wait_ready(&self.registers, self.cap, &*self.config.clock, true)?;
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
        let _change = self.life.change();
        if let Some(admin) = &mut control.admin {
            admin.set_usable(false);
        }
        self.disable()?;
        self.on_disabled(&mut control);
        Ok(())
    }

    /// When this succeeds, the controller makes no access to memory any more.
    pub(super) fn disable(&self) -> Result<(), Error> {
        disable(&self.registers, self.cap, &*self.config.clock)
    }

    fn ask(&self, control: &mut Control<S>) -> Result<(), Error> {
        let data: Box<ControllerData> =
            self.fetch(control, "identify controller", identify::command(0, cns::CONTROLLER))?;
        let Control { admin: Some(admin), .. } = control else { return Err(Error::NeedsReset) };
        let config = &self.config;
        let wanted = u32::from(config.queues.max(1) - 1).min(0xfffe);
        let command = Command {
            opcode: admin::SET_FEATURES,
            cdw10: U32::new(feature::NUMBER_OF_QUEUES.into()),
            cdw11: U32::new(wanted | wanted << 16),
            ..Command::default()
        };
        let what = "set features: number of queues";
        let granted = admin.execute(&self.registers, self.cap, config, what, command)?;
        let granted = (granted & 0xffff).min(granted >> 16).min(wanted) + 1;
        let mut namespaces = Vec::new();
        for found in self.survey(control)? {
            match found.usable() {
                Some(namespace) => namespaces.push(namespace),
                None => {
                    tracing::warn!(
                        found.nsid,
                        "left out: blocks are not 512 or 4096 bytes, or carry metadata"
                    );
                }
            }
        }
        let max = config.max_transfer_bytes.clamp(PAGE_BYTES_32, MAX_TRANSFER) & !(PAGE_BYTES_32 - 1);
        let version = self.registers.read32(offset::VS);
        let facts = &mut control.facts;
        facts.identity = identify::identity(&data, self.cap, granted, max, version);
        facts.namespaces = namespaces.into();
        Ok(())
    }
}

/// Disables the controller behind `registers`, whoever enabled it: another program, perhaps, that was killed.
pub(crate) fn quiet(registers: &impl Registers) -> Result<(), Error> {
    let cap = Cap(registers.read64(offset::CAP));
    if cap.0 == u64::MAX {
        return Err(Error::Gone);
    }
    disable(registers, cap, &SystemClock::default())
}

/// When this succeeds, the controller makes no access to memory any more.
fn disable(registers: &impl Registers, cap: Cap, clock: &dyn Clock) -> Result<(), Error> {
    if registers.read32(offset::CSTS) == Csts::GONE {
        return Err(Error::Gone);
    }
    registers.write32(offset::CC, Cc::DISABLED.0);
    wait_ready(registers, cap, clock, false)
}

/// Waits until CSTS.RDY is `ready`, at most CAP.TO.
fn wait_ready(registers: &impl Registers, cap: Cap, clock: &dyn Clock, ready: bool) -> Result<(), Error> {
    // TO may be 0 where a controller is quick; one unit is then what it gets.
    let limit = cap.timeout_ns().max(500_000_000);
    let start = clock.now_ns();
    let mut backoff = Backoff::default();
    loop {
        let csts = registers.read32(offset::CSTS);
        if csts == Csts::GONE {
            return Err(Error::Gone);
        }
        let csts = Csts::from_bits_retain(csts);
        // While it is being disabled it may still show the failure for which it is reset.
        if ready && csts.contains(Csts::FATAL) {
            return Err(Error::Fatal);
        }
        if csts.contains(Csts::READY) == ready {
            return Ok(());
        }
        if clock.now_ns().saturating_sub(start) >= limit {
            let wanted = if ready { "ready" } else { "disabled" };
            return Err(Error::NotReady { wanted, limit_ms: limit / 1_000_000 });
        }
        backoff.pause();
    }
}
