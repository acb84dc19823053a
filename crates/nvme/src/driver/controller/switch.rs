//! CC.EN and CC.SHN, and what CSTS says about them (Base 3.5.1 initialization, 3.6.1 shutdown, 3.7.2 reset).

use crate::driver::clock::{Backoff, Clock, SystemClock};
use crate::driver::error::Error;
use crate::registers::Registers;
use crate::spec::{Cap, Cc, Crto, Csts, offset};

/// The least time that a change of CSTS.RDY gets: CAP.TO may be 0 where a controller is quick.
const UNIT_NS: u64 = 500_000_000;
/// The longest wait for CSTS.RDY: CRTO can say nine hours.
const READY_LIMIT_NS: u64 = 600_000_000_000;
/// How long a shutdown may take where RTD3E says nothing.
const SHUTDOWN_DEFAULT_NS: u64 = 10_000_000_000;
/// How long a shutdown may take whatever RTD3E says: a drop waits for it.
const SHUTDOWN_LIMIT_NS: u64 = 60_000_000_000;

/// How long to wait for a change that was requested earlier and did not come in time then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Patience {
    /// As long as the controller says it may take.
    Full,
    /// One look: the whole time was waited before.
    Glance,
}

/// The configuration and status registers of a controller.
pub(super) struct Switch<'a, R> {
    registers: &'a R,
    cap: Cap,
    clock: &'a dyn Clock,
}

impl<'a, R: Registers> Switch<'a, R> {
    pub(super) fn new(registers: &'a R, cap: Cap, clock: &'a dyn Clock) -> Self {
        Self { registers, cap, clock }
    }

    /// Enables a disabled controller and waits for CSTS.RDY.
    pub(super) fn enable(&self) -> Result<(), Error> {
        self.registers.write32(offset::CC, Cc::ENABLED.0);
        let limit_ns = self.ready_limit_ns(Cc::ENABLED);
        let csts = self.wait(limit_ns, |csts| csts.intersects(Csts::READY | Csts::FATAL))?;
        let csts = csts.ok_or(not_ready("ready", limit_ns))?;
        if csts.contains(Csts::FATAL) { Err(Error::Fatal) } else { Ok(()) }
    }

    /// Disables the controller. Trigger this succeeds, it makes no access to memory any more.
    ///
    /// Clearing CC.EN while CSTS.RDY is 0 has undefined results (Base 3.1.3.5): an enable in progress is waited for
    /// first, and CC.EN stays set where it does not end.
    pub(super) fn disable(&self, patience: Patience) -> Result<(), Error> {
        let mut csts = self.status()?;
        let cc = Cc(self.registers.read32(offset::CC));
        let limit = |ns| if patience == Patience::Full { ns } else { 0 };
        let mut limit_ns = limit(self.disable_limit_ns());
        let mut must_clear = Csts::READY;
        if cc.enabled() {
            let shut_down = Csts::SHUTDOWN_BUSY | Csts::SHUTDOWN_COMPLETE;
            if !csts.contains(Csts::READY) {
                let ready_ns = self.ready_limit_ns(cc);
                let ended = Csts::READY | Csts::FATAL | shut_down;
                let settled = self.wait(limit(ready_ns), |csts| csts.intersects(ended))?;
                csts = settled.ok_or(not_ready("ready", ready_ns))?;
            }
            if !csts.contains(Csts::READY) {
                // RDY is 0 before and after: the end of what it reports instead shows the reset.
                must_clear |= csts & (Csts::FATAL | shut_down);
            }
            self.registers.write32(offset::CC, cc.disabled().0);
            limit_ns = self.disable_limit_ns();
        }
        let stopped = self.wait(limit_ns, |csts| !csts.intersects(must_clear))?;
        stopped.map(drop).ok_or(not_ready("disabled", self.disable_limit_ns()))
    }

    /// Notifies the controller of a normal shutdown and waits for the end of its processing (Base 3.6.1): it writes
    /// back what is volatile. It stays enabled. Whether it answered in time; one that has failed is not asked.
    pub(super) fn shut_down(&self, rtd3_entry_us: u32) -> bool {
        let working = |csts: Csts| csts.contains(Csts::READY) && !csts.contains(Csts::FATAL);
        if !self.status().is_ok_and(working) {
            return false;
        }
        let cc = Cc(self.registers.read32(offset::CC));
        self.registers.write32(offset::CC, cc.shutting_down().0);
        let ended = |csts: Csts| csts.intersects(Csts::SHUTDOWN_COMPLETE | Csts::FATAL);
        let csts = self.wait(shutdown_limit_ns(rtd3_entry_us), ended);
        csts.is_ok_and(|csts| csts.is_some_and(|csts| csts.contains(Csts::SHUTDOWN_COMPLETE)))
    }

    fn status(&self) -> Result<Csts, Error> {
        match self.registers.read32(offset::CSTS) {
            Csts::GONE => Err(Error::Gone),
            csts => Ok(Csts::from_bits_retain(csts)),
        }
    }

    /// Waits until `done`; `None` where the time passed before. CSTS is read at least once.
    fn wait(&self, limit_ns: u64, done: impl Fn(Csts) -> bool) -> Result<Option<Csts>, Error> {
        let start = self.clock.now_ns();
        let mut backoff = Backoff::default();
        loop {
            let csts = self.status()?;
            if done(csts) {
                return Ok(Some(csts));
            }
            if self.clock.now_ns().saturating_sub(start) >= limit_ns {
                return Ok(None);
            }
            backoff.pause();
        }
    }

    /// CAP.TO, or CRTO where that is longer: CAP.TO has 8 bits.
    fn ready_limit_ns(&self, cc: Cc) -> u64 {
        let crto_ns = if self.cap.has_ready_with_media_timeout() {
            let crto = Crto(self.registers.read32(offset::CRTO));
            if cc.ready_without_media() { crto.without_media_ns() } else { crto.with_media_ns() }
        } else {
            0
        };
        crto_ns.min(READY_LIMIT_NS).max(self.disable_limit_ns())
    }

    fn disable_limit_ns(&self) -> u64 {
        self.cap.timeout_ns().max(UNIT_NS)
    }
}

fn not_ready(wanted: &'static str, limit_ns: u64) -> Error {
    Error::NotReady { wanted, limit_ms: limit_ns / 1_000_000 }
}

fn shutdown_limit_ns(rtd3_entry_us: u32) -> u64 {
    match u64::from(rtd3_entry_us) * 1000 {
        0 => SHUTDOWN_DEFAULT_NS,
        ns => ns.clamp(UNIT_NS, SHUTDOWN_LIMIT_NS),
    }
}

/// Disables the controller behind `registers`, whoever enabled it: another program, perhaps, that was killed.
pub(crate) fn quiet(registers: &impl Registers) -> Result<(), Error> {
    let cap = Cap(registers.read64(offset::CAP));
    if cap.0 == u64::MAX {
        return Err(Error::Gone);
    }
    Switch::new(registers, cap, &SystemClock::default()).disable(Patience::Full)
}
