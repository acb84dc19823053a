//! A namespace of an NVMe controller. A buffer moves into a mapping, with it into a command, and out of both again:
//! when the command is over its mapping is revoked, and the buffer is handed on once no device can reach it.

mod half;

use super::{Done, Info, IoDirection, Request, SubmitError, Target, TargetError};
use crate::account::{DeviceReport, PoolReport};
use crate::args::Protect;
use half::{Asked, Half, Landed};
use pinfold_core::access::{FromDevice, ToDevice};
use pinfold_core::dma_pool::ChunkSource;
use pinfold_core::domain::{Domain, Pinned, Revoked};
use pinfold_nvme::Registers;
use pinfold_nvme::driver::{Controller, Namespace, Outcome, PollError, Queue, Vector};
use std::time::{Duration, Instant};

/// The largest request.
pub(crate) const MAX_TRANSFER: usize = 64 << 20;
/// How long a wait lasts before the caller may look at the world again.
const PATIENCE: Duration = Duration::from_millis(50);
/// How many looks of a wait follow each other at once; between later ones others may run.
const SPINS: u32 = 64;
/// A doorbell is rung for so many requests at the latest, so that the controller has something to do meanwhile.
const BATCH: u32 = 32;

/// A buffer that the controller is done with, and the domain not yet.
struct Held<'d, B: Pinned> {
    slot: usize,
    revoked: Revoked<B, &'d Domain>,
    result: Result<usize, TargetError>,
}

/// A namespace as a target.
pub(crate) struct NvmeTarget<'d, B: Pinned, R: Registers, S: ChunkSource + Clone> {
    info: Info,
    domain: &'d Domain,
    protect: Protect,
    namespace: Namespace,
    reads: Half<'d, B, FromDevice>,
    writes: Half<'d, B, ToDevice>,
    held: Vec<Held<'d, B>>,
    revoked: Vec<Revoked<B, &'d Domain>>,
    /// Requests that the controller has not been told of.
    untold: u32,
    queue: Queue<R, S>,
    controller: Controller<R, S>,
}

impl<'d, B: Pinned, R: Registers, S: ChunkSource + Clone> NvmeTarget<'d, B, R, S> {
    /// A namespace with a queue for `depth` requests. A wait sleeps where there is an interrupt, and stays awake where not.
    pub(crate) fn new(
        name: String,
        (domain, protect): (&'d Domain, Protect),
        (controller, namespace): (Controller<R, S>, Namespace),
        depth: usize,
        vector: Option<Vector>,
    ) -> Result<Self, pinfold_nvme::driver::Error> {
        let queue = match vector {
            None => controller.create_queue(depth)?,
            Some(vector) => controller.create_queue_with(depth, vector)?,
        };
        let block = namespace.block_bytes as usize;
        let info = Info {
            name,
            capacity: Some(namespace.bytes()),
            block,
            unit: block,
            max_depth: controller.max_depth(),
            max_transfer: MAX_TRANSFER,
        };
        let (reads, writes) = (Half::new(depth), Half::new(depth));
        let held = Vec::with_capacity(depth);
        let revoked = Vec::with_capacity(depth);
        let untold = 0;
        Ok(Self { info, domain, protect, namespace, reads, writes, held, revoked, untold, queue, controller })
    }

    /// What the controller and its driver did.
    pub(crate) fn account(&self) -> DeviceReport {
        let (queue, controller) = (self.queue.stats(), self.controller.stats());
        DeviceReport {
            name: self.info.name.clone(),
            queues: 1,
            requests: self.reads.requests() + self.writes.requests(),
            commands: queue.commands,
            errors: queue.errors,
            retries: self.reads.retries() + self.writes.retries(),
            timeouts: queue.timeouts,
            doorbells: queue.doorbells,
            by_interrupt: self.queue.has_interrupt(),
            sleeps: queue.sleeps,
            interrupts: queue.interrupts,
            segments: queue.segments,
            prp_entries: queue.prp_entries,
            prp_pages: queue.prp_list_pages,
            prp_pages_in_use: controller.list_pages_used,
            prp_pages_at_most: controller.list_pages_max,
        }
    }

    /// The driver's DMA pools.
    pub(crate) fn pools(&self) -> Vec<PoolReport> {
        vec![PoolReport::new(&self.controller.list_pool())]
    }

    fn failed(&self, error: PollError) -> TargetError {
        TargetError::Poll { target: self.info.name.clone(), error }
    }

    /// Takes what the controller completed.
    fn take_completions(&mut self, done: &mut Vec<Done<B>>) -> Result<(), PollError> {
        let mut failed = Ok(());
        loop {
            let completion = match self.queue.poll() {
                Ok(Some(completion)) => completion,
                Ok(None) => return failed,
                // A controller that failed gives nothing back by itself. Once it has been seen disabled, all that was
                // in flight ends with an error, and the buffers are safe.
                Err(error) => {
                    // Now, because what follows (a device that is gone is closed by a kernel that waits for it) may take
                    // its time.
                    tracing::warn!("{}: {error}", self.info.name);
                    self.controller.disable().map_err(|_| error)?;
                    failed = Err(error);
                    continue;
                }
            };
            let (queue, nsid) = (&mut self.queue, self.namespace.nsid);
            let shift = self.namespace.block_bytes.trailing_zeros();
            let name = &self.info.name;
            let lost = match self.reads.land(completion, name, |mapped, asked| {
                queue.read(nsid, asked.offset >> shift, asked.blocks, mapped)
            }) {
                Landed::Taken => None,
                Landed::Lost(slot, error) => Some((slot, error)),
                Landed::NotMine(completion) => match self.writes.land(completion, name, |mapped, asked| {
                    queue.write(nsid, asked.offset >> shift, asked.blocks, mapped)
                }) {
                    Landed::Lost(slot, error) => Some((slot, error)),
                    Landed::Taken | Landed::NotMine(_) => None,
                },
            };
            done.extend(lost.map(|(slot, error)| Done { slot, buffer: None, result: Err(error) }));
        }
    }

    /// Takes the device's access back from everything whose command is over.
    fn revoke(&mut self, done: &mut Vec<Done<B>>) {
        if self.protect == Protect::Strict {
            self.reads.unmap_each(&self.info.name, done);
            self.writes.unmap_each(&self.info.name, done);
            return;
        }
        // One flush for all reads and one for all writes of this poll.
        self.reads.revoke_all(self.domain, &mut self.revoked, &mut self.held);
        self.writes.revoke_all(self.domain, &mut self.revoked, &mut self.held);
    }

    /// Hands on what no device can reach any more.
    fn release(&mut self, done: &mut Vec<Done<B>>) {
        let mut at = 0;
        while at < self.held.len() {
            if self.held.get(at).is_some_and(|held| held.revoked.is_quiesced()) {
                let Held { slot, revoked, result } = self.held.swap_remove(at);
                done.push(half::waited(&self.info.name, slot, revoked.wait().map_err(Into::into), result));
            } else {
                at += 1;
            }
        }
    }

    fn step(&mut self, done: &mut Vec<Done<B>>) -> Result<(), TargetError> {
        self.untold = 0;
        let taken = self.take_completions(done).map_err(|error| self.failed(error));
        self.revoke(done);
        self.release(done);
        taken
    }
}

impl<B: Pinned, R: Registers, S: ChunkSource + Clone> Target<B> for NvmeTarget<'_, B, R, S> {
    fn info(&self) -> &Info {
        &self.info
    }

