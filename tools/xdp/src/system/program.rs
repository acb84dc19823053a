//! Programs in the kernel: one passes packets to sockets, one sends packets for measurements.

use super::bpf;
use super::interface::{ATTACH, CallError, Interface, at};
use super::netlink::{Netlink, push_attribute};
use super::socket::RawSocket;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// `RTM_SETLINK`, `IFLA_XDP`, `IFLA_XDP_FD`, `IFLA_XDP_FLAGS`, `NLA_F_NESTED`.
const SET_LINK: u16 = 19;
const XDP: u16 = 43;
const XDP_FD: u16 = 1;
const XDP_FLAGS: u16 = 3;
const NESTED: u16 = 0x8000;

/// The place where a program runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attached {
    /// In the driver, before the kernel allocates its own structure for a packet.
    Native,
    /// In the network stack, after that: with every driver, and slower.
    Generic,
}

/// The program on an interface that passes the packets of each queue to its socket, and to the
/// kernel's own stack where there is none. It is detached when the value is dropped or the process
/// ends, however it ends.
#[derive(Debug)]
pub struct Program {
    map: OwnedFd,
    link: OwnedFd,
    attached: Attached,
}

impl Program {
    /// Loads the program for queues below `queues` and attaches it. It cannot replace another
    /// program.
    ///
    /// # Errors
    /// A [`CallError`]: `EBUSY` or `EEXIST` if the interface has a program, `EPERM` without the
    /// [capabilities](super::Privileges); any other if the driver does not run one:
    /// `EOPNOTSUPP`, `ERANGE` for a veth pair with a large MTU.
    pub fn attach(
        interface: &Interface,
        queues: u32,
        attached: Attached,
    ) -> Result<Self, CallError> {
        let map = bpf::create_socket_map(queues).map_err(at("bpf (the socket map)"))?;
        let program = bpf::load_redirect(map.as_fd()).map_err(at("bpf (the program)"))?;
        let native = attached == Attached::Native;
        let link = bpf::attach(program.as_fd(), interface.index(), native);
        Ok(Self { map, link: link.map_err(at(ATTACH))?, attached })
    }

    /// Asks a driver that has refused the program once more, by netlink, which unlike a link
    /// answers in words: `veth: Peer MTU is too large to set XDP`. `None` if it says nothing, or
    /// accepts the program now; that is then detached at once. Its map is empty, so all packets go
    /// to the network stack. It is the only program that can outlive its process, if that is killed
    /// between the two calls.
    pub fn reason_of_refusal(interface: &Interface) -> Option<String> {
        let map = bpf::create_socket_map(1).ok()?;
        let program = bpf::load_redirect(map.as_fd()).ok()?;
        let mut netlink = Netlink::open().ok()?;
        let attach = |program: i32| {
            let mut nested = Vec::new();
            push_attribute(&mut nested, XDP_FD, &program.to_ne_bytes());
            push_attribute(&mut nested, XDP_FLAGS, &bpf::NATIVE_IF_NONE.to_ne_bytes());
            // `struct ifinfomsg`: the index is its second word.
            let mut body = [[0; 4], interface.index().to_ne_bytes(), [0; 4], [0; 4]].concat();
            push_attribute(&mut body, NESTED | XDP, &nested);
            body
        };
        match netlink.request(SET_LINK, &attach(program.as_raw_fd())) {
            Err((_, reason)) => reason,
            Ok(()) => {
                let detached = netlink.request(SET_LINK, &attach(-1));
                detached.err().and_then(|(_, reason)| reason)
            }
        }
    }

    /// Passes the packets of a queue to the socket, which is bound to it, until the socket is
    /// dropped.
    ///
    /// # Errors
    /// [`CallError`], with `E2BIG` for a queue that the program was not attached for.
    pub fn redirect(&self, queue: u32, socket: &RawSocket) -> Result<(), CallError> {
        bpf::enter_socket(self.map.as_fd(), queue, socket.fd())
            .map_err(at("bpf (entering the socket)"))
    }

    /// Returns where it runs.
    pub fn attached(&self) -> Attached {
        self.attached
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It fails if the interface is gone. The descriptor's close detaches, too, but only some
        // time later.
        if let Err(errno) = bpf::detach(self.link.as_fd()) {
            tracing::debug!(%errno, "the program is detached by the close of its link");
        }
    }
}

// Packets for measurements, made by the kernel.

/// Sends copies of a packet through an interface, by the driver's XDP transmit path: no system call
/// for each packet and no socket buffer, so that what receives them is the bottleneck. On a pair of
/// virtual interfaces they arrive at the other end, in the queue of the processor that sends.
///
/// ```no_run
/// use pinfold_xdp::system::{Generator, Interface};
///
/// # fn main() -> Result<(), pinfold_xdp::system::CallError> {
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
    /// [`CallError`]: `EPERM` without the [capabilities](super::Privileges).
    pub fn through(interface: &Interface) -> Result<Self, CallError> {
        let program =
            bpf::load_send(interface.index()).map_err(at("bpf (the program that sends)"))?;
        Ok(Self { program, _link: None })
    }

    /// Attaches the program to `interface` as well, natively and for as long as the generator
    /// lives: otherwise the kernel prepares it again for each call of [`send`](Self::send), which
    /// takes it milliseconds. Packets that `interface` receives meanwhile are sent like the copies.
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

    /// Sends `count` copies of `packet`, from the header of Ethernet on. Copies that the driver has
    /// no room for are dropped and counted by the interface, so this does not wait for the
    /// receiver. O(count).
    ///
    /// # Errors
    /// A [`CallError`]: `EINVAL` before Linux 5.18, or for a packet without a header or larger than
    /// some 3,500 bytes; `EINTR` on a signal, with some of them sent.
    pub fn send(&self, packet: &[u8], count: u32) -> Result<(), CallError> {
        bpf::run_on_copies(self.program.as_fd(), packet, count).map_err(at("bpf (sending copies)"))
    }
}
