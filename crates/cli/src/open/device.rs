//! A controller that can be driven: its registers, its interrupts, and what it runs on.

use super::{ControllerMedium, OpenError, Use};
use crate::stack::Stack;
use pinfold::Arena;
use pinfold_nvme::driver::{Config, Controller, Namespace, Vector};
use pinfold_nvme::model::{self, FileMedia, Media, MemoryMedia, ModelConfig, ModelController};
use pinfold_nvme::{Interrupt, Registers};
use std::sync::Arc;
use std::time::Duration;

/// How long the driver waits for an answer: a controller that has not answered by then never will.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A controller, and what it runs on.
pub(crate) struct Device {
    registers: Arc<dyn Registers>,
    /// Where the vectors arrive that were asked for, the first one at number 1; number 0 is the admin queue's.
    vectors: Vec<Arc<dyn Interrupt>>,
    /// The namespace that was named.
    nsid: Option<u32>,
    /// Dropped last.
    _keeper: Keeper,
}

enum Keeper {
    /// Runs until it is dropped.
    Model(#[expect(dead_code, reason = "kept for its drop")] ModelController),
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
            ControllerMedium::Image { file, bytes } => Arc::new(FileMedia::from_file(file, bytes)),
            ControllerMedium::Memory { bytes } => Arc::new(MemoryMedia::new(bytes)),
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
        let vectors =
            (1..vectors).map_while(|n| model.interrupt(n).map(|event| -> Arc<dyn Interrupt> { event }));
        Ok(Self {
            registers: Arc::new(model.registers()),
            vectors: vectors.collect(),
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
    ) -> Result<(Controller<Arc<dyn Registers>, Arena>, Namespace), OpenError> {
        let controller = self.controller(name, stack, how)?;
        let namespaces = controller.namespaces();
        let namespace = match self.nsid {
            None => namespaces.first().ok_or_else(|| OpenError::NoNamespace(name.to_owned())),
            Some(nsid) => {
                let found = namespaces.iter().find(|namespace| namespace.nsid == nsid);
                found.ok_or_else(|| OpenError::NoSuchNamespace { name: name.to_owned(), nsid })
            }
        };
        let namespace = *namespace?;
        Ok((controller, namespace))
    }

    /// Starts the controller.
    pub(crate) fn controller(
        &self,
        name: &str,
        stack: &Stack,
        how: Use,
    ) -> Result<Controller<Arc<dyn Registers>, Arena>, OpenError> {
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
        let interrupt = self.vectors.get(job).filter(|_| !how.poll && self.has_interrupts(how.jobs))?.clone();
        let number = u16::try_from(job).ok()?.checked_add(1)?;
        Some(Vector { number, interrupt })
    }
}
