//! An NVMe controller behind a PCI function: the model controller of `pinfold-nvme-model`.

mod observer;
mod pointer;

use crate::function::{Endpoint, Port};
use crate::hostile::Behaviour;
use crate::pci::{Identity, Layout};
use crate::watch::WatchedBus;
use observer::{Limits, Observing};
use pinfold_nvme::spec::{PAGE, SglSupport, offset};
use pinfold_nvme_model::{
    Door, Media, ModelConfig, ModelController, ModelError, Namespace, RegisterWindow,
};
use std::sync::Arc;

/// The size of BAR 0, the end of its registers and doorbells, and the MSI-X table and pending bits
/// behind them.
const BAR_BYTES: u32 = 0x8000;
const REGISTER_BYTES: u32 = 0x6000;
const MSIX_TABLE: u32 = 0x6000;
const MSIX_PENDING: u32 = 0x7000;
/// The number of MSI-X vectors, and of messages without MSI-X.
const VECTORS: u16 = 33;
const MESSAGES: u16 = 32;
/// Identity: QEMU's NVMe controller, which drivers know.
const IDENTITY: Identity =
    Identity { id: [0x1b36, 0x0010], subsystem: [0x1af4, 0x1100], class: 0x01_0802, revision: 2 };

/// Returns what the function of a controller shows.
pub(crate) fn layout() -> Layout {
    Layout {
        identity: IDENTITY,
        bar_bytes: BAR_BYTES,
        register_bytes: REGISTER_BYTES,
        table: MSIX_TABLE,
        pending: MSIX_PENDING,
        vectors: VECTORS,
        messages: MESSAGES,
        called_bytes: 0,
        vendor: Vec::new(),
    }
}

/// A controller.
#[derive(Debug)]
struct Controller {
    model: ModelController,
    port: Port,
}

/// Starts a controller that behaves so.
pub(crate) fn start(
    port: &Port,
    media: Arc<dyn Media>,
    behaviour: &Behaviour,
) -> Result<Box<dyn Endpoint>, ModelError> {
    let block_bytes = behaviour.block_bytes();
    let blocks = media.bytes() / u64::from(block_bytes);
    let mut config = ModelConfig::new(vec![Namespace::new(media, block_bytes)?]);
    config.vectors = VECTORS;
    behaviour.configure(&mut config);
    let limits = Limits {
        block_bytes,
        blocks,
        page_size: PAGE << config.mpsmin,
        mdts: config.mdts,
        mqes: config.mqes,
        has_sgls: config.sgls != SglSupport::Unsupported,
    };
    let (watch, irqs) = (port.watch.clone(), port.irqs.clone());
    let door = Door {
        window: Some(port.memory.clone()),
        interrupts: Some(port.irqs.clone()),
        observer: Some(Arc::new(Observing { watch, irqs, limits })),
    };
    let bus = WatchedBus(port.watch.clone());
    let model = ModelController::spawn_behind(bus, config, door)?;
    behaviour.apply(&model.faults(), &port.watch);
    Ok(Box::new(Controller { model, port: port.clone() }))
}

impl Endpoint for Controller {
    // It has no BAR 4.
    fn read(&self, _at: u32, to: &mut [u8]) {
        to.fill(0xff);
    }

    fn write(&self, _at: u32, _from: &[u8]) {}

    fn reset(&self) {
        self.model.reset();
    }

    fn is_disabled(&self) -> bool {
        let enabled = |at| self.port.memory.load(at) & 1 != 0;
        !enabled(offset::CC) && !enabled(offset::CSTS)
    }

    fn is_removed(&self) -> bool {
        self.model.is_removed()
    }

    fn requests(&self) -> u64 {
        self.model.stats().commands
    }
}
