//! Route netlink (`rtnetlink(7)`): requests, and the messages that answer them. In the calling
//! thread's network namespace, and without `/proc`.
//!
//! The answers are parsed here: three kinds of message and a dozen attributes are needed, which a
//! library for all of netlink would read with 20,000 lines.

use super::last_errno;
use pinfold::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::os::fd::{AsRawFd, OwnedFd};

/// Larger than any message of a dump: the kernel uses 32 KiB.
const BUFFER: usize = 64 << 10;
/// `struct nlmsghdr`.
const HEADER: usize = 16;
/// The number of repetitions of a dump while the kernel's tables change.
const ATTEMPTS: usize = 10;

const REQUEST: u16 = 0x1;
const ACK: u16 = 0x4;
const DUMP: u16 = 0x300;
/// The tables changed during the dump (`NLM_F_DUMP_INTR`).
const INTERRUPTED: u16 = 0x10;
/// The answer to a request has attributes behind it (`NLM_F_ACK_TLVS`), and leaves the request out
/// (`NLM_F_CAPPED`).
const HAS_ATTRIBUTES: u16 = 0x200;
const ERROR: u16 = 2;
const DONE: u16 = 3;

/// Why the kernel's tables could not be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NetlinkError {
    /// A call failed, or the kernel refused the request.
    #[error("netlink: {0}")]
    Refused(Errno),
    /// A message is cut, or its fields contradict each other.
    #[error("netlink: a message of the kernel cannot be read")]
    Malformed,
    /// The tables changed during each of several attempts.
    #[error("netlink: the kernel's tables changed while they were read: try again")]
    Changing,
}

impl From<rustix::io::Errno> for NetlinkError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Refused(errno.into())
    }
}

/// A socket to the kernel's network configuration.
#[derive(Debug)]
pub(crate) struct Netlink {
    fd: OwnedFd,
    sequence: u32,
}

impl Netlink {
    /// Opens a socket. Requires no capability.
    pub(crate) fn open() -> Result<Self, NetlinkError> {
        let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
        Ok(Self {
            fd: rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?,
            sequence: 0,
        })
    }

