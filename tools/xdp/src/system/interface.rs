//! Network interfaces, and what a process needs to receive from them.

use super::links::{self, RouteError, Through};
use super::routes;
use super::{netdev, privileges};
use pinfold::Errno;
use pinfold::probe::OpenFiles;
use std::fmt;
use std::path::Path;

/// The header that the packets of an interface begin with, by the type of its link-layer addresses
/// (`ARPHRD_*`, `if_arp.h`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkType {
    /// A header of Ethernet: cards, veth, bridges, tap.
    Ethernet,
    /// A header of Ethernet whose addresses are zero.
    Loopback,
    /// A header of IP: tun, WireGuard, modems.
    RawIp,
    /// Anything else, by its number.
    Other(u16),
}

impl LinkType {
    fn of(hardware: u16) -> Self {
        /// `ARPHRD_RAWIP`, which libc does not have.
        const RAW_IP: u16 = 519;
        match hardware {
            libc::ARPHRD_ETHER => Self::Ethernet,
            libc::ARPHRD_LOOPBACK => Self::Loopback,
            libc::ARPHRD_NONE | RAW_IP => Self::RawIp,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for LinkType {
    /// Writes the name of the header file, without its prefix.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match *self {
            Self::Ethernet => "Ethernet",
            Self::Loopback => "loopback",
            Self::RawIp => "raw IP",
            Self::Other(libc::ARPHRD_INFINIBAND) => "InfiniBand",
            Self::Other(libc::ARPHRD_CAN) => "CAN",
            Self::Other(libc::ARPHRD_PPP) => "PPP",
            Self::Other(libc::ARPHRD_TUNNEL) => "IPv4 tunnel",
            Self::Other(libc::ARPHRD_TUNNEL6) => "IPv6 tunnel",
            Self::Other(libc::ARPHRD_SIT) => "SIT tunnel",
            Self::Other(libc::ARPHRD_IPGRE) => "GRE tunnel",
            Self::Other(libc::ARPHRD_IEEE1394) => "FireWire",
            Self::Other(libc::ARPHRD_IEEE80211_RADIOTAP) => "802.11 monitor",
            Self::Other(number) => return write!(f, "ARPHRD {number}"),
        };
        f.write_str(name)
    }
}

/// A network interface, as it was when it was looked up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Interface {
    name: String,
    facts: netdev::Facts,
}

impl Interface {
    /// Looks an interface up in the network namespace of the calling thread.
    ///
    /// # Errors
    /// [`CallError`], with `ENODEV` if there is none of this name.
    pub fn named(name: &str) -> Result<Self, CallError> {
        let facts = netdev::facts(name).map_err(at("ioctl (the interface)"))?;
        Ok(Self { name: name.to_owned(), facts })
    }

    /// Returns its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its index.
    pub(crate) fn index(&self) -> u32 {
        self.facts.index
    }

    /// Returns the largest packet in bytes, without the header of the link layer.
    pub fn mtu(&self) -> u32 {
        self.facts.mtu
    }

    /// Returns whether it is up.
    pub fn is_up(&self) -> bool {
        self.facts.is_up
    }

    /// Returns what its packets begin with.
    pub fn link_type(&self) -> LinkType {
        LinkType::of(self.facts.hardware)
    }

    /// Returns how many queues receive; `None` if the driver does not say
    /// (`ethtool --show-channels`).
    pub fn queues(&self) -> Option<u32> {
        self.facts.queues
    }

    /// Returns how many queues transmit, which may be fewer than receive; `None` if the driver does
    /// not say.
    pub fn transmit_queues(&self) -> Option<u32> {
        self.facts.transmit_queues
    }

    /// Returns whether a queue can send: the kernel accepts packets on one without a transmit queue
    /// of its number, and never sends them. True if the driver does not say.
    pub fn can_transmit(&self, queue: u32) -> bool {
        self.facts.transmit_queues.is_none_or(|queues| queue < queues)
    }

