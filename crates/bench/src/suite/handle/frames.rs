//! Frames of a zone: single ones, and runs of 2 MiB.

use super::api::{Object, handle};
use pinfold_core::frame::{Frame, Local, Order, Zone};

impl Object for Frame {
    #[inline(always)]
    fn address(&self) -> u64 {
        self.offset()
    }
}

handle!(['z] Local<&'z Zone>, Frame, |zone| zone.alloc(Order::PAGE)?, |zone, frame| zone.free(frame, Order::PAGE)?);
handle!(
    ['z] &'z Zone, Frame,
    |zone| Zone::alloc(zone, Order::PAGE)?, |zone, frame| Zone::free(zone, frame, Order::PAGE)?
);

/// Runs of 2 MiB of a zone.
pub(in crate::suite) struct Huge<H>(pub(in crate::suite) H);

handle!(['z] Huge<Local<&'z Zone>>, Frame, |zone| zone.0.alloc(Order::HUGE)?, |zone, run| zone.0.free(run, Order::HUGE)?);
handle!(['z] Huge<&'z Zone>, Frame, |zone| zone.0.alloc(Order::HUGE)?, |zone, run| zone.0.free(run, Order::HUGE)?);
