//! Frames of a zone, single and in runs of 2 MiB.

use super::{BenchError, Hand};
use pinfold_core::frame::{self, Frame, Order, Zone};

impl Hand for frame::Local<&frame::Zone> {
    type Thing = Frame;
    #[inline(always)]
    fn get(&mut self) -> Result<Frame, BenchError> {
        Ok(self.alloc(Order::PAGE)?)
    }
    #[inline(always)]
    fn put(&mut self, frame: Frame) -> Result<(), BenchError> {
        Ok(self.free(frame, Order::PAGE)?)
    }
    #[inline(always)]
    fn number(frame: &Frame) -> u64 {
        frame.offset()
    }
}

impl Hand for &Zone {
    type Thing = Frame;
    #[inline(always)]
    fn get(&mut self) -> Result<Frame, BenchError> {
        Ok(self.alloc(Order::PAGE)?)
    }
    #[inline(always)]
    fn put(&mut self, frame: Frame) -> Result<(), BenchError> {
        Ok(self.free(frame, Order::PAGE)?)
    }
    #[inline(always)]
    fn number(frame: &Frame) -> u64 {
        frame.offset()
    }
}

/// Whole hugepages of a zone, runs of 2 MiB.
pub(in crate::suite) struct Huge<H>(pub(in crate::suite) H);

impl Hand for Huge<frame::Local<&frame::Zone>> {
    type Thing = Frame;
    #[inline(always)]
    fn get(&mut self) -> Result<Frame, BenchError> {
        Ok(self.0.alloc(Order::HUGE)?)
    }
    #[inline(always)]
    fn put(&mut self, run: Frame) -> Result<(), BenchError> {
        Ok(self.0.free(run, Order::HUGE)?)
    }
    #[inline(always)]
    fn number(run: &Frame) -> u64 {
        run.offset()
    }
}

impl Hand for Huge<&Zone> {
    type Thing = Frame;
    #[inline(always)]
    fn get(&mut self) -> Result<Frame, BenchError> {
        Ok(self.0.alloc(Order::HUGE)?)
    }
    #[inline(always)]
    fn put(&mut self, run: Frame) -> Result<(), BenchError> {
        Ok(self.0.free(run, Order::HUGE)?)
    }
    #[inline(always)]
    fn number(run: &Frame) -> u64 {
        run.offset()
    }
}
