//! Errors, with the value, the limit, and the next step.
//!
//! ```
//! use pinfold_xdp::{Interface, OpenError, Socket};
//!
//! let error = pinfold_xdp::redirect::interface("no-such-link").unwrap_err();
//! assert!(matches!(error, OpenError::NoInterface { .. }));
//! println!("{error}"); // no interface no-such-link: `ip link` lists them
//! ```

use crate::packet::Packet;
use crate::system::{Attached, CallError, Interface, LinkType, Program};
use pinfold::memory::arena::BuildError;
use pinfold::page_pool::CreateError;
use pinfold::{Errno, MemlockLimit};
use std::time::{Duration, Instant};

/// Why a queue could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There is no such interface in this network namespace.
    #[error("no interface {name}: `ip link` lists them")]
    NoInterface {
        /// The name.
        name: String,
    },
    /// The interface has fewer queues.
    #[error("{interface} has no queue {queue}{}", queues_known(*.queues))]
    NoQueue {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u32,
        /// The number of its queues, if the driver reports it.
        queues: Option<u32>,
    },
    /// Another socket has the queue.
    #[error(
        "queue {queue} of {interface} is in use by another AF_XDP socket: `ss --xdp --processes` names its program"
    )]
    QueueBusy {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u32,
    },
    /// The interface has a program already.
    #[error(
        "{interface} has an XDP program already, which is not replaced: end what attached it, or, if nothing needs it, run \
         `sudo ip link set dev {interface} xdp off`, and then `sudo ip link set dev {interface} xdpgeneric off`, which \
         detaches one of the generic mode; neither detaches one that a link holds: end its owner, or remove its pin"
    )]
    ProgramPresent {
        /// The interface.
        interface: String,
    },
    /// The driver does not run the program, or the network stack does not.
    #[error(
        "{interface}: {} refused by the {}: {errno}{}",
        match .attached { Attached::Native => "native XDP", Attached::Generic => "generic XDP" },
        match .attached { Attached::Native => "driver", Attached::Generic => "kernel" },
        .reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default()
    )]
    Refused {
        /// The interface.
        interface: String,
        /// The place where it was to run.
        attached: Attached,
        /// The error.
        errno: Errno,
        /// The driver's words, if it has any.
        reason: Option<String>,
    },
    /// Packets may be larger than a chunk.
    #[error(
        "the MTU of {interface} is {mtu}, and a chunk of {chunk} bytes holds packets up to an MTU of {limit}: {}",
        larger_chunk(*.chunk, *.mtu, interface, *.is_loopback)
    )]
    Mtu {
        /// The interface.
        interface: String,
        /// Its MTU.
        mtu: u32,
        /// The largest MTU that fits.
        limit: u32,
        /// The size of a chunk in bytes.
        chunk: u32,
        /// Whether it is the loopback interface, whose MTU every program of the machine depends on.
        is_loopback: bool,
    },
    /// Its packets begin with a header that is not known here.
    #[error("{interface} is a link of type {link}: only Ethernet and raw IP (tun) are received")]
    LinkType {
        /// The interface.
        interface: String,
        /// Its type.
        link: LinkType,
    },
    /// The process lacks capabilities.
    #[error("{call}: not permitted; {}", permit(program))]
    Privileges {
        /// The call that was refused.
        call: &'static str,
        /// The capabilities that the thread lacks.
        missing: Vec<&'static str>,
        /// The running program.
        program: String,
    },
    /// The memory exceeds `RLIMIT_MEMLOCK`.
    #[error(
        "{bytes} bytes for packets cannot be locked ({limit}): {}{}",
        .limit.raise_command_for_user(*.bytes),
        if crate::system::Privileges::here().initial_user_namespace { ", or give the process CAP_IPC_LOCK" } else { "" }
    )]
    Memlock {
        /// The size of the memory in bytes.
        bytes: u64,
        /// The limit.
        limit: MemlockLimit,
    },
    /// Zero-copy was required.
    #[error(
        "the driver of {interface} has no zero-copy for queue {queue}: leave the choice to the kernel, or copy"
    )]
    NoZeroCopy {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u32,
    },
    /// The interface is down.
    #[error("{interface} is down: sudo ip link set dev {interface} up")]
    Down {
        /// The interface.
        interface: String,
    },
    /// The sizes of rings or memory do not fit each other.
    #[error(
        "rings of {fill} (fill), {completion} (completion), {receive} (receive) and {transmit} (transmit) entries with {chunks} \
         chunks: each must be a power of two from 64 to {limit}, and the fill ring not larger than the chunks"
    )]
    Sizes {
        /// Entries of the fill ring.
        fill: u32,
        /// Entries of the completion ring.
        completion: u32,
        /// Entries of the receive ring.
        receive: u32,
        /// Entries of the transmit ring.
        transmit: u32,
        /// The number of chunks.
        chunks: u64,
        /// The largest ring.
        limit: u32,
    },
    /// The memory could not be obtained.
    #[error(transparent)]
    Memory(#[from] BuildError),
    /// The page pool could not be created.
    #[error(transparent)]
    Pool(#[from] CreateError),
    /// Another call failed.
    #[error("{interface}: {error}")]
    Call {
        /// The interface.
        interface: String,
        /// The call.
        error: CallError,
    },
}

fn queues_known(queues: Option<u32>) -> String {
    match queues {
        Some(0) => ": it has none that receives".to_owned(),
        Some(1) => ": it has one, queue 0".to_owned(),
        Some(queues) => format!(": it has {queues}, 0 to {}", queues - 1),
        None => ": `ethtool --show-channels` lists them".to_owned(),
    }
}

fn larger_chunk(chunk: u32, mtu: u32, interface: &str, is_loopback: bool) -> String {
    let limit = crate::socket::mtu_limit(4096);
    if chunk < 4096 && mtu <= limit {
        "use chunks of 4096 bytes".to_owned()
    } else if is_loopback {
        "the loopback interface is every program's; name another one".to_owned()
    } else {
        format!("sudo ip link set dev {interface} mtu {limit}")
    }
}

/// Returns what this process lacks, with the command that grants it if one can.
fn permit(program: &str) -> String {
    match crate::system::Privileges::here().advice(program.as_ref()) {
        (why, Some(fix)) => format!("{why}: run it as root, or once: {fix}"),
        (why, None) => why,
    }
}

const EPERM: i32 = 1;
const ENXIO: i32 = 6;
const EACCES: i32 = 13;
const EBUSY: i32 = 16;
const EEXIST: i32 = 17;
const ENODEV: i32 = 19;
const EINVAL: i32 = 22;
const E2BIG: i32 = 7;
const EOPNOTSUPP: i32 = 95;
const ENETDOWN: i32 = 100;
const ENOBUFS: i32 = 105;

/// How long a queue or a program is waited for. The kernel frees them in work that it defers until
/// a grace period of RCU and a lock of all interfaces allow it: some milliseconds, but much longer
/// while other interfaces come and go.
const RELEASE: Duration = Duration::from_secs(5);
/// The longest time that the kernel needs if nothing delays it.
const USUAL_RELEASE: Duration = Duration::from_millis(500);

/// Repeats a call while what it needs is in use: the kernel releases a queue and a program some
/// time after the process that had them has ended. Says so when it takes longer than that usually
/// does.
pub(crate) fn while_busy<T>(
    interface: &Interface,
    call: impl Fn() -> Result<T, CallError>,
) -> Result<T, CallError> {
    let began = Instant::now();
    let mut told = false;
    loop {
        match call() {
            Err(error)
                if [EBUSY, EEXIST].contains(&error.errno.raw()) && began.elapsed() < RELEASE =>
            {
                if !told && began.elapsed() > USUAL_RELEASE {
                    told = true;
                    let seconds = RELEASE.as_secs();
                    tracing::warn!(
                        "{} is in use by another program, or one that has just ended: waiting up to {seconds} s",
                        interface.name()
                    );
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            result => return result,
        }
    }
}

/// Returns whether a program is refused in whatever mode it is attached: by a lack of privileges, or
/// before any driver was asked.
pub(crate) fn is_final(error: &CallError) -> bool {
    !error.is_of_driver() || [EPERM, EACCES, ENODEV].contains(&error.errno.raw())
}

/// Returns whether it is the driver that refused a program: not one that is present, nor a lack of
/// privileges or a limit of this process.
pub(crate) fn is_refusal(error: &CallError) -> bool {
    !is_final(error) && ![EBUSY, EEXIST].contains(&error.errno.raw())
}

/// Translates a failed look-up.
pub(crate) fn of_lookup(name: &str, error: CallError) -> OpenError {
    match error.errno.raw() {
        ENODEV => OpenError::NoInterface { name: name.to_owned() },
        _ => OpenError::Call { interface: name.to_owned(), error },
    }
}

/// Translates a failure to attach the program.
pub(crate) fn of_attach(interface: &Interface, error: CallError) -> OpenError {
    match error.errno.raw() {
        EBUSY | EEXIST => OpenError::ProgramPresent { interface: interface.name().to_owned() },
        ENODEV => OpenError::NoInterface { name: interface.name().to_owned() },
        _ => general(interface, error),
    }
}

/// Names who refused the program, and asks for the reason.
pub(crate) fn of_refusal(interface: &Interface, attached: Attached, error: CallError) -> OpenError {
    if is_final(&error) {
        return of_attach(interface, error);
    }
    let reason = match attached {
        Attached::Native if is_refusal(&error) => Program::reason_of_refusal(interface),
        Attached::Native | Attached::Generic => None,
    };
    OpenError::Refused {
        interface: interface.name().to_owned(),
        attached,
        errno: error.errno,
        reason,
    }
}

/// Translates a failure to create the socket over `bytes` bytes.
pub(crate) fn of_memory(interface: &Interface, bytes: u64, error: CallError) -> OpenError {
    match error.errno.raw() {
        // AF_XDP returns this for the limit alone. More locked memory would not help if the next
        // call is refused.
        ENOBUFS if !crate::system::Privileges::here().suffice() => not_permitted(error.call),
        ENOBUFS if pinfold::MemlockLimit::here().left().is_some() => {
            OpenError::Memlock { bytes, limit: pinfold::MemlockLimit::here() }
        }
        _ => general(interface, error),
    }
}

/// Translates a failure to bind to a queue or to enter its socket.
pub(crate) fn of_bind(interface: &Interface, queue: u32, error: CallError) -> OpenError {
    let name = interface.name().to_owned();
    match error.errno.raw() {
        EBUSY => OpenError::QueueBusy { interface: name, queue },
        // For a queue that the interface has, it means something else.
        EINVAL | E2BIG if interface.queues().is_none_or(|queues| queue >= queues) => {
            OpenError::NoQueue { interface: name, queue, queues: interface.queues() }
        }
        EOPNOTSUPP => OpenError::NoZeroCopy { interface: name, queue },
        ENETDOWN => OpenError::Down { interface: name },
        _ => general(interface, error),
    }
}

fn general(interface: &Interface, error: CallError) -> OpenError {
    match error.errno.raw() {
        EPERM | EACCES => not_permitted(error.call),
        _ => OpenError::Call { interface: interface.name().to_owned(), error },
    }
}

fn not_permitted(call: &'static str) -> OpenError {
    OpenError::Privileges {
        call,
        missing: crate::system::Privileges::here().missing,
        program: std::env::current_exe()
            .map_or_else(|_| "PROGRAM".to_owned(), |path| path.display().to_string()),
    }
}

/// Why an open socket failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocketError {
    /// The interface is down, or has been removed.
    #[error("queue {queue} of {interface}: the interface is down or was removed")]
    Gone {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u32,
    },
    /// A call failed.
    #[error("queue {queue} of {interface}: {error}")]
    Call {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u32,
        /// The call.
        error: CallError,
    },
}

impl SocketError {
    pub(crate) fn new(interface: &Interface, queue: u32, error: CallError) -> Self {
        let interface = interface.name().to_owned();
        match error.errno.raw() {
            // ENXIO: the kernel has unbound the socket from the interface already.
            ENETDOWN | ENODEV | ENXIO => Self::Gone { interface, queue },
            _ => Self::Call { interface, queue, error },
        }
    }
}

/// A packet that cannot be sent by this socket, and why.
#[derive(Debug, thiserror::Error)]
#[error("a packet of {} bytes cannot be sent: {why}", packet.len())]
pub struct TransmitError {
    /// The packet, which the caller owns again.
    pub packet: Packet,
    /// Why.
    pub why: TransmitRefused,
}

/// Why a packet was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransmitRefused {
    /// It lies in the memory of another socket.
    #[error("it lies in the memory of another socket")]
    Foreign,
    /// It is too short or too long for the interface.
    #[error("the interface sends {least} to {limit} bytes")]
    Length {
        /// The smallest packet in bytes.
        least: usize,
        /// The largest packet in bytes.
        limit: usize,
    },
    /// The interface has fewer transmit queues than the socket's number requires.
    #[error(
        "queue {queue} has no transmit queue, of which the interface has {queues}: `ethtool --set-channels` sets their number"
    )]
    NoQueue {
        /// The socket's queue.
        queue: u32,
        /// The number of transmit queues.
        queues: u32,
    },
    /// The transmit ring is full.
    #[error(
        "the transmit ring is full: flush() and collect() what was sent, then transmit it again"
    )]
    Full,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_memory_is_not_named_a_limit() {
        let Ok(lo) = Interface::named("lo") else { return eprintln!("SKIPPED: no loopback") };
        let errno = pinfold::Errno::new(12);
        let error = of_memory(&lo, 1 << 20, CallError { call: "setsockopt", errno });
        assert!(error.to_string().contains("the kernel has no memory for it"), "{error}");
        let refused = |errno| CallError { call: "setsockopt", errno };
        let error = of_memory(&lo, 1 << 20, refused(pinfold::Errno::new(ENOBUFS)));
        assert!(!error.to_string().contains("no memory"), "{error}");
    }
}
