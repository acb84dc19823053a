//! A PCI function as the program sees it: configuration space, BARs, interrupts, and the model of a
//! device behind them.

use crate::findings::Findings;
use crate::irq::Irqs;
use crate::pci::{Config, Identity, Layout};
use crate::space::Space;
use crate::sys::window::SharedMemory;
use crate::watch::Watch;
use pinfold::pci::Bdf;
use pinfold_soft::Random;
use rustix::fs::OFlags;
use serde::Serialize;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A function without its device: the registers in BAR 0, which the device polls, its interrupts, and
/// its accesses to memory.
#[derive(Clone, Debug)]
pub(crate) struct Port {
    pub(crate) memory: Arc<SharedMemory>,
    pub(crate) irqs: Arc<Irqs>,
    pub(crate) watch: Arc<Watch>,
}

/// The model of a device behind a function.
pub(crate) trait Endpoint: std::fmt::Debug + Send + Sync {
    /// Reads registers of BAR 4, inside it.
    fn read(&self, at: u32, to: &mut [u8]);
    /// Writes registers of BAR 4, inside it.
    fn write(&self, at: u32, from: &[u8]);
    /// Resets the device: when it returns, the device makes no more accesses.
    fn reset(&self);
    /// Returns whether the program has disabled the device, and sees that it is.
    fn is_disabled(&self) -> bool;
    /// Returns whether the device was removed.
    fn is_removed(&self) -> bool;
    /// Returns how many requests it has executed.
    fn requests(&self) -> u64;
}

/// What has become of a device while the program ran.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Fate {
    /// It has failed (CSTS.CFS, or DEVICE_NEEDS_RESET of a virtio disk), as the knob `cfs` says or
    /// because of what the driver did.
    pub failed: bool,
    /// It was removed, as the knob `remove` says.
    pub removed: bool,
}

/// Where a function is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) bdf: Bdf,
    pub(crate) group: u32,
}

/// A function, and the state that the program's calls change.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) bdf: Bdf,
    pub(crate) group: u32,
    pub(crate) layout: Layout,
    pub(crate) irqs: Arc<Irqs>,
    pub(crate) watch: Arc<Watch>,
    config: Mutex<Config>,
    memory: Arc<SharedMemory>,
    endpoint: Box<dyn Endpoint>,
    knobs: Vec<String>,
}

impl Function {
    /// Creates a function of this layout, with the device that `start` makes.
    pub(crate) fn new<E: From<io::Error>>(
        Place { bdf, group }: Place,
        layout: Layout,
        findings: &Arc<Findings>,
        scatter: Option<Random>,
        knobs: Vec<String>,
        start: impl FnOnce(&Port) -> Result<Box<dyn Endpoint>, E>,
    ) -> Result<Self, E> {
        let (bytes, registers) = (layout.bar_bytes, layout.register_bytes);
        let memory = Arc::new(SharedMemory::new("vfio-device", bytes, registers)?);
        let irqs = Arc::new(Irqs::new(memory.clone(), layout.table, findings.clone()));
        let watch = Arc::new(Watch::new(bdf.to_string(), findings.clone(), scatter));
        watch.set_device(memory.clone());
        let port = Port { memory, irqs, watch };
        let endpoint = start(&port)?;
        let config = Mutex::new(Config::new(&layout));
        let Port { memory, irqs, watch } = port;
        Ok(Self { bdf, group, layout, irqs, watch, config, memory, endpoint, knobs })
    }