    fn submit(&mut self, request: Request<B>) -> Result<(), SubmitError<B>> {
        let Request { way, offset, len, slot, buffer } = request;
        let blocks = len.div_ceil(self.info.block);
        let asked = Asked { slot, offset, len, blocks: u32::try_from(blocks).unwrap_or(u32::MAX), tries: 1 };
        let (nsid, slba) = (self.namespace.nsid, offset >> self.namespace.block_bytes.trailing_zeros());
        let (queue, name) = (&mut self.queue, &self.info.name);
        match way {
            IoDirection::Read => {
                self.reads.submit(self.domain, name, buffer, FromDevice, asked, |mapped| {
                    queue.read(nsid, slba, asked.blocks, mapped)
                })?
            }
            IoDirection::Write => {
                self.writes.submit(self.domain, name, buffer, ToDevice, asked, |mapped| {
                    queue.write(nsid, slba, asked.blocks, mapped)
                })?
            }
        }
        // What is left over is told of by the next poll or wait: one doorbell for all that was begun together.
        self.untold += 1;
        if self.untold >= BATCH {
            self.untold = 0;
            self.queue.ring_doorbell();
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Done<B>>) -> Result<(), TargetError> {
        self.step(done)
    }

    fn wait(&mut self, done: &mut Vec<Done<B>>) -> Result<(), TargetError> {
        let until = Instant::now() + PATIENCE;
        let mut looks = 0;
        loop {
            self.step(done)?;
            if !done.is_empty() || Instant::now() >= until {
                return Ok(());
            }
            looks += 1;
            if self.held.is_empty() && self.queue.has_interrupt() {
                self.queue.sleep(PATIENCE);
            } else if looks < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }

    fn sync(&mut self) -> Result<(), TargetError> {
        let target = || self.info.name.clone();
        let (action, offset, len) = ("flushing", 0, 0);
        let silent = TargetError::Silent { target: target(), action, offset, len };
        let rejected = |reason| TargetError::Rejected { target: target(), reason };
        let flying = self.queue.flush(self.namespace.nsid).map_err(|refused| rejected(refused.reason))?;
        let name = target();
        match self.queue.wait().map_err(|error| TargetError::Poll { target: name.clone(), error })? {
            None => Err(silent),
            Some(completion) => match flying.finish(completion) {
                Outcome::Completed { result, .. } => {
                    result.map_err(|error| TargetError::Command { target: name, action, offset, len, error })
                }
                Outcome::TimedOut(_) | Outcome::Foreign(..) => Err(silent),
            },
        }
    }
}

#[cfg(test)]
mod tests;
