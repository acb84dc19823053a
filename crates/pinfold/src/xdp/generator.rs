//! Packets for measurements, made by the kernel.

use super::error::{CallError, at};
use super::interface::Interface;
use crate::sys::bpf;
use std::os::fd::{AsFd, OwnedFd};

/// Sends copies of a packet through an interface, by the driver's XDP transmit path: no system call
/// for each packet and no socket buffer, so that what receives them is the bottleneck. On a pair of
/// virtual interfaces they arrive at the other end, in the queue of the processor that sends.
///
/// ```no_run
/// use pinfold::xdp::{Generator, Interface};
///
/// # fn main() -> Result<(), pinfold::xdp::CallError> {
/// let generator = Generator::through(&Interface::named("v0")?)?;
/// generator.send(&[0xff; 64], 1_000_000)?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Generator {
    program: OwnedFd,
    /// Detaches the program with its close.
    _link: Option<OwnedFd>,
}

impl Generator {
    /// Loads the program that sends through `interface`, which is in the network namespace of the
    /// calling thread.
    ///
    /// # Errors
    /// [`CallError`]: `EPERM` without the [capabilities](super::missing_capabilities).
    pub fn through(interface: &Interface) -> Result<Self, CallError> {
        let program =
            bpf::load_send(interface.index()).map_err(at("bpf (the program that sends)"))?;
        Ok(Self { program, _link: None })
    }

    /// Attaches the program to `interface` as well, natively and for as long as the generator
    /// lives: otherwise the kernel prepares it again for each call of [`send`](Self::send), which
    /// takes it milliseconds. What `interface` receives meanwhile is sent like the copies.
    ///
    /// # Errors
    /// [`CallError`], as [`Program::attach`](super::Program::attach).
    pub fn prepared_on(self, interface: &Interface) -> Result<Self, CallError> {
        let link = bpf::attach(self.program.as_fd(), interface.index(), true);
        Ok(Self {
            _link: Some(link.map_err(at("bpf (attaching the program that sends)"))?),
            ..self
        })
    }

    /// Sends `count` copies of `packet`, from the header of Ethernet on. What the driver has no
    /// room for is dropped and in the interface's counters, so this does not wait for the receiver.
    /// O(count).
    ///
    /// # Errors
    /// [`CallError`]: `EINVAL` before Linux 5.18, or for a packet without a header or larger than some 3,500 bytes; `EINTR` on
    /// a signal, with some of them sent.
    pub fn send(&self, packet: &[u8], count: u32) -> Result<(), CallError> {
        bpf::run_on_copies(self.program.as_fd(), packet, count).map_err(at("bpf (sending copies)"))
    }
}
