//! The state that all handles of an arena share: its memory, its frames, and the domains that it is
//! mapped into.

use super::AllocError;
use super::error::ArenaReport;
use crate::memory::attachment::{
    Attachment, Attachments, DomainOps, MappingPolicy, count_quarantined,
};
use crate::memory::obtain::Held;
use crate::memory::source::{NotLocked, Residency};
use crate::sys::region::Region;
use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::SourceError;
use pinfold_core::domain::{BackendError, DomainId};
use pinfold_core::frame::{Frame, FrameError, Order, Zone};
use pinfold_core::mem::DmaMemory;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Consecutive frames of an arena that are allocated together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    pub(crate) first: Frame,
    pub(crate) frames: u32,
}

impl Run {
    pub(super) fn of_order(first: Frame, order: Order) -> Self {
        Self { first, frames: order.frames() }
    }

    pub(crate) fn bytes(self) -> u64 {
        u64::from(self.frames) * Frame::BYTES
    }

    /// Returns the order that the zone allocates it by; `None` if the zone allocates it by length.
    /// (A part of a run may have the length of an order without its alignment.)
    fn order(self) -> Option<Order> {
        let order = u8::try_from(self.frames.trailing_zeros()).ok()?;
        let whole = self.frames.is_power_of_two() && self.first.index().is_multiple_of(self.frames);
        (whole && order <= Order::HUGE.get()).then(|| Order::new(order)).flatten()
    }
}

pub(crate) struct State {
    /// Unmapped only after the last frame is free and no device reaches it.
    region: ManuallyDrop<Held>,
    memfd: Option<OwnedFd>,
    zone: Zone,
    policy: MappingPolicy,
    report: ArenaReport,
    /// Changes when the memory is mapped into a domain that pins by itself.
    residency: Mutex<Residency>,
    attachments: Attachments,
    /// Frames of the zone beyond the region: a zone has at least 2 MiB.
    fenced: u64,
    /// The zone's own high-water mark includes the fenced frames.
    peak: AtomicU64,
    quarantined: AtomicU64,
}

impl State {
    /// Creates the state; the report's residency is the initial one.
    pub(super) fn new(
        region: Held,
        memfd: Option<OwnedFd>,
        policy: MappingPolicy,
        report: ArenaReport,
    ) -> Result<Self, FrameError> {
        let frames = u32::try_from(report.bytes / Frame::BYTES).unwrap_or(u32::MAX);
        let (zone, fenced) = zone(frames)?;
        Ok(Self {
            region: ManuallyDrop::new(region),
            memfd,
            zone,
            policy,
            residency: Mutex::new(report.residency.clone()),
            report,
            attachments: Attachments::default(),
            fenced,
            peak: AtomicU64::new(0),
            quarantined: AtomicU64::new(0),
        })
    }

    pub(super) fn region(&self) -> &Region {
        &self.region
    }

    pub(super) fn memfd(&self) -> Option<&OwnedFd> {
        self.memfd.as_ref()
    }

    pub(super) fn zone(&self) -> &Zone {
        &self.zone
    }

    pub(super) fn policy(&self) -> MappingPolicy {
        self.policy
    }

    pub(super) fn bytes(&self) -> u64 {
        self.report.bytes
    }

    pub(super) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    pub(super) fn quarantined(&self) -> u64 {
        self.quarantined.load(Ordering::Relaxed)
    }

    pub(super) fn report(&self) -> ArenaReport {
        ArenaReport { residency: self.residency().clone(), ..self.report.clone() }
    }

    pub(super) fn residency(&self) -> MutexGuard<'_, Residency> {
        self.residency.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps the memory into a domain; returns the existing attachment if it is mapped there
    /// already.
    pub(super) fn attach(
        &self,
        domain: Box<dyn DomainOps>,
    ) -> Result<Arc<Attachment>, BackendError> {
        let mut residency = self.residency();
        // A backend that pins charges RLIMIT_MEMLOCK itself: locked memory would count twice and
        // fail at half of it.
        let unlocked =
            domain.pins() && *residency == Residency::Locked && self.region.unlock().is_ok();
        let file = self.memfd.as_ref().map(AsFd::as_fd);
        match self.attachments.add(domain, self.region.memory(), file, self.policy) {
            Ok(attachment) => {
                if unlocked {
                    *residency = Residency::ByMapping;
                }
                Ok(attachment)
            }
            Err(error) => {
                if unlocked && let Err(errno) = self.region.lock() {
                    *residency = Residency::NotLocked(NotLocked::Kernel(errno));
                }
                Err(error)
            }
        }
    }

    pub(in crate::memory) fn frames_for(&self, requested: u64) -> Result<u32, AllocError> {
        if requested == 0 {
            return Err(AllocError::Length { len: 0, limit: self.region.len() });
        }
        let too_large = AllocError::TooLarge { requested, arena: self.bytes() };
        if requested > self.bytes() {
            return Err(too_large);
        }
        u32::try_from(requested.div_ceil(Frame::BYTES)).map_err(|_| too_large)
    }

    pub(in crate::memory) fn alloc(&self, frames: u32) -> Result<Run, FrameError> {
        let huge = Order::HUGE.frames();
        // `order` depends on the length alone for a run that starts at frame 0.
        let order = Frame::new(0).and_then(|first| Run { first, frames }.order());
        let first = match order {
            Some(order) => self.zone.alloc(order)?,
            None if frames < huge => self.zone.alloc_run(frames, 1)?,
            None => {
                self.zone.alloc_run(frames, huge).or_else(|_| self.zone.alloc_run(frames, 1))?
            }
        };
        self.update_peak();
        Ok(Run { first, frames })
    }