    /// Passes the kind and the body of each message of a dump to `each`, and returns the values it
    /// returned. A dump during which the kernel's tables changed is repeated.
    pub(crate) fn dump<T>(
        &mut self,
        kind: u16,
        body: &[u8],
        each: impl Fn(u16, &[u8]) -> Result<Option<T>, NetlinkError>,
    ) -> Result<Vec<T>, NetlinkError> {
        for _ in 0..ATTEMPTS {
            self.send(kind, REQUEST | DUMP, body)?;
            let (mut found, mut is_consistent) = (Vec::new(), true);
            let mut buffer = vec![0; BUFFER];
            'parts: loop {
                for message in Messages(self.receive(&mut buffer)?) {
                    let Message { kind, flags, sequence, body } = message?;
                    if sequence != self.sequence {
                        continue;
                    }
                    is_consistent &= flags & INTERRUPTED == 0;
                    match kind {
                        DONE | ERROR => {
                            // Before Linux 4.20 the end of a dump may have no number.
                            if kind == ERROR || body.len() >= 4 {
                                refusal(body)?;
                            }
                            break 'parts;
                        }
                        _ => found.extend(each(kind, body)?),
                    }
                }
            }
            if is_consistent {
                return Ok(found);
            }
        }
        Err(NetlinkError::Changing)
    }

    /// Sends a request and waits for its acknowledgement; returns what the kernel says about a
    /// refusal, if it says so.
    pub(crate) fn request(
        &mut self,
        kind: u16,
        body: &[u8],
    ) -> Result<(), (NetlinkError, Option<String>)> {
        let without_text = |error| (error, None);
        self.explain().map_err(|errno| without_text(NetlinkError::Refused(errno)))?;
        self.send(kind, REQUEST | ACK, body).map_err(without_text)?;
        let mut buffer = vec![0; BUFFER];
        loop {
            for message in Messages(self.receive(&mut buffer).map_err(without_text)?) {
                let Message { kind, flags, sequence, body } = message.map_err(without_text)?;
                if sequence == self.sequence && kind == ERROR {
                    return refusal(body).map_err(|error| (error, explanation(flags, body)));
                }
            }
        }
    }

    /// Sends a request that one message answers, and returns what `read` makes of it.
    pub(crate) fn ask<T>(
        &mut self,
        kind: u16,
        body: &[u8],
        read: impl Fn(u16, &[u8]) -> Option<T>,
    ) -> Result<T, NetlinkError> {
        self.send(kind, REQUEST, body)?;
        let mut buffer = vec![0; BUFFER];
        loop {
            for message in Messages(self.receive(&mut buffer)?) {
                let Message { kind, sequence, body, .. } = message?;
                if sequence == self.sequence {
                    if kind == ERROR {
                        refusal(body)?;
                    }
                    return read(kind, body).ok_or(NetlinkError::Malformed);
                }
            }
        }
    }

    /// Asks for words with refusals (`NETLINK_EXT_ACK`, Linux 4.12), without a copy of the request
    /// (`NETLINK_CAP_ACK`).
    fn explain(&self) -> Result<(), Errno> {
        for option in [libc::NETLINK_CAP_ACK, libc::NETLINK_EXT_ACK] {
            let on: libc::c_int = 1;
            // SAFETY: the option takes an integer of 4 bytes, which is read during the call.
            let set = unsafe {
                libc::setsockopt(
                    self.fd.as_raw_fd(),
                    libc::SOL_NETLINK,
                    option,
                    std::ptr::from_ref(&on).cast(),
                    4,
                )
            };
            if set < 0 {
                return Err(last_errno());
            }
        }
        Ok(())
    }

    fn send(&mut self, kind: u16, flags: u16, body: &[u8]) -> Result<(), NetlinkError> {
        self.sequence = self.sequence.wrapping_add(1);
        let len = u32::try_from(HEADER + body.len()).map_err(|_| NetlinkError::Malformed)?;
        let mut message = Vec::with_capacity(HEADER + body.len());
        message.extend(len.to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(flags.to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        // The kernel knows the sender's number.
        message.extend([0; 4]);
        message.extend(body);
        // Unconnected, it goes to the kernel.
        rustix::net::send(&self.fd, &message, SendFlags::empty())?;
        Ok(())
    }

    fn receive<'b>(&self, buffer: &'b mut Vec<u8>) -> Result<&'b [u8], NetlinkError> {
        let received = loop {
            match rustix::net::recv(&self.fd, buffer.as_mut_slice(), RecvFlags::TRUNC) {
                Err(rustix::io::Errno::INTR) => {}
                received => break received?.1,
            }
        };
        // Longer than the buffer: what was cut off is lost.
        buffer.get(..received).ok_or(NetlinkError::Malformed)
    }
}

/// Reads the number in an acknowledgement, or at the end of a dump.
fn refusal(body: &[u8]) -> Result<(), NetlinkError> {
    match i32::from_ne_bytes(*body.first_chunk().ok_or(NetlinkError::Malformed)?) {
        0 => Ok(()),
        number => Err(NetlinkError::Refused(Errno::new(number.saturating_neg()))),
    }
}

/// Reads the kernel's words from a refusal, in printable ASCII.
fn explanation(flags: u16, body: &[u8]) -> Option<String> {
    /// `NLMSGERR_ATTR_MSG`.
    const TEXT: u16 = 1;
    if flags & HAS_ATTRIBUTES == 0 {
        return None;
    }
    // The number, and the header of the request.
    let text = Attributes(body.get(4 + HEADER..)?)
        .filter_map(Result::ok)
        .find(|(kind, _)| *kind == TEXT)?
        .1;
    let printable = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ';
    let text: String = text.iter().copied().take_while(printable).map(char::from).collect();
    (!text.is_empty()).then_some(text)
}

/// A message of the kernel, without its header.
#[derive(Clone, Copy, Debug)]
struct Message<'m> {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: &'m [u8],
}

/// The messages in what was received; ends behind the first that cannot be read.
struct Messages<'m>(&'m [u8]);

impl<'m> Iterator for Messages<'m> {
    type Item = Result<Message<'m>, NetlinkError>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = std::mem::take(&mut self.0);
        if rest.is_empty() {
            return None;
        }
        let read = || {
            let len = usize::try_from(u32_at(rest, 0)?).ok()?;
            let (kind, flags, sequence) = (u16_at(rest, 4)?, u16_at(rest, 6)?, u32_at(rest, 8)?);
            let body = rest.get(HEADER..len)?;
            let message = Message { kind, flags, sequence, body };
            Some((message, rest.get(len.next_multiple_of(4)..).unwrap_or_default()))
        };
        Some(read().ok_or(NetlinkError::Malformed).map(|(message, behind)| {
            self.0 = behind;
            message
        }))
    }
}

