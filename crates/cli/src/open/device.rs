//! A controller that can be driven: its registers, its interrupts, and what it runs on.

use super::{ControllerMedium, OpenError, Use};
use crate::stack::Stack;
use pinfold::{Arena, MappingPolicy, Source};
use pinfold_nvme::driver::{Config, Controller, Namespace, Vector};
use pinfold_nvme::vfio::PciController;
use pinfold_nvme::{Interrupt, Registers};
use pinfold_nvme_model::{self as model, FileMedia, Media, MemoryMedia, ModelConfig, ModelController};
use std::sync::Arc;
use std::time::Duration;

/// How long the driver waits for an answer: a controller that has not answered by then never will.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A controller that was started.
pub(crate) type Driver = Controller<Arc<dyn Registers>, Arena>;

/// A controller, and what it runs on.
pub(crate) struct Device {
    registers: Arc<dyn Registers>,
    /// The vectors that may be used, from number 1 on: number 0 is the admin queue's.
    vectors: Vec<Vector>,
    /// The namespace that was named.
    nsid: Option<u32>,
    /// Dropped last.
    _keeper: Keeper,
}

#[expect(dead_code, reason = "kept for their drops")]
enum Keeper {
    /// Runs until it is dropped.
    Model(ModelController),
    /// Can reach memory until it is dropped.
    Pci(PciController),
}

impl Device {
    /// The controller of a medium, with interrupts as they are asked for.
    pub(crate) fn open(
        name: &str,
        medium: ControllerMedium,
        stack: &Stack,
        how: Use,
    ) -> Result<Self, OpenError> {
        let media: Arc<dyn Media> = match medium {
            ControllerMedium::Pci { pci, nsid } => {
                return Ok(Self {
                    registers: pci.registers(),
                    vectors: (1..).map_while(|number| pci.vector(number)).collect(),
                    nsid: Some(nsid),
                    _keeper: Keeper::Pci(pci),
                });
            }
            ControllerMedium::Image { file, bytes } => Arc::new(FileMedia::from_file(file, bytes)),
            ControllerMedium::Memory { bytes, .. } => Arc::new(MemoryMedia::new(bytes)),
        };
        let model_error = |error| OpenError::Model { name: name.to_owned(), error };
        let namespace = model::Namespace::new(media, 512).map_err(model_error)?;
        let port = stack.port().ok_or_else(|| OpenError::NoNamespace(name.to_owned()))?;
        let mut config = ModelConfig::new(vec![namespace]);
        config.queues = config.queues.max(u16::try_from(how.jobs).unwrap_or(u16::MAX));
        if !how.poll {
            config.vectors = u16::try_from(how.jobs).unwrap_or(u16::MAX).saturating_add(1);
        }
        let vectors = config.vectors;
        let model = ModelController::spawn(port, config).map_err(model_error)?;
        let vectors = (1..vectors).map_while(|number| {
            let interrupt: Arc<dyn Interrupt> = model.interrupt(number)?;
            Some(Vector { number, interrupt })
        });
        let vectors = vectors.collect();
        Ok(Self {
            registers: Arc::new(model.registers()),
            vectors,
            nsid: None,
            _keeper: Keeper::Model(model),
        })
    }

    /// Starts the controller, and finds its namespace: the one that was named, or the first.
    pub(crate) fn start(
        &self,
        name: &str,
        stack: &Stack,
        how: Use,
    ) -> Result<(Driver, Namespace), OpenError> {
        let controller = self.controller(name, stack, how)?;
        let namespace = find(name, &controller, self.nsid)?;
        Ok((controller, namespace))
    }

    /// Starts the controller.
    pub(crate) fn controller(&self, name: &str, stack: &Stack, how: Use) -> Result<Driver, OpenError> {
        let queues = u16::try_from(how.jobs).unwrap_or(u16::MAX);
        let config = Config { timeout: TIMEOUT, queues, ..Config::default() };
        let source = stack.control.clone().ok_or_else(|| OpenError::NoNamespace(name.to_owned()))?;
        Controller::start(self.registers.clone(), source, config)
            .map_err(|error| OpenError::Driver { name: name.to_owned(), error })
    }

    /// Whether each of so many jobs can have an interrupt.
    pub(crate) fn has_interrupts(&self, jobs: usize) -> bool {
        self.vectors.len() >= jobs
    }

    /// The interrupt of a job, where it shall have one.
    pub(crate) fn vector(&self, job: usize, how: Use) -> Option<Vector> {
        self.vectors.get(job).filter(|_| !how.poll && self.has_interrupts(how.jobs)).cloned()
    }
}

/// Starts a real controller in little memory of its own, to ask it something.
pub(super) fn start_alone(name: &str, pci: &PciController) -> Result<Driver, OpenError> {
    let rings = Arena::builder().size(1 << 20).source(Source::Plain).mapping_policy(MappingPolicy::Whole);
    let rings = rings.build(pci.domain());
    let rings = rings.map_err(|error| OpenError::Rings { name: name.to_owned(), error })?;
    let registers: Arc<dyn Registers> = pci.registers();
    Controller::start(registers, rings, Config { timeout: TIMEOUT, ..Config::default() })
        .map_err(|error| OpenError::Driver { name: name.to_owned(), error })
}

/// The namespace that was named, or the first that can be used.
pub(super) fn find(name: &str, controller: &Driver, nsid: Option<u32>) -> Result<Namespace, OpenError> {
    match nsid {
        None => {
            controller.namespaces().first().copied().ok_or_else(|| OpenError::NoNamespace(name.to_owned()))
        }
        Some(nsid) => controller.namespace(nsid).map_err(|reason| OpenError::NoSuchNamespace {
            name: name.to_owned(),
            nsid,
            reason,
        }),
    }
}
