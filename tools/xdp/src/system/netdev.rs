//! Network interfaces, as the calling thread's network namespace has them (`netdevice(7)`).

use super::last_errno;
use pinfold::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// The kernel's description of an interface.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Facts {
    pub(crate) index: u32,
    pub(crate) mtu: u32,
    pub(crate) is_up: bool,
    /// Queues that receive, if the driver says so.
    pub(crate) queues: Option<u32>,
    /// Queues that transmit, if the driver says so.
    pub(crate) transmit_queues: Option<u32>,
    /// The type of its link-layer addresses (`ARPHRD_*`).
    pub(crate) hardware: u16,
}

/// `struct ethtool_channels`.
#[repr(C)]
#[derive(Default)]
struct Channels {
    command: u32,
    max: [u32; 4],
    receive: u32,
    transmit: u32,
    other: u32,
    combined: u32,
}

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

const _: () = assert!(size_of::<Channels>() == 36 && size_of::<Value>() == 8);

/// `ETHTOOL_GCHANNELS`, `ETHTOOL_GFLAGS`, `SIOCETHTOOL`.
const GET_CHANNELS: u32 = 0x3c;
const GET_FLAGS: u32 = 0x25;
const ETHTOOL: libc::c_ulong = 0x8946;

/// Looks an interface up by its name.
pub(crate) fn facts(name: &str) -> Result<Facts, Errno> {
    let socket = socket()?;
    let index = rustix::net::netdevice::name_to_index(socket.as_fd(), name)?;
    let mut request = request(name);
    // SAFETY: `SIOCGIFMTU` reads the name and writes the MTU into the union.
    unsafe { call(&socket, libc::SIOCGIFMTU, &mut request) }?;
    // SAFETY: that call has written it.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu }.cast_unsigned();
    // SAFETY: `SIOCGIFFLAGS` reads the name and writes the flags into the union.
    unsafe { call(&socket, libc::SIOCGIFFLAGS, &mut request) }?;
    // SAFETY: that call has written them.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    let is_up = libc::c_int::from(flags) & libc::IFF_UP != 0;
    // SAFETY: `SIOCGIFHWADDR` reads the name and writes the address and its type into the union.
    unsafe { call(&socket, libc::SIOCGIFHWADDR, &mut request) }?;
    // SAFETY: that call has written it.
    let hardware = unsafe { request.ifr_ifru.ifru_hwaddr }.sa_family;
    let (queues, transmit_queues) = queues(&socket, name);
    Ok(Facts { index, mtu, is_up, queues, transmit_queues, hardware })
}

/// Returns how many queues receive, and how many transmit.
fn queues(socket: &OwnedFd, name: &str) -> (Option<u32>, Option<u32>) {
    let mut channels = Channels { command: GET_CHANNELS, ..Channels::default() };
    let mut request = request(name);
    request.ifr_ifru.ifru_data = std::ptr::from_mut(&mut channels).cast();
    // SAFETY: `SIOCETHTOOL` reads the name and the pointer; the command reads and writes the 36
    // bytes of `channels`, which outlives the call.
    if unsafe { call(socket, ETHTOOL, &mut request) }.is_err() {
        return (None, None);
    }
    let known = |queues: u32| (queues > 0).then_some(queues);
    let (receive, transmit) = (channels.receive, channels.transmit);
    let queues = known(receive.saturating_add(channels.combined));
    // A driver that counts no queues at all does not say.
    (queues, queues.and(Some(transmit.saturating_add(channels.combined))))
}

/// Offloads of an interface.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Offloads {
    /// A VLAN tag is inserted by the driver, from beside the packet, when it is sent (`txvlan`).
    pub(crate) transmit_tags: bool,
    /// A VLAN tag is taken out by the driver, and kept beside the packet, when it is received
    /// (`rxvlan`).
    pub(crate) receive_tags: bool,
}

/// Returns the offloads of an interface; none if the kernel does not say.
pub(crate) fn offloads(name: &str) -> Offloads {
    // `ETH_FLAG_TXVLAN`, `ETH_FLAG_RXVLAN`.
    const TRANSMIT: u32 = 1 << 7;
    const RECEIVE: u32 = 1 << 8;
    let mut flags = Value { command: GET_FLAGS, data: 0 };
    let mut request = request(name);
    request.ifr_ifru.ifru_data = std::ptr::from_mut(&mut flags).cast();
    let Ok(socket) = socket() else { return Offloads::default() };
    // SAFETY: `SIOCETHTOOL` reads the name and the pointer; the command reads and writes the 8
    // bytes of `flags`, which outlives the call.
    if unsafe { call(&socket, ETHTOOL, &mut request) }.is_err() {
        return Offloads::default();
    }
    let has = |flag: u32| flags.data & flag != 0;
    Offloads { transmit_tags: has(TRANSMIT), receive_tags: has(RECEIVE) }
}

fn socket() -> Result<OwnedFd, Errno> {
    Ok(rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Returns a request with the name, cut to the 15 bytes that names have.
fn request(name: &str) -> libc::ifreq {
    // SAFETY: a structure of integers, pointers and arrays, for which zeroes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let room = request.ifr_name.len() - 1;
    for (to, byte) in request.ifr_name.iter_mut().zip(name.bytes().take(room)) {
        *to = libc::c_char::from_ne_bytes([byte]);
    }
    request
}

/// # Safety
/// `number` is a request that takes an `ifreq`, and what that points to is what the request takes.
unsafe fn call(
    socket: &OwnedFd,
    number: libc::c_ulong,
    request: &mut libc::ifreq,
) -> Result<(), Errno> {
    // SAFETY: the kernel reads and writes the structure during the call; the rest is the caller's
    // promise.
    let answer = unsafe { libc::ioctl(socket.as_raw_fd(), number, std::ptr::from_mut(request)) };
    if answer < 0 { Err(last_errno()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_found_and_others_are_not() {
        let loopback = facts("lo").unwrap();
        assert!(loopback.index > 0 && loopback.mtu >= 1500, "{loopback:?}");
        assert_eq!(loopback.hardware, libc::ARPHRD_LOOPBACK);
        assert_eq!(facts("no-such-link").unwrap_err().raw(), libc::ENODEV);
        // Longer than a name can be.
        assert!(facts("a-name-of-more-than-fifteen-bytes").is_err());
    }
}