    /// Asks the kernel where the VLAN tags of received packets are, as it is now.
    pub fn vlan_tags(&self) -> VlanTags {
        match links::through(self.index()) {
            Ok(Through::Pair(None)) => VlanTags::BesideByPeer(None),
            Ok(Through::Pair(Some(peer))) if netdev::offloads(&peer).transmit_tags => {
                VlanTags::BesideByPeer(Some(peer))
            }
            Ok(Through::Pair(Some(_))) => VlanTags::InPacket,
            Ok(Through::Others) => VlanTags::BesideBelow,
            Ok(Through::Driver) | Err(_) if netdev::offloads(&self.name).receive_tags => {
                VlanTags::Beside
            }
            Ok(Through::Driver) | Err(_) => VlanTags::InPacket,
        }
    }
}

/// The place of the VLAN tags of received packets. A program of XDP sees only those in the packet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum VlanTags {
    /// In the packet.
    InPacket,
    /// Taken out by the driver (`rxvlan`).
    Beside,
    /// Taken out by the network stack, or by the interfaces that the packets come through: of a
    /// bridge, a bond, a macvlan.
    BesideBelow,
    /// Left out by the other end of a veth pair (`txvlan`), of this name; one in another namespace,
    /// of which neither the name nor the setting is known, is `None`.
    BesideByPeer(Option<String>),
}

/// Returns the interface that packets to far addresses leave by and that depends on `interface`:
/// itself, or for instance a bridge that it is a port of.
///
/// The kernel is asked where packets to a few public addresses of both protocols would go, all hops
/// of a route with several: those of no particular source, from each address of this machine, in
/// each VRF, and with each mark that a rule has. So a default route counts in whatever parts and by
/// whatever rules it is found, and so does a route to one of these addresses alone. From its
/// interface it is followed to the ports of a bridge, a bond or a VRF, to the interface below a
/// VLAN, a macvlan or a tunnel that is bound to one, and to the other end of a veth pair in the same
/// namespace.
///
/// # Errors
/// [`RouteError`]: it is not known.
pub fn default_route_over(interface: &Interface) -> Result<Option<String>, RouteError> {
    routes::default_route_over(interface.index())
}

/// Returns whether a limit of open files refused a call.
pub(crate) fn is_out_of_files(errno: Errno) -> bool {
    [libc::EMFILE, libc::ENFILE].contains(&errno.raw())
}

// The error of a system call.

/// A system call that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{call}: {errno}{}", self.advice())]
pub struct CallError {
    /// The call, and what it was for.
    pub call: &'static str,
    /// The error.
    pub errno: Errno,
}

impl CallError {
    /// Returns whether a limit of open files refused the call.
    fn is_out_of_files(&self) -> bool {
        is_out_of_files(self.errno)
    }

    /// Returns whether an interface's driver may have refused it, and not a limit of the process.
    pub fn is_of_driver(&self) -> bool {
        self.call == ATTACH && !self.is_out_of_files()
    }

    /// Returns the cause, and what to do, where they are known.
    fn advice(&self) -> String {
        match self.errno.raw() {
            libc::EAFNOSUPPORT => format!(": {}", privileges::no_af_xdp(Path::new("/proc"))),
            libc::ENOMEM => ": the kernel has no memory for it; free memory of the machine, or of the control group if that \
                             has a limit"
                .to_owned(),
            libc::ENFILE => ": raise fs.file-max, or end other programs".to_owned(),
            libc::EMFILE => {
                let files = OpenFiles::here();
                let more = files.soft.unwrap_or(0).saturating_add(256);
                format!(": {}", files.raise(more).unwrap_or_else(|words| words))
            }
            _ => String::new(),
        }
    }
}

/// The call that attaches a program to an interface.
pub(super) const ATTACH: &str = "bpf (attaching the program)";

/// Names the call that failed.
pub(super) fn at(call: &'static str) -> impl Fn(Errno) -> CallError {
    move |errno| CallError { call, errno }
}
