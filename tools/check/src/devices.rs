//! The devices that a program finds, as their user describes them.

use crate::findings::Findings;
use crate::function::{Function, Place};
use crate::hostile::{Behaviour, Given, Knob};
use crate::{nvme, virtio};
use pinfold::pci::Bdf;
use pinfold_nvme_model::{Media, ModelError};
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A device that the program finds.
#[derive(Clone)]
pub struct DeviceConfig {
    /// Its address.
    pub bdf: Bdf,
    /// Its IOMMU group.
    pub group: u32,
    /// The medium of its namespace, or of its disk.
    pub media: Arc<dyn Media>,
    /// What it is.
    pub model: DeviceModel,
}

/// What a device is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum DeviceModel {
    /// An NVMe controller with one namespace.
    Nvme {
        /// The size of a block: 512 or 4096.
        block_bytes: u32,
        /// For how long the namespace is not ready after a start.
        not_ready: Duration,
    },
    /// A virtio disk over PCI.
    VirtioBlk,
}

impl DeviceModel {
    /// Returns an NVMe controller with blocks of 512 bytes, whose namespace is ready at once.
    pub fn nvme() -> Self {
        Self::Nvme { block_bytes: 512, not_ready: Duration::ZERO }
    }
}

impl std::fmt::Debug for DeviceConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (bdf, model) = (&self.bdf, &self.model);
        f.debug_struct("DeviceConfig")
            .field("bdf", bdf)
            .field("model", model)
            .finish_non_exhaustive()
    }
}

/// Why a device could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The controller.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The disk is smaller than a sector.
    #[error("{bdf}: a disk of {bytes} bytes has no sector of 512")]
    Small {
        /// Its address.
        bdf: Bdf,
        /// The size of its medium.
        bytes: u64,
    },
    /// Two devices have the same address.
    #[error("two devices are at {bdf}: give one of them another address (BDF=soft:SIZE)")]
    Twice {
        /// The address.
        bdf: Bdf,
    },
    /// The memory of the registers, or the thread of the device.
    #[error("cannot create a device: {0}")]
    System(#[from] io::Error),
}

/// Makes the functions of the devices, with what follows from a seed and from knobs of their own.
pub(crate) fn build(
    devices: &[DeviceConfig],
    seed: Option<u64>,
    knobs: &[Knob],
    findings: &Arc<Findings>,
) -> Result<Vec<Arc<Function>>, DeviceError> {
    let mut functions: Vec<Arc<Function>> = Vec::new();
    for (number, device) in (0..).zip(devices) {
        let DeviceConfig { bdf, group, ref media, model } = *device;
        if functions.iter().any(|function| function.bdf == bdf) {
            return Err(DeviceError::Twice { bdf });
        }
        let place = Place { bdf, group };
        let bytes = media.bytes();
        let function = match model {
            DeviceModel::Nvme { block_bytes, not_ready } => {
                let given = Given { bytes, block_bytes, not_ready };
                let behaviour = Behaviour::new(seed, number, knobs, &given);
                let (scatter, knobs) = (behaviour.scatter(), behaviour.knobs());
                Function::new(place, nvme::layout(), findings, scatter, knobs, |port| {
                    nvme::start(port, media.clone(), &behaviour).map_err(DeviceError::from)
                })?
            }
            DeviceModel::VirtioBlk => {
                if bytes < 512 {
                    return Err(DeviceError::Small { bdf, bytes });
                }
                let given = Given { bytes, block_bytes: 512, not_ready: Duration::ZERO };
                let behaviour = Behaviour::new(seed, number, knobs, &given);
                let scatter = behaviour.scatter();
                let behaviour = behaviour.virtio();
                let (layout, knobs) = (virtio::layout(&behaviour), behaviour.knobs.clone());
                Function::new(place, layout, findings, scatter, knobs, |port| {
                    virtio::start(port, media.clone(), behaviour).map_err(DeviceError::from)
                })?
            }
        };
        functions.push(Arc::new(function));
    }
    Ok(functions)
}
