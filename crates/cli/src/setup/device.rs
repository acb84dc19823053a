//! A controller that can be driven: its registers, its interrupts, and the model or device behind
//! them.

use super::driver::{self, Driver};
use super::error::OpenError;
use super::options::TargetOptions;
use super::resolve::ControllerMedium;
use super::stack::Stack;
use pinfold_nvme::driver::{Namespace, Vector};
use pinfold_nvme::vfio::PciController;
use pinfold_nvme::{Interrupt, Registers};
use pinfold_nvme_model::{
    self as model, FileMedia, Media, MemoryMedia, ModelConfig, ModelController,
};
use std::sync::Arc;

/// A controller that can be driven.
pub(crate) struct Device {
    registers: Arc<dyn Registers>,
    /// The vectors from number 1; number 0 is the admin queue's.
    vectors: Vec<Vector>,
    /// The namespace that was named.
    nsid: Option<u32>,
    /// Dropped last.
    _backing: Backing,
}

#[expect(dead_code, reason = "held until they are dropped")]
enum Backing {
    /// It runs until it is dropped.
    Model(ModelController),
    /// The device can reach memory until it is dropped.
    Pci(PciController),
}

impl Device {
    /// Opens the controller of a medium, with the interrupts that `options` asks for.
    pub(crate) fn open(
        name: &str,
        medium: ControllerMedium,
        stack: &Stack,
        options: TargetOptions,
    ) -> Result<Self, OpenError> {
        let (media, soft): (Arc<dyn Media>, _) = match medium {
            ControllerMedium::Pci { pci, nsid } => {
                return Ok(Self {
                    registers: pci.registers(),
                    vectors: (1..).map_while(|number| pci.vector(number)).collect(),
                    nsid: Some(nsid),
                    _backing: Backing::Pci(pci),
                });
            }
            ControllerMedium::Image { file, bytes, options } => {
                (Arc::new(FileMedia::from_file(file, bytes)), options)
            }
            ControllerMedium::Memory { bytes, options, .. } => {
                (Arc::new(MemoryMedia::new(bytes)), options)
            }
        };
        let model_error = |error| OpenError::Model { name: name.to_owned(), error };
        let namespace = model::Namespace::new(media, soft.block_bytes).map_err(model_error)?;
        let port = stack.port().ok_or_else(|| OpenError::NoNamespace(name.to_owned()))?;
        let mut config = ModelConfig::new(vec![namespace]);
        config.not_ready = soft.not_ready;
        let jobs = u16::try_from(options.jobs).unwrap_or(u16::MAX);
        config.queues = config.queues.max(jobs);
        if !options.poll {
            config.vectors = jobs.saturating_add(1);
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
            _backing: Backing::Model(model),
        })
    }

    /// Starts the controller and finds its namespace: the named one, or the first usable one.
    pub(crate) fn start(
        &self,
        name: &str,
        stack: &Stack,
        options: TargetOptions,
    ) -> Result<(Driver, Namespace), OpenError> {
        let controller = self.controller(name, stack, options)?;
        let namespace = driver::find_namespace(name, &controller, self.nsid)?;
        Ok((controller, namespace))
    }

    /// Starts the controller.
    pub(crate) fn controller(
        &self,
        name: &str,
        stack: &Stack,
        options: TargetOptions,
    ) -> Result<Driver, OpenError> {
        let queues = u16::try_from(options.jobs).unwrap_or(u16::MAX);
        let memory =
            stack.control.clone().ok_or_else(|| OpenError::NoNamespace(name.to_owned()))?;
        driver::start(name, self.registers.clone(), memory, queues, stack.retry_limit)
    }

    /// Returns whether each of `jobs` jobs can have an interrupt.
    pub(crate) fn has_interrupts(&self, jobs: usize) -> bool {
        self.vectors.len() >= jobs
    }

    /// Returns the interrupt of a job, unless it polls.
    pub(crate) fn vector(&self, job: usize, options: TargetOptions) -> Option<Vector> {
        let used = !options.poll && self.has_interrupts(options.jobs);
        self.vectors.get(job).filter(|_| used).cloned()
    }
}
