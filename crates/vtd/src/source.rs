//! The source of a request.

use core::fmt;

/// A PCI function as requests name it: bus, device, function ("Source Identifier").
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SourceId(pub u16);

impl SourceId {
    /// Function `function` of device `device` on `bus`; of each as many bits as it has.
    pub const fn new(bus: u8, device: u8, function: u8) -> Self {
        Self((bus as u16) << 8 | (device as u16 & 0x1f) << 3 | function as u16 & 7)
    }

    pub(crate) const fn bus(self) -> u8 {
        (self.0 >> 8) as u8
    }

    pub(crate) const fn device_and_function(self) -> u8 {
        self.0.to_le_bytes()[0]
    }
}

impl fmt::Display for SourceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let low = self.device_and_function();
        write!(f, "{:02x}:{:02x}.{}", self.bus(), low >> 3, low & 7)
    }
}