    pub(crate) fn alloc_order(&self, order: Order) -> Result<Run, FrameError> {
        let first = self.zone.alloc(order)?;
        self.update_peak();
        Ok(Run::of_order(first, order))
    }

    /// Frees what `alloc_order` returned and no device can reach.
    pub(crate) fn free_order(&self, first: Frame, order: Order) {
        self.free(Run::of_order(first, order));
    }

    /// Returns all of the memory.
    pub(crate) fn region_memory(&self) -> DmaMemory<'_> {
        self.region.memory()
    }

    pub(super) fn update_peak(&self) {
        // Approximate: this runs with every call, and an exact count would ask all owners.
        let in_use = self.zone.in_use_roughly().saturating_sub(self.fenced);
        if in_use > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(in_use, Ordering::Relaxed);
        }
    }

    /// Frames that are allocated or quarantined.
    pub(super) fn in_use(&self) -> u64 {
        self.zone.stats().in_use.saturating_sub(self.fenced)
    }

    /// Frees a run that `alloc` returned and that no device can reach.
    pub(crate) fn free(&self, run: Run) {
        let freed = match run.order() {
            Some(order) => self.zone.free(run.first, order),
            None => self.zone.free_run(run.first, run.frames),
        };
        if let Err(error) = freed {
            // Only a caller that broke its contract gets here; the frames stay allocated, and so
            // the arena stays.
            tracing::error!(first = %run.first, frames = run.frames, %error, "frames could not be freed");
        }
    }

    /// Counts a run that stays allocated because a device of `attachment` may still reach it.
    pub(super) fn quarantine(&self, run: Run, attachment: &Attachment) {
        self.quarantined.fetch_add(u64::from(run.frames), Ordering::Relaxed);
        attachment.count_quarantined(run.bytes());
    }

    pub(in crate::memory) fn alloc_error(&self, requested: u64, error: FrameError) -> AllocError {
        match error {
            FrameError::Exhausted { .. } | FrameError::NoRun { .. } => AllocError::Exhausted {
                requested,
                in_use: self.in_use() * Frame::BYTES,
                arena: self.bytes(),
            },
            other => AllocError::Source(SourceError::Frames(other)),
        }
    }

    /// Returns the memory of an allocated run.
    pub(crate) fn memory_of(&self, run: Run) -> DmaMemory<'_> {
        let offset = usize::try_from(run.first.offset()).unwrap_or(usize::MAX);
        let len = usize::try_from(run.bytes()).unwrap_or(usize::MAX);
        // The zone has as many frames as the region, so the part is always inside.
        self.region.memory().part(offset, len).unwrap_or(DmaMemory::EMPTY)
    }

    /// Returns the run that has this memory; `None` if it is not whole frames of the arena.
    pub(crate) fn run_at(&self, memory: NonNull<[u8]>) -> Option<Run> {
        let region = self.region.memory();
        let offset = memory.cast::<u8>().addr().get().checked_sub(region.addr())?;
        let (offset, len) = (offset as u64, memory.len() as u64);
        let frames = |bytes: u64| u32::try_from(bytes / Frame::BYTES).ok();
        let whole = (offset | len).is_multiple_of(Frame::BYTES)
            && offset.checked_add(len).is_some_and(|end| end <= region.len() as u64);
        let first = Frame::new(frames(offset).filter(|_| whole)?)?;
        Some(Run { first, frames: frames(len)? })
    }

    /// Returns the address at which a run is mapped in `domain` for as long as the arena lives.
    /// O(domains), with loads only.
    pub(crate) fn fixed_iova_of(&self, run: Run, domain: DomainId) -> Option<Iova> {
        match self.policy {
            MappingPolicy::Whole => Some(
                self.attachments.find(domain)?.iova_of(run.first.offset(), run.bytes())?.start(),
            ),
            MappingPolicy::PerUse => None,
        }
    }

    /// Returns whether an unmapped buffer can be reached by its owner only: by no device, and by no
    /// other process (nor this one through `write`, which is safe) as a file.
    pub(crate) fn is_private(&self) -> bool {
        self.policy == MappingPolicy::PerUse && self.memfd.is_none()
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let in_use = self.in_use();
        let detached = in_use == 0 && self.attachments.detach_all(self.region.memory());
        if !detached {
            tracing::warn!(bytes = self.report.bytes, frames = in_use, "an arena is quarantined");
            count_quarantined(self.report.bytes);
            return;
        }
        // SAFETY: the region is dropped here only, in the drop of its owner. Every frame is free
        // and no device reaches the memory (`detach_all`), so no pointer into it is left.
        unsafe { ManuallyDrop::drop(&mut self.region) };
    }
}

/// Returns a zone of `frames` frames. It has at least 2 MiB: the frames beyond a smaller arena stay
/// allocated, and are counted by the second value.
fn zone(frames: u32) -> Result<(Zone, u64), FrameError> {
    let all = frames.max(Zone::MIN_FRAMES);
    let zone = Zone::new(all)?;
    if all > frames {
        let first = zone.alloc_run(all, 1)?;
        zone.free_run(first, frames)?;
    }
    Ok((zone, u64::from(all - frames)))
}
