//! A target that is open, with a queue for each job.

use super::device::Device;
use super::error::OpenError;
use super::options::TargetOptions;
use super::resolve::{Medium, ResolvedTarget};
use super::stack::Stack;
use crate::targets::durability::Durability;
use crate::targets::file::{FileOptions, FileTarget};
use crate::targets::nvme::{FLUSH_LIMIT, LostData, NvmeOptions, NvmeStats, NvmeTarget};
use crate::targets::target::Target;
use pinfold::uring::FileError;
use pinfold::{Arena, Buffer};
use pinfold_core::dma_pool::PoolStats;
use pinfold_core::domain::Pinned;
use pinfold_nvme::Registers;
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

type NamespaceTarget<'d, B> = NvmeTarget<'d, B, Arc<dyn Registers>, Arena>;

/// An open target for data in memory of type `B`.
pub(crate) struct OpenTarget<'d, B: Pinned = Buffer> {
    queues: Queues<'d, B>,
    notes: Vec<String>,
}

enum Queues<'d, B: Pinned> {
    File(Box<PerJob<FileTarget<'d, B>>>),
    Nvme {
        /// Dropped first, so that the controller is disabled before its device is closed.
        queues: Box<PerJob<NamespaceTarget<'d, B>>>,
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
                .map_err(|error| OpenError::Driver { name: name.clone(), error })
        })?;
        Ok(Self { queues: Queues::Nvme { queues: Box::new(queues), _device: device }, notes })
    }

    fn file(
        name: &str,
        file: &File,
        path: &Path,
        stack: &'d Stack,
        TargetOptions { alignment, depth, jobs, poll, direct, moves, .. }: TargetOptions,
    ) -> Result<Self, OpenError> {
        // With several jobs, each queue moves to the thread of its job.
        let options =
            FileOptions { alignment, depth, direct, poll, one_thread: jobs == 1 && !moves };
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

    /// Returns what the controller did, if there is one.
    pub(crate) fn nvme_stats(&self) -> Option<NvmeStats> {
        let Queues::Nvme { queues, .. } = &self.queues else { return None };
        let mut stats = queues.first.stats();
        queues.rest.iter().for_each(|queue| stats.add(&queue.stats()));
        Some(stats)
    }

    /// Returns the figures of its driver's DMA pool, if there is one.
    pub(crate) fn pool_stats(&self) -> Option<PoolStats> {
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
