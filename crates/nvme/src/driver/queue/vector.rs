//! The interrupt vector of a queue.

use crate::interrupt::Interrupt;
use std::fmt;
use std::sync::Arc;

/// An interrupt vector of the controller.
#[derive(Clone)]
pub struct Vector {
    /// The index into the controller's MSI-X table.
    pub number: u16,
    /// Where the interrupt arrives.
    pub interrupt: Arc<dyn Interrupt>,
}

impl fmt::Debug for Vector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vector").field("number", &self.number).finish_non_exhaustive()
    }
}
