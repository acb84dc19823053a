//! A target that is open, with a queue for each job; the size and number of requests that it
//! allows.

use super::error::{LimitError, OpenError};
use super::resolve::{
    ControllerMedium, Driver, Medium, RealController, ResolvedTarget, find_namespace, start_driver,
};
use super::stack::Stack;
use crate::targets::file::{self, FileOptions, FileTarget};
use crate::targets::nvme::{self, FLUSH_LIMIT, LostData, NvmeOptions, NvmeStats, NvmeTarget};
use crate::targets::target::{Durability, Target, TargetInfo};
use crate::units::ByteSize;
use pinfold::uring::FileError;
use pinfold::{Arena, Buffer};
use pinfold_core::dma_pool::DmaPoolStats;
use pinfold_core::domain::Pinned;
use pinfold_nvme::driver::{Namespace, Vector};
use pinfold_nvme::{Interrupt, Registers};
use pinfold_nvme_model::{
    self as model, FileMedia, Media, MemoryMedia, ModelConfig, ModelController,
};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// A queue for each job: at least one.
struct PerJob<T> {
    first: T,
    rest: Vec<T>,
}

impl<T> PerJob<T> {
    fn new<E>(jobs: usize, mut create: impl FnMut(usize) -> Result<T, E>) -> Result<Self, E> {
        let first = create(0)?;
        let rest = (1..jobs).map(create).collect::<Result<_, _>>()?;
        Ok(Self { first, rest })
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        std::iter::once(&self.first).chain(&self.rest)
    }

    fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        std::iter::once(&mut self.first).chain(&mut self.rest)
    }
}

type NamespaceTarget<B> = NvmeTarget<B, Arc<dyn Registers>, Arena>;

/// An open target for data in memory of type `B`.
pub(crate) struct OpenTarget<'d, B: Pinned = Buffer> {
    queues: Queues<'d, B>,
    notes: Vec<String>,
}

enum Queues<'d, B: Pinned> {
    File(Box<PerJob<FileTarget<'d, B>>>),
    Nvme {
        /// Dropped first, so that the controller is disabled before its device is closed.
        queues: Box<PerJob<NamespaceTarget<B>>>,
        _device: Device,
    },
}

impl<'d, B: Pinned> OpenTarget<'d, B> {
    /// Opens `target` for use with the buffers of `stack`.
    pub(crate) fn open(
        target: ResolvedTarget,
        stack: &'d Stack,
        options: TargetOptions,
    ) -> Result<Self, OpenError> {
        let name = target.name;
        let device = match target.medium {
            Medium::File(file) => return Self::file(&name, &file, &target.path, stack, options),
            Medium::Controller(medium) => Device::open(&name, medium, stack, options)?,
        };
        let TargetOptions { depth, jobs, jobs_option: option, poll, .. } = options;
        let (controller, namespace) = device.start(&name, stack, options)?;
        let granted = controller.identify().queues;
        if jobs > usize::from(granted) {
            return Err(OpenError::Queues { name, option, jobs, granted });
        }
        let mut notes = Vec::new();
        if !poll && !device.has_interrupts(jobs) {
            notes.push(format!(
                "{name}: it has no interrupt for each job, so completions are polled"
            ));
        }
        let lost = LostData::default();
        let queues = PerJob::new(jobs, |job| {
            let options = NvmeOptions {
                domain: &stack.domain,
                protect: stack.protect,
                controller: controller.clone(),
                namespace,
                depth,
                vector: device.vector(job, options),
                flush_limit: FLUSH_LIMIT,
            };
            let queue = NvmeTarget::new(name.clone(), options);
            queue
                .map(|queue| queue.sharing(&lost))
                .map_err(|error| OpenError::Queue { name: name.clone(), error })
        })?;
        Ok(Self { queues: Queues::Nvme { queues: Box::new(queues), _device: device }, notes })
    }

