//! A controller's registers with its capabilities, and the doorbells at the stride that those name.

use super::error::Error;
use crate::registers::Registers;
use crate::spec::{Cap, Csts, Doorbell, doorbell_offset, offset};
use std::ops::Deref;

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
