//! A PCI function: configuration space, BAR 0, interrupts, and the controller behind them.

use crate::findings::Findings;
use crate::hostile::{Behaviour, Given};
use crate::irq::Irqs;
use crate::pci::{Config, Identity};
use crate::space::Space;
use crate::sys::window::SharedMemory;
use crate::watch::{Limits, Watch, WatchedBus};
use pinfold::pci::Bdf;
use pinfold_nvme::spec::PAGE;
use pinfold_nvme_model::{
    Door, Media, ModelConfig, ModelController, ModelError, ModelEvent, ModelStats, Namespace,
    Observer, RegisterWindow,
};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The size of BAR 0, the end of its registers and doorbells, and the MSI-X table and pending bits
/// behind them.
pub(crate) const BAR_BYTES: u32 = 0x8000;
const REGISTER_BYTES: u32 = 0x6000;
const MSIX_TABLE: u32 = 0x6000;
const MSIX_PENDING: u32 = 0x7000;
/// The number of MSI-X vectors.
pub(crate) const VECTORS: u16 = 33;
/// Identity: QEMU's NVMe controller, which drivers know.
const IDENTITY: Identity =
    Identity { id: [0x1b36, 0x0010], subsystem: [0x1af4, 0x1100], class: 0x01_0802, revision: 2 };

/// A device that the program finds.
#[derive(Clone)]
pub struct DeviceConfig {
    /// Its address.
    pub bdf: Bdf,
    /// Its IOMMU group.
    pub group: u32,
    /// The medium of its namespace.
    pub media: Arc<dyn Media>,
    /// The size of a block: 512 or 4096.
    pub block_bytes: u32,
    /// For how long the namespace is not ready after a start.
    pub not_ready: Duration,
}

impl DeviceConfig {
    /// Returns what is not left to a seed.
    pub(crate) fn given(&self) -> Given {
        let (block_bytes, not_ready) = (self.block_bytes, self.not_ready);
        Given { bytes: self.media.bytes(), block_bytes, not_ready }
    }
}

impl std::fmt::Debug for DeviceConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceConfig").field("bdf", &self.bdf).finish_non_exhaustive()
    }
}

/// Why a device could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The controller.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The memory of the registers.
    #[error("cannot create the registers of a device: {0}")]
    Memory(#[from] io::Error),
}

/// Shows the events to the watch, and a removal to the program: the kernel then requests the device.
struct Observing(Arc<Watch>, Arc<Irqs>);

impl Observer for Observing {
    fn observe(&self, event: &ModelEvent<'_>) {
        let Self(watch, irqs) = self;
        watch.observe(event);
        if matches!(event, ModelEvent::Removed) {
            irqs.trigger(crate::irq::REQUEST, 0);
        }
    }
}

/// A function, and the state that the program's calls change.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) bdf: Bdf,
    pub(crate) group: u32,
    pub(crate) irqs: Arc<Irqs>,
    pub(crate) watch: Arc<Watch>,
    config: Mutex<Config>,
    memory: Arc<SharedMemory>,
    model: ModelController,
    knobs: Vec<String>,
}

impl Function {
    /// Creates a function that behaves so.
    pub(crate) fn new(
        device: &DeviceConfig,
        behaviour: Behaviour,
        findings: &Arc<Findings>,
    ) -> Result<Self, DeviceError> {
        let block_bytes = behaviour.block_bytes();
        let namespace = Namespace::new(device.media.clone(), block_bytes)?;
        let mut config = ModelConfig::new(vec![namespace]);
        config.vectors = VECTORS;
        behaviour.configure(&mut config);
        let memory = SharedMemory::new("vfio-device", BAR_BYTES, REGISTER_BYTES)?;
        let memory = Arc::new(memory);
        let irqs = Arc::new(Irqs::new(memory.clone(), MSIX_TABLE, findings.clone()));
        let limits = Limits {
            block_bytes,
            page_size: PAGE << config.mpsmin,
            mdts: config.mdts,
            has_sgls: config.sgls != pinfold_nvme::spec::SglSupport::Unsupported,
        };
        let name = device.bdf.to_string();
        let watch = Arc::new(Watch::new(name, findings.clone(), limits, behaviour.scatter()));
        let door = Door {
            window: Some(memory.clone()),
            interrupts: Some(irqs.clone()),
            observer: Some(Arc::new(Observing(watch.clone(), irqs.clone()))),
        };
        let bus = WatchedBus(watch.clone());
        let model = ModelController::spawn_behind(bus, config, door)?;
        behaviour.apply(&model.faults(), &watch);
        let config = Config::new(&IDENTITY, BAR_BYTES, VECTORS, MSIX_TABLE, MSIX_PENDING);
        Ok(Self {
            bdf: device.bdf,
            group: device.group,
            irqs,
            watch,
            config: Mutex::new(config),
            memory,
            model,
            knobs: behaviour.knobs(),
        })
    }

    // Each change leaves it consistent.
    fn config(&self) -> MutexGuard<'_, Config> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn knobs(&self) -> &[String] {
        &self.knobs
    }

    pub(crate) fn stats(&self) -> ModelStats {
        self.model.stats()
    }

    /// Returns a descriptor of the device, with a file description of its own, locked as long as
    /// any copy of it, or a map, exists.
    pub(crate) fn open(&self) -> io::Result<OwnedFd> {
        let fd = self.memory.open()?;
        rustix::fs::flock(&fd, rustix::fs::FlockOperation::NonBlockingLockShared)?;
        Ok(fd)
    }

    /// Returns whether the program still has a descriptor of the device, or a map of it.
    pub(crate) fn is_open(&self) -> bool {
        use rustix::fs::{FlockOperation, flock};
        let Ok(probe) = self.memory.open() else { return true };
        // The lock ends with the probe.
        flock(&probe, FlockOperation::NonBlockingLockExclusive).is_err()
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
        IDENTITY
    }

    /// Reads configuration space.
    pub(crate) fn read_config(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = self.config().read(at, len).to_vec();
        if self.model.is_removed() {
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

    /// Returns whether the program has disabled the controller, and sees that it is.
    pub(crate) fn is_disabled(&self) -> bool {
        let enabled = |at| self.memory.load(at) & 1 != 0;
        !enabled(pinfold_nvme::spec::offset::CC) && !enabled(pinfold_nvme::spec::offset::CSTS)
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
        self.watch.before_reset(false);
        self.model.reset();
    }

    /// Ends the use of the device, as the last close does.
    pub(crate) fn close(&self) {
        self.watch.before_reset(true);
        self.model.reset();
        self.irqs.clear();
        self.config().reset();
        self.watch.set_bus_master(false);
        self.watch.attach(None);
    }

    pub(crate) fn attach(&self, space: Option<Arc<Space>>) {
        self.watch.attach(space);
    }
}