    fn file(
        name: &str,
        file: &File,
        path: &Path,
        stack: &'d Stack,
        TargetOptions { alignment, depth, jobs, poll, direct, one_thread, .. }: TargetOptions,
    ) -> Result<Self, OpenError> {
        // With several jobs, each queue moves to the thread of its job.
        let one_thread = jobs == 1 && one_thread;
        let options = FileOptions { alignment, depth, direct, poll, one_thread };
        let durability = Durability::default();
        let queues = PerJob::new(jobs, |_| {
            let file = file.try_clone();
            let file = file.map_err(|error| OpenError::System { name: name.to_owned(), error })?;
            let queue =
                FileTarget::new(file, path, options, stack.fixed()).map_err(OpenError::File);
            queue.map(|queue| queue.sharing(&durability))
        })?;
        let notes = merged(name, jobs, queues.iter().flat_map(FileTarget::notes));
        Ok(Self { queues: Queues::File(Box::new(queues)), notes })
    }

    /// Returns the target, through the first job's queue.
    pub(crate) fn target(&mut self) -> &mut dyn Target<B> {
        match &mut self.queues {
            Queues::File(queues) => &mut queues.first,
            Queues::Nvme { queues, .. } => &mut queues.first,
        }
    }

    /// Returns the target through the queue of each job.
    pub(crate) fn targets(&mut self) -> Vec<&mut (dyn Target<B> + Send)> {
        match &mut self.queues {
            Queues::File(queues) => {
                queues.iter_mut().map(|t| -> &mut (dyn Target<B> + Send) { t }).collect()
            }
            Queues::Nvme { queues, .. } => {
                queues.iter_mut().map(|t| -> &mut (dyn Target<B> + Send) { t }).collect()
            }
        }
    }

    /// Returns the controller's statistics, if there is one.
    pub(crate) fn nvme_stats(&self) -> Option<NvmeStats> {
        let Queues::Nvme { queues, .. } = &self.queues else { return None };
        let mut stats = queues.first.stats();
        queues.rest.iter().for_each(|queue| stats.add(&queue.stats()));
        Some(stats)
    }

    /// Returns the figures of its driver's DMA pool, if there is one.
    pub(crate) fn pool_stats(&self) -> Option<DmaPoolStats> {
        match &self.queues {
            Queues::File(_) => None,
            Queues::Nvme { queues, .. } => Some(queues.first.pool_stats()),
        }
    }

    /// Returns what fell back to something slower, and why.
    pub(crate) fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    /// Returns the bytes that the limit of locked memory refused to all queues together.
    pub(crate) fn memlock_refused(&self) -> u64 {
        match &self.queues {
            Queues::File(queues) => queues.iter().map(FileTarget::memlock_refused).sum(),
            Queues::Nvme { .. } => 0,
        }
    }

    /// Returns the file's present length, if it is a file.
    pub(crate) fn file_bytes(&self) -> Result<Option<u64>, FileError> {
        match &self.queues {
            Queues::File(queues) => queues.first.bytes().map(Some),
            Queues::Nvme { .. } => Ok(None),
        }
    }
}

/// Merges the notes of `queues` queues that are equal, and says how many have one if not all do.
fn merged(name: &str, queues: usize, notes: impl Iterator<Item = String>) -> Vec<String> {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for note in notes {
        match counts.iter_mut().find(|(same, _)| *same == note) {
            Some((_, count)) => *count += 1,
            None => counts.push((note, 1)),
        }
    }
    let text = |(note, count): (String, usize)| match count < queues {
        true => format!("{name}: {count} of {queues} queues: {note}"),
        false => format!("{name}: {note}"),
    };
    counts.into_iter().map(text).collect()
}

// A controller that can be driven: its registers, its interrupts, and the model or device behind
// them.

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
    Pci(RealController),
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
                let system = |error| OpenError::System { name: name.to_owned(), error };
                (Arc::new(MemoryMedia::new(bytes).map_err(system)?), options)
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
        let namespace = find_namespace(name, &controller, self.nsid)?;
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
        start_driver(name, self.registers.clone(), memory, queues, stack.retry_limit)
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