    // Each change leaves it consistent.
    fn config(&self) -> MutexGuard<'_, Config> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn knobs(&self) -> &[String] {
        &self.knobs
    }

    /// Returns how many requests the device has executed.
    pub(crate) fn requests(&self) -> u64 {
        self.endpoint.requests()
    }

    /// Returns what has become of the device.
    pub(crate) fn fate(&self) -> Fate {
        Fate { failed: self.watch.has_ever_failed(), removed: self.endpoint.is_removed() }
    }

    /// Returns a descriptor of the device, with a file description of its own, locked as long as
    /// any copy of it, or a map, exists. Of the caller's `flags` it has the mode and `O_NONBLOCK`.
    pub(crate) fn open(&self, flags: OFlags) -> io::Result<OwnedFd> {
        self.memory.open_for_program(flags & (OFlags::ACCMODE | OFlags::NONBLOCK))
    }

    /// Returns whether the program still has a descriptor of the device, or a map of it.
    pub(crate) fn is_open(&self) -> bool {
        self.memory.is_open()
    }

    /// Returns the file of the device's descriptors.
    pub(crate) fn inode(&self) -> io::Result<crate::process::Inode> {
        let found = rustix::fs::fstat(&*self.memory)?;
        Ok((found.st_dev, found.st_ino))
    }

    /// Returns all of the configuration space, for sysfs.
    pub(crate) fn config_bytes(&self) -> Vec<u8> {
        self.config().read(0, 256).to_vec()
    }

    pub(crate) fn identity(&self) -> Identity {
        self.layout.identity
    }

    /// Reads configuration space.
    pub(crate) fn read_config(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = self.config().read(at, len).to_vec();
        if self.endpoint.is_removed() {
            bytes.fill(0xff);
        }
        bytes
    }

    /// Writes configuration space; returns how many bytes.
    pub(crate) fn write_config(&self, at: usize, from: &[u8]) -> usize {
        let (count, effect) = self.config().write(at, from);
        if let Some(on) = effect.bus_master {
            self.watch.set_bus_master(on);
        }
        if effect.reset {
            self.reset();
        }
        count
    }

    /// Returns whether the device answers at its BARs.
    pub(crate) fn decodes_memory(&self) -> bool {
        self.config().decodes_memory()
    }

    /// Reads BAR 4, inside it.
    pub(crate) fn read_registers(&self, at: u32, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.endpoint.read(at, &mut bytes);
        bytes
    }

    /// Writes BAR 4, inside it.
    pub(crate) fn write_registers(&self, at: u32, from: &[u8]) {
        self.endpoint.write(at, from);
    }

    /// Returns whether the program has disabled the device, and sees that it is.
    pub(crate) fn is_disabled(&self) -> bool {
        self.endpoint.is_disabled()
    }

    /// Shows in configuration space which interrupts are enabled.
    pub(crate) fn show_interrupts(&self) {
        let enabled = |kind| self.irqs.is_enabled(kind);
        let (msi, msix) = (enabled(crate::irq::MSI), enabled(crate::irq::MSIX));
        self.config().set_interrupts(msi, msix);
    }

    /// Resets the function, as `VFIO_DEVICE_RESET` does: the kernel then restores the registers of
    /// configuration space.
    pub(crate) fn reset(&self) {
        self.end(false);
    }

    /// Resets the device, and reports what was in flight until then; `closed`: as the last close
    /// does.
    fn end(&self, closed: bool) {
        self.watch.before_reset(closed);
        self.endpoint.reset();
        // One that was removed stays as it is.
        if !self.endpoint.is_removed() {
            self.watch.after_reset(closed);
        }
    }

    /// Ends the use of the device, as the last close does.
    pub(crate) fn close(&self) {
        self.end(true);
        self.irqs.clear();
        self.config().reset();
        self.watch.set_bus_master(false);
        self.watch.attach(None);
    }

    pub(crate) fn attach(&self, space: Option<Arc<Space>>) {
        self.watch.attach(space);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that does nothing, and may have been removed.
    #[derive(Debug)]
    struct Still {
        removed: bool,
    }

    impl Endpoint for Still {
        fn read(&self, _at: u32, _to: &mut [u8]) {}
        fn write(&self, _at: u32, _from: &[u8]) {}
        fn reset(&self) {}
        fn is_disabled(&self) -> bool {
            true
        }
        fn is_removed(&self) -> bool {
            self.removed
        }
        fn requests(&self) -> u64 {
            0
        }
    }

    /// Returns whether a device that was removed, or has failed, is out of order after a reset, and
    /// its fate.
    fn after_reset(removed: bool) -> (bool, Fate) {
        let place = Place { bdf: "0000:01:00.0".parse().unwrap(), group: 7 };
        let (layout, findings) = (crate::nvme::layout(), Arc::new(Findings::default()));
        let start = |_: &Port| Ok::<_, io::Error>(Box::new(Still { removed }) as Box<dyn Endpoint>);
        let function = Function::new(place, layout, &findings, None, Vec::new(), start).unwrap();
        match removed {
            true => function.watch.removed(),
            false => function.watch.failed(),
        }
        assert!(function.watch.has_failed());
        function.reset();
        (function.watch.has_failed(), function.fate())
    }

    #[test]
    fn a_reset_mends_a_failure_and_no_removal() {
        assert_eq!(after_reset(false), (false, Fate { failed: true, removed: false }));
        assert_eq!(after_reset(true), (true, Fate { failed: false, removed: true }));
    }
}
