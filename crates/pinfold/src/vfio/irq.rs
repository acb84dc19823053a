//! A device's interrupts, as eventfds.

use super::device::Inner;
use super::error::DeviceError;
use crate::sys::Errno;
use crate::sys::vfio::{device, layout};
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// One interrupt vector of a device. It may be waited for in any thread, and polled with other descriptors.
#[derive(Debug)]
pub struct Irq {
    event: OwnedFd,
    vector: u32,
    /// Keeps them all switched on.
    _on: Arc<On>,
}

/// Interrupts are on as long as this lives.
struct On {
    device: Arc<Inner>,
    kind: u32,
}

impl std::fmt::Debug for On {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("On").field("device", &self.device.bdf).field("kind", &self.kind).finish()
    }
}

impl Drop for On {
    fn drop(&mut self) {
        if let Err(errno) = device::set_irqs(self.device.fd(), self.kind, &[]) {
            tracing::debug!(%errno, "interrupts were not switched off; closing the device does it");
        }
        self.device.irqs_on.fetch_and(!(1 << self.kind), Ordering::AcqRel);
    }
}

/// The kind of interrupts by message that the device has, and how many.
pub(super) fn kind(of: &Arc<Inner>) -> Result<(u32, u32), DeviceError> {
    let mut best = (layout::IRQ_MSIX, 0);
    for kind in [layout::IRQ_MSIX, layout::IRQ_MSI] {
        let count = device::irqs(of.fd(), kind).map_err(|e| of.failed("VFIO_DEVICE_GET_IRQ_INFO", e))?;
        if count > best.1 {
            best = (kind, count);
            break;
        }
    }
    Ok(best)
}

pub(super) fn enable(of: &Arc<Inner>, count: u32) -> Result<Vec<Irq>, DeviceError> {
    let (kind, has) = kind(of)?;
    switch_on(of, kind, count, has)
}

fn switch_on(of: &Arc<Inner>, kind: u32, count: u32, has: u32) -> Result<Vec<Irq>, DeviceError> {
    if count == 0 || count > has {
        return Err(DeviceError::Interrupts { bdf: of.bdf, asked: count, has });
    }
    let mut events = Vec::new();
    for _ in 0..count {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        events.push(rustix::event::eventfd(0, flags).map_err(|e| of.failed("eventfd", e.into()))?);
    }
    if of.irqs_on.fetch_or(1 << kind, Ordering::AcqRel) & (1 << kind) != 0 {
        return Err(DeviceError::InterruptsOn(of.bdf));
    }
    // From here on it is switched off by its drop, also where it could not be switched on.
    let on = Arc::new(On { device: Arc::clone(of), kind });
    let fds: Vec<BorrowedFd<'_>> = events.iter().map(AsFd::as_fd).collect();
    device::set_irqs(of.fd(), kind, &fds).map_err(|e| of.failed("VFIO_DEVICE_SET_IRQS", e))?;
    Ok((0..).zip(events).map(|(vector, event)| Irq { event, vector, _on: Arc::clone(&on) }).collect())
}

/// What is written to when the kernel asks for the device back.
pub(super) fn request(of: &Arc<Inner>) -> Result<Irq, DeviceError> {
    let kind = layout::IRQ_REQUEST;
    let has = device::irqs(of.fd(), kind).map_err(|e| of.failed("VFIO_DEVICE_GET_IRQ_INFO", e))?;
    let none = DeviceError::Interrupts { bdf: of.bdf, asked: 1, has };
    switch_on(of, kind, 1, has)?.pop().ok_or(none)
}

impl Irq {
    /// Its number on the device.
    pub fn vector(&self) -> u32 {
        self.vector
    }

    /// How often it was raised since it was last asked; 0 where it was not. Does not wait.
    ///
    /// # Errors
    /// What `read` said.
    pub fn take(&self) -> Result<u64, Errno> {
        let mut count = [0; 8];
        match rustix::io::read(&self.event, &mut count) {
            Ok(_) => Ok(u64::from_ne_bytes(count)),
            Err(rustix::io::Errno::AGAIN) => Ok(0),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits until it is raised, at most `timeout`; how often it was. 0 where the time was over, or a signal came.
    ///
    /// # Errors
    /// What `poll` or `read` said.
    pub fn wait(&self, timeout: Duration) -> Result<u64, Errno> {
        let end = Instant::now().checked_add(timeout);
        loop {
            let raised = self.take()?;
            let left = end.map_or(timeout, |end| end.saturating_duration_since(Instant::now()));
            if raised > 0 || left.is_zero() {
                return Ok(raised);
            }
            let limit = rustix::event::Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            let mut polled = [PollFd::new(&self.event, PollFlags::IN)];
            match rustix::event::poll(&mut polled, Some(&limit)) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => return self.take(),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl AsFd for Irq {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