// How a target is used.

/// The options of a target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TargetOptions {
    /// All offsets and lengths are multiples of this.
    pub(crate) alignment: usize,
    /// The most requests in flight of a job.
    pub(crate) depth: usize,
    /// The number of jobs, each with its own queue; at least one.
    pub(crate) jobs: usize,
    /// The option with which the user chooses how many, for messages.
    pub(crate) jobs_option: &'static str,
    /// Polls for completions where it could sleep until an interrupt.
    pub(crate) poll: bool,
    /// The queue of a single job stays with the thread that opens it, which waits in the queue and
    /// not at its descriptor.
    pub(crate) one_thread: bool,
    /// Opens files with O_DIRECT where possible.
    pub(crate) direct: bool,
}

/// The most requests in a model controller's queue: its 1024 entries less one.
const SOFT_MAX_DEPTH: u64 = 1023;

/// Returns the most requests in flight, and the most bytes of one.
fn limits(target: &ResolvedTarget) -> (u64, u64) {
    match target.medium {
        Medium::File(_) => (file::MAX_DEPTH as u64, file::MAX_TRANSFER as u64),
        Medium::Controller(_) => (SOFT_MAX_DEPTH, nvme::MAX_TRANSFER as u64),
    }
}

/// The size and number of requests, checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RequestLimits {
    /// Bytes of one request.
    pub(crate) block: usize,
    /// The most in flight.
    pub(crate) depth: usize,
}

/// Checks `bs` and `iodepth` against the limits of all `targets`.
pub(crate) fn check_requests(
    bs: ByteSize,
    iodepth: u64,
    targets: &[&ResolvedTarget],
) -> Result<RequestLimits, LimitError> {
    if iodepth == 0 {
        return Err(LimitError::NoDepth);
    }
    // The narrowest limit is reported.
    let mut targets: Vec<_> = targets.iter().map(|target| (limits(target), target)).collect();
    targets.sort_by_key(|(limits, _)| *limits);
    for ((max_depth, max_transfer), target) in targets {
        let target = || target.name.clone();
        if bs.0 == 0 || !bs.0.is_multiple_of(file::BLOCK as u64) {
            return Err(LimitError::Block { asked: bs.0, block: file::BLOCK, target: target() });
        }
        if bs.0 > max_transfer {
            return Err(LimitError::Transfer {
                asked: bs.0,
                limit: max_transfer,
                target: target(),
            });
        }
        if iodepth > max_depth {
            return Err(LimitError::Depth { asked: iodepth, limit: max_depth, target: target() });
        }
    }
    // Both are below limits of type `usize`.
    let block = usize::try_from(bs.0).unwrap_or(usize::MAX);
    Ok(RequestLimits { block, depth: usize::try_from(iodepth).unwrap_or(usize::MAX) })
}

/// Checks the size and number of requests against the limits of an open target.
pub(crate) fn check_opened(
    RequestLimits { block, depth }: RequestLimits,
    info: &TargetInfo,
) -> Result<(), LimitError> {
    let target = || info.name.clone();
    if !block.is_multiple_of(info.block) {
        return Err(LimitError::Block { asked: block as u64, block: info.block, target: target() });
    }
    if block > info.max_transfer {
        let limit = info.max_transfer as u64;
        return Err(LimitError::Transfer { asked: block as u64, limit, target: target() });
    }
    if depth > info.max_depth {
        return Err(LimitError::Depth {
            asked: depth as u64,
            limit: info.max_depth as u64,
            target: target(),
        });
    }
    Ok(())
}

/// Returns how many requests to keep in flight for `total` bytes: at least 1.
pub(crate) fn depth_for(total: u64, RequestLimits { block, depth }: RequestLimits) -> usize {
    let requests = total.div_ceil(block as u64).max(1);
    usize::try_from(requests).unwrap_or(usize::MAX).min(depth)
}
