//! Network interfaces, and what a process needs to receive from them.

use super::error::{CallError, at};
use crate::sys::limits::MemlockLimit;
use crate::sys::netdev;
use crate::sys::privileges::Privileges;

/// A network interface, as it was when it was looked up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interface {
    name: String,
    facts: netdev::Facts,
}

impl Interface {
    /// Looks an interface up in the network namespace of the calling thread.
    ///
    /// # Errors
    /// [`CallError`], with `ENODEV` if there is none of this name.
    pub fn named(name: &str) -> Result<Self, CallError> {
        let facts = netdev::facts(name).map_err(at("ioctl (the interface)"))?;
        Ok(Self { name: name.to_owned(), facts })
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its index.
    pub fn index(&self) -> u32 {
        self.facts.index
    }

    /// Returns the largest packet in bytes, without the header of the link layer.
    pub fn mtu(&self) -> u32 {
        self.facts.mtu
    }

    /// Returns whether it is up.
    pub fn is_up(&self) -> bool {
        self.facts.is_up
    }

    /// Returns how many queues receive; `None` if the driver does not say (`ethtool --show-channels`).
    pub fn queues(&self) -> Option<u32> {
        self.facts.queues
    }
}

/// Returns the capabilities that `AF_XDP` requires and the calling thread lacks, by the names that `setcap` takes.
pub fn missing_capabilities() -> Vec<&'static str> {
    Privileges::here().missing
}

/// Returns what the calling thread may do, and why a call is not permitted to it ([`Privileges::af_xdp_advice`]).
pub fn privileges() -> Privileges {
    Privileges::here()
}

/// Returns the limit that the registered memory counts against.
pub fn memlock_limit() -> MemlockLimit {
    MemlockLimit::here()
}
