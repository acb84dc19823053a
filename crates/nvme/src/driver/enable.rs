//! Enabling, disabling and shutting down: CC.EN, CC.SHN and CSTS (Base 3.5.1 initialization, 3.6.1
//! shutdown, 3.7.2 reset).

use super::clock::{Backoff, Clock, SystemClock, Unpaused};
use super::error::Error;
use crate::registers::Registers;
use crate::spec::{Cap, Cc, Crto, Csts, Doorbell, doorbell_offset, offset};
use std::ops::Deref;

/// The shortest limit for a change of CSTS.RDY: CAP.TO may be 0.
const MIN_LIMIT_NS: u64 = 500_000_000;
/// The longest limit for a change of CSTS.RDY: CRTO can report nine hours.
const MAX_READY_LIMIT_NS: u64 = 600_000_000_000;
/// The limit for a shutdown where RTD3E is not reported.
const DEFAULT_SHUTDOWN_LIMIT_NS: u64 = 10_000_000_000;
/// The longest limit for a shutdown, whatever RTD3E reports: a drop waits for it.
const MAX_SHUTDOWN_LIMIT_NS: u64 = 60_000_000_000;

/// The limit of a wait for a change of CSTS.RDY.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReadyWait {
    /// The time that the controller reports.
    Reported,
    /// Read CSTS once: an earlier attempt waited for the full time.
    Once,
}

/// The configuration and status registers of a controller.
pub(super) struct EnableControl<'a, R> {
    registers: &'a ControllerRegisters<R>,
    clock: &'a dyn Clock,
}

impl<'a, R: Registers> EnableControl<'a, R> {
    pub(super) fn new(registers: &'a ControllerRegisters<R>, clock: &'a dyn Clock) -> Self {
        Self { registers, clock }
    }

    /// Enables a disabled controller and waits for CSTS.RDY.
    ///
    /// CSTS.CFS may still be set by a failure before CC.EN was cleared, of another program perhaps:
    /// then it says nothing about this enable before RDY is set or the time is over.
    pub(super) fn enable(&self) -> Result<(), Error> {
        let earlier = self.registers.csts()? & Csts::FATAL;
        self.registers.write32(offset::CC, Cc::ENABLED.0);
        let limit_ns = self.ready_limit_ns(Cc::ENABLED);
        let ended = (Csts::READY | Csts::FATAL).difference(earlier);
        match self.wait(limit_ns, |csts| csts.intersects(ended))? {
            Some(csts) if !csts.contains(Csts::FATAL) => Ok(()),
            None if earlier.is_empty() => Err(not_ready("ready", limit_ns)),
            _ => Err(Error::Fatal),
        }
    }

    /// Disables the controller. After success it makes no more accesses to memory.
    ///
    /// Clearing CC.EN while CSTS.RDY is 0 has undefined results (Base 3.1.3.5), so this first waits
    /// for an enable in progress, and leaves CC.EN set where that does not end.
    pub(super) fn disable(&self, wait: ReadyWait) -> Result<(), Error> {
        let mut csts = self.registers.csts()?;
        let cc = Cc(self.registers.read32(offset::CC));
        let limit = |ns| if wait == ReadyWait::Reported { ns } else { 0 };
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
                // RDY is 0 before and after: the other bits being cleared shows the reset.
                must_clear |= csts & (Csts::FATAL | shut_down);
            }
            self.registers.write32(offset::CC, cc.disabled().0);
            limit_ns = self.disable_limit_ns();
        }
        let stopped = self.wait(limit_ns, |csts| !csts.intersects(must_clear))?;
        stopped.map(drop).ok_or(not_ready("disabled", self.disable_limit_ns()))
    }

    /// Notifies the controller of a normal shutdown and waits until it has written back volatile
    /// data (Base 3.6.1). It stays enabled. Returns whether it completed in time; a controller that
    /// has failed is not notified.
    pub(super) fn shut_down(&self, rtd3_entry_us: u32) -> bool {
        let working = |csts: Csts| csts.contains(Csts::READY) && !csts.contains(Csts::FATAL);
        if !self.registers.csts().is_ok_and(working) {
            return false;
        }
        let cc = Cc(self.registers.read32(offset::CC));
        self.registers.write32(offset::CC, cc.shutting_down().0);
        let ended = |csts: Csts| csts.intersects(Csts::SHUTDOWN_COMPLETE | Csts::FATAL);
        let csts = self.wait(shutdown_limit_ns(rtd3_entry_us), ended);
        csts.is_ok_and(|csts| csts.is_some_and(|csts| csts.contains(Csts::SHUTDOWN_COMPLETE)))
    }

    /// Waits until CSTS satisfies `reached`; returns `None` on timeout. CSTS is read at least once.
    fn wait(&self, limit_ns: u64, reached: impl Fn(Csts) -> bool) -> Result<Option<Csts>, Error> {
        let start = self.clock.now_ns();
        let mut backoff = Backoff::default();
        loop {
            let csts = self.registers.csts()?;
            if reached(csts) {
                return Ok(Some(csts));
            }
            if self.clock.now_ns().saturating_sub(start) >= limit_ns {
                return Ok(None);
            }
            backoff.pause();
        }
    }

    /// Returns CAP.TO, or CRTO where that is longer: CAP.TO has only 8 bits.
    fn ready_limit_ns(&self, cc: Cc) -> u64 {
        let crto_ns = if self.registers.cap().has_ready_with_media_timeout() {
            let crto = Crto(self.registers.read32(offset::CRTO));
            if cc.ready_without_media() { crto.without_media_ns() } else { crto.with_media_ns() }
        } else {
            0
        };
        crto_ns.min(MAX_READY_LIMIT_NS).max(self.disable_limit_ns())
    }

    fn disable_limit_ns(&self) -> u64 {
        self.registers.cap().timeout_ns().max(MIN_LIMIT_NS)
    }
}

