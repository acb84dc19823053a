//! A device's interrupts, as eventfds.

use super::device::{Device, Inner};
use crate::backend::error::DeviceError;
use crate::sys::Errno;
use crate::sys::vfio::{device, layout};
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// One interrupt vector of a device, as an eventfd. Any thread may wait for it.
///
/// [`AsFd`] gives its descriptor to an event loop: readable means raised, and [`take`](Self::take)
/// resets it. See `examples/wait_epoll.rs`.
#[derive(Debug)]
pub struct Irq {
    event: OwnedFd,
    /// Keeps all of them enabled.
    _enabled: Arc<Enabled>,
}

/// Interrupts that are enabled until this is dropped.
struct Enabled {
    device: Arc<Inner>,
    kind: u32,
}

impl std::fmt::Debug for Enabled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Enabled")
            .field("device", &self.device.bdf)
            .field("kind", &self.kind)
            .finish()
    }
}

impl Drop for Enabled {
    fn drop(&mut self) {
        if let Err(errno) = device::set_irqs(self.device.fd(), self.kind, &[]) {
            tracing::debug!(%errno, "cannot disable interrupts; closing the device does");
        }
        self.device.irqs_on.fetch_and(!(1 << self.kind), Ordering::AcqRel);
    }
}

impl Device {
    /// Returns how many message-signalled interrupts (MSI-X, else MSI) it has.
    ///
    /// # Errors
    /// [`DeviceError::Kernel`].
    pub fn max_interrupts(&self) -> Result<u32, DeviceError> {
        message_interrupts(&self.0).map(|(_, count)| count)
    }

    /// Enables the first `count` message-signalled interrupts (MSI-X, else MSI), each with an
    /// eventfd. All that will be used must be enabled at once. Dropping the last of them disables
    /// them.
    ///
    /// # Errors
    /// [`DeviceError::Interrupts`] if there are fewer; [`DeviceError::InterruptsOn`] if some of
    /// them are enabled; [`DeviceError::Kernel`].
    pub fn interrupts(&self, count: u32) -> Result<Vec<Irq>, DeviceError> {
        let (kind, has) = message_interrupts(&self.0)?;
        enable(&self.0, kind, count, has)
    }

    /// Returns the interrupt by which the kernel requests the device back, to unplug or unbind it.
    /// The kernel blocks, and repeats the request from time to time, until the device is closed.
    /// Linux 4.0.
    ///
    /// # Errors
    /// [`DeviceError::Interrupts`] if the kernel does not support it; [`DeviceError::Kernel`].
    pub fn request(&self) -> Result<Irq, DeviceError> {
        let kind = layout::IRQ_REQUEST;
        let has = count(&self.0, kind)?;
        let none = DeviceError::Interrupts { bdf: self.address(), asked: 1, has };
        enable(&self.0, kind, 1, has)?.pop().ok_or(none)
    }
}

fn count(of: &Inner, kind: u32) -> Result<u32, DeviceError> {
    device::irqs(of.fd(), kind).map_err(|e| of.failed("VFIO_DEVICE_GET_IRQ_INFO", e))
}

/// Returns the kind of message-signalled interrupts that the device has, and how many.
fn message_interrupts(of: &Inner) -> Result<(u32, u32), DeviceError> {
    for kind in [layout::IRQ_MSIX, layout::IRQ_MSI] {
        let count = count(of, kind)?;
        if count > 0 {
            return Ok((kind, count));
        }
    }
    Ok((layout::IRQ_MSIX, 0))
}

fn enable(of: &Arc<Inner>, kind: u32, count: u32, has: u32) -> Result<Vec<Irq>, DeviceError> {
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
    // From here on its drop disables them, also if enabling fails.
    let enabled = Arc::new(Enabled { device: Arc::clone(of), kind });
    let fds: Vec<BorrowedFd<'_>> = events.iter().map(AsFd::as_fd).collect();
    device::set_irqs(of.fd(), kind, &fds).map_err(|e| of.failed("VFIO_DEVICE_SET_IRQS", e))?;
    Ok(events.into_iter().map(|event| Irq { event, _enabled: Arc::clone(&enabled) }).collect())
}

impl Irq {
    /// Returns how often it was raised since the last call, and resets the count. Does not block.
    ///
    /// # Errors
    /// That of `read`.
    pub fn take(&self) -> Result<u64, Errno> {
        let mut count = [0; 8];
        match rustix::io::read(&self.event, &mut count) {
            Ok(_) => Ok(u64::from_ne_bytes(count)),
            Err(rustix::io::Errno::AGAIN) => Ok(0),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Waits up to `timeout` until it is raised, and returns how often it was; 0 on timeout or when
    /// a signal arrives.
    ///
    /// # Errors
    /// That of `poll` or `read`.
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
