//! The program that passes packets to sockets.

use super::error::{CallError, at};
use super::interface::Interface;
use super::socket::RawSocket;
use crate::sys::bpf;
use std::os::fd::{AsFd, OwnedFd};

/// Where a program runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attached {
    /// In the driver, before the kernel allocates its own structure for a packet.
    Native,
    /// In the network stack, after that: with every driver, and slower.
    Generic,
}

/// The program on an interface that passes the packets of each queue to its socket, and to the kernel's own stack where
/// there is none. It is detached when the value is dropped or the process ends, however it ends.
#[derive(Debug)]
pub struct Program {
    map: OwnedFd,
    link: OwnedFd,
    attached: Attached,
}

impl Program {
    /// Loads the program for queues below `queues` and attaches it. It cannot replace another program.
    ///
    /// # Errors
    /// [`CallError`]: `EBUSY` or `EEXIST` if the interface has a program, `EOPNOTSUPP` if the driver cannot run one,
    /// `EPERM` without the [capabilities](super::missing_capabilities).
    pub fn attach(interface: &Interface, queues: u32, attached: Attached) -> Result<Self, CallError> {
        let map = bpf::create_socket_map(queues).map_err(at("bpf (the socket map)"))?;
        let program = bpf::load_redirect(map.as_fd()).map_err(at("bpf (the program)"))?;
        let native = attached == Attached::Native;
        let link = bpf::attach(program.as_fd(), interface.index(), native);
        Ok(Self { map, link: link.map_err(at("bpf (attaching the program)"))?, attached })
    }

    /// Passes the packets of a queue to the socket, which is bound to it, until the socket is dropped.
    ///
    /// # Errors
    /// [`CallError`], with `E2BIG` for a queue that the program was not attached for.
    pub fn redirect(&self, queue: u32, socket: &RawSocket) -> Result<(), CallError> {
        bpf::enter_socket(self.map.as_fd(), queue, socket.fd()).map_err(at("bpf (entering the socket)"))
    }

    /// Returns where it runs.
    pub fn attached(&self) -> Attached {
        self.attached
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It fails if the interface is gone. The descriptor's close detaches, too, but only some time later.
        if let Err(errno) = bpf::detach(self.link.as_fd()) {
            tracing::debug!(%errno, "the program is detached by the close of its link");
        }
    }
}