fn not_ready(wanted: &'static str, limit_ns: u64) -> Error {
    Error::NotReady { wanted, limit_ms: limit_ns / 1_000_000 }
}

fn shutdown_limit_ns(rtd3_entry_us: u32) -> u64 {
    match u64::from(rtd3_entry_us) * 1000 {
        0 => DEFAULT_SHUTDOWN_LIMIT_NS,
        ns => ns.clamp(MIN_LIMIT_NS, MAX_SHUTDOWN_LIMIT_NS),
    }
}

/// Disables the controller behind `registers`, which an earlier program may have left enabled.
pub(crate) fn disable_controller(registers: impl Registers) -> Result<(), Error> {
    let registers = ControllerRegisters::new(registers)?;
    EnableControl::new(&registers, &Unpaused::new(SystemClock::default()))
        .disable(ReadyWait::Reported)
}

// A controller's registers with its capabilities, and the doorbells at the stride that those name.

/// The registers of one controller; CAP is read once.
pub(super) struct ControllerRegisters<R> {
    registers: R,
    cap: Cap,
}

impl<R: Registers> ControllerRegisters<R> {
    /// Reads CAP.
    ///
    /// # Errors
    /// [`Error::Gone`] where it reads as all ones.
    pub(super) fn new(registers: R) -> Result<Self, Error> {
        let cap = Cap(registers.read64(offset::CAP));
        if cap.0 == u64::MAX { Err(Error::Gone) } else { Ok(Self { registers, cap }) }
    }

    pub(super) fn cap(&self) -> Cap {
        self.cap
    }

    /// Writes a doorbell. No queue has an identifier above [`max_queue_id`](Self::max_queue_id).
    #[inline]
    pub(super) fn ring_doorbell(&self, queue: u16, which: Doorbell, value: u32) {
        if let Some(offset) = doorbell_offset(queue, which, self.cap.doorbell_stride_shift()) {
            self.registers.write32(offset, value);
        }
    }

    /// Returns the highest queue identifier whose doorbells are below 4 GiB: CAP.DSTRD may put them
    /// 128 KiB apart.
    pub(super) fn max_queue_id(&self) -> u16 {
        let stride = self.cap.doorbell_stride_shift();
        let fits = |id: u16| doorbell_offset(id, Doorbell::CompletionHead, stride).is_some();
        (0..16).rev().fold(0, |id, bit| if fits(id | 1 << bit) { id | 1 << bit } else { id })
    }

    /// Reads CSTS.
    ///
    /// # Errors
    /// [`Error::Gone`] where it reads as all ones.
    pub(super) fn csts(&self) -> Result<Csts, Error> {
        match self.registers.read32(offset::CSTS) {
            Csts::GONE => Err(Error::Gone),
            csts => Ok(Csts::from_bits_retain(csts)),
        }
    }

    /// Checks that the controller is present and has not failed.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Fatal`].
    pub(super) fn check_status(&self) -> Result<(), Error> {
        if self.csts()?.contains(Csts::FATAL) { Err(Error::Fatal) } else { Ok(()) }
    }
}

impl<R> Deref for ControllerRegisters<R> {
    type Target = R;

    fn deref(&self) -> &R {
        &self.registers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The registers of a controller with this CAP.
    struct Capabilities(Cap);

    impl Registers for Capabilities {
        fn read32(&self, _: u32) -> u32 {
            0
        }
        fn read64(&self, _: u32) -> u64 {
            self.0.0
        }
        fn write32(&self, _: u32, _: u32) {}
        fn write64(&self, _: u32, _: u64) {}
    }

    #[test]
    fn a_wide_stride_limits_the_queues() {
        let max = |stride| {
            ControllerRegisters::new(Capabilities(Cap::new(1023, 1, stride)))
                .unwrap()
                .max_queue_id()
        };
        assert_eq!((max(0), max(12), max(15)), (u16::MAX, u16::MAX, 16_383));
    }
}