/// The attributes of a message, each with its kind; ends behind the first that cannot be read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attributes<'m>(pub(crate) &'m [u8]);

impl<'m> Iterator for Attributes<'m> {
    type Item = Result<(u16, &'m [u8]), NetlinkError>;

    fn next(&mut self) -> Option<Self::Item> {
        /// Whether it is nested, and in the order of the network.
        const FLAGS: u16 = 0xc000;
        let rest = std::mem::take(&mut self.0);
        if rest.is_empty() {
            return None;
        }
        let read = || {
            let len = usize::from(u16_at(rest, 0)?);
            let attribute = (u16_at(rest, 2)? & !FLAGS, rest.get(4..len)?);
            Some((attribute, rest.get(len.next_multiple_of(4)..).unwrap_or_default()))
        };
        Some(read().ok_or(NetlinkError::Malformed).map(|(attribute, behind)| {
            self.0 = behind;
            attribute
        }))
    }
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Appends an attribute, padded.
pub(crate) fn push_attribute(to: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let len = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    to.extend(len.to_ne_bytes());
    to.extend(kind.to_ne_bytes());
    to.extend(value);
    to.resize(to.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
        let len = u32::try_from(HEADER + body.len()).unwrap();
        let mut message =
            [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), &flags.to_ne_bytes(), &[7; 8], body]
                .concat();
        message.resize(message.len().next_multiple_of(4), 0);
        message
    }

    #[test]
    fn messages_that_are_cut_are_errors_and_end_the_list() {
        let both = [message(24, 0, b"first"), message(24, 0, b"second, longer")].concat();
        let bodies = |bytes: &[u8]| {
            Messages(bytes).map(|read| read.map(|read| read.body.len())).collect::<Vec<_>>()
        };
        assert_eq!(bodies(&both), [Ok(5), Ok(14)]);
        // The padding of the last may be missing.
        let end = both.len() - 2;
        for cut in 1..both.len() {
            let read = bodies(&both[..cut]);
            let whole = if cut < 21 {
                0
            } else if cut < end {
                1
            } else {
                2
            };
            assert_eq!(read.iter().filter(|read| read.is_ok()).count(), whole, "{cut} bytes");
            let is_exact = cut >= end || (21..=24).contains(&cut);
            assert_eq!(
                read.last() == Some(&Err(NetlinkError::Malformed)),
                !is_exact,
                "{cut} bytes"
            );
        }
        // A length of less than a header would be read for ever.
        assert_eq!(bodies(&[0; 64]), [Err(NetlinkError::Malformed)]);
    }

    #[test]
    fn attributes_of_impossible_lengths_are_errors() {
        let mut bytes = Vec::new();
        push_attribute(&mut bytes, 4 | 0x8000, &[1, 2, 3, 4, 5]);
        push_attribute(&mut bytes, 9, &[]);
        let read: Vec<_> = Attributes(&bytes).collect();
        assert_eq!(read, [Ok((4, &[1, 2, 3, 4, 5][..])), Ok((9, &[][..]))]);
        for len in [0u16, 3, 17] {
            bytes[12..14].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(Attributes(&bytes).last(), Some(Err(NetlinkError::Malformed)), "{len}");
        }
    }

    #[test]
    fn a_refusal_has_its_number_and_the_words_of_the_kernel() {
        let mut body = [&(-libc::ERANGE).to_ne_bytes()[..], &[0; HEADER]].concat();
        push_attribute(&mut body, 1, b"veth: Peer MTU\0");
        assert_eq!(refusal(&body), Err(NetlinkError::Refused(Errno::new(libc::ERANGE))));
        assert_eq!(explanation(HAS_ATTRIBUTES, &body).as_deref(), Some("veth: Peer MTU"));
        assert_eq!(explanation(0, &body), None);
        assert_eq!((refusal(&[0; 4]), refusal(&[1; 3])), (Ok(()), Err(NetlinkError::Malformed)));
        assert_eq!(
            refusal(&i32::MIN.to_ne_bytes()),
            Err(NetlinkError::Refused(Errno::new(i32::MAX)))
        );
    }
}
