//! A network namespace for the calling thread, with two interfaces that are connected to each
//! other.

use pinfold_xdp::{Interface, OpenError, Options, Packet, Redirect, Socket, redirect};
use rustix::thread::UnshareFlags;
use std::net::UdpSocket;
use std::process::Command;
use std::time::{Duration, Instant};

/// The address of the kernel's end, and the one that it sends to.
const HERE: &str = "10.99.0.1";
const THERE: &str = "10.99.0.2";
const PORT: u16 = 7000;

/// How long a test waits for the kernel or a program.
pub(crate) const LIMIT: Duration = Duration::from_secs(180);

/// Two interfaces: the kernel sends through `v0`, and sockets receive on `v1`.
pub(crate) struct Wire {
    queues: u32,
}

impl Wire {
    /// Moves the calling thread into a new namespace and creates the pair; `None`, with a message,
    /// where that is not allowed.
    pub(crate) fn new(queues: u32, mtu: u32) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: needs root, for a network namespace");
            return None;
        }
        if Command::new("ip").arg("-V").output().is_err() {
            eprintln!("SKIPPED: needs ip (sudo apt-get install iproute2)");
            return None;
        }
        // SAFETY: a new network namespace concerns sockets that are created later, and nothing in
        // memory.
        let unshared = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) };
        if let Err(errno) = unshared {
            eprintln!("SKIPPED: no network namespace: {errno}");
            return None;
        }
        let queues_of =
            |name: &str| format!("{name} mtu {mtu} numrxqueues {queues} numtxqueues {queues}");
        run(&format!("ip link add {} type veth peer name {}", queues_of("v0"), queues_of("v1")));
        for name in ["v0", "v1"] {
            // No address of IPv6, whose own packets would be counted.
            std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1").ok();
            run(&format!("ip link set dev {name} addrgenmode none"));
        }
        run("ip link set dev lo up");
        up();
        run(&format!("ip addr add {HERE}/24 dev v0"));
        let mac = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default();
        assert!(mac.contains("v1:"), "the namespace has no v1: {mac}");
        run(&format!("ip link set dev v1 address {}", mac_text(MAC)));
        run(&format!("ip neigh add {THERE} lladdr {} dev v0 nud permanent", mac_text(MAC)));
        Some(Self { queues })
    }

    /// Returns the end that sockets receive on.
    pub(crate) fn far(&self) -> Interface {
        redirect::interface("v1").unwrap()
    }

    /// Returns the kernel's end.
    pub(crate) fn near(&self) -> Interface {
        redirect::interface("v0").unwrap()
    }

    /// Opens one socket for each queue of the far end, and passes them its packets.
    pub(crate) fn receive(&self, options: Options) -> Vec<Socket> {
        let interface = self.far();
        let redirect = once_released(|| Redirect::attach(&interface));
        let open = |queue| {
            let mut socket = once_released(|| options.queue(queue).open(&interface));
            socket.redirect(&redirect).unwrap();
            socket
        };
        (0..self.queues).map(open).collect()
    }

    /// Returns a socket of the kernel whose datagrams arrive at the far end.
    pub(crate) fn sender(&self) -> UdpSocket {
        let socket = UdpSocket::bind((HERE, 0)).unwrap();
        socket.connect((THERE, PORT)).unwrap();
        socket
    }

    /// Returns what the near end's driver has dropped, because the far end did not keep up. (What
    /// the far end's driver counts are the packets that the socket refused, which counts them
    /// itself.)
    pub(crate) fn driver_drops(&self) -> u64 {
        near(11)
    }
}

/// Brings both ends up, and waits until the near one sends: the kernel enables that in deferred work,
/// under a lock of all namespaces, and drops packets before without counting them.
pub(crate) fn up() {
    run("ip link set dev v0 up");
    run("ip link set dev v1 up");
    wait_until("v0 sends", || {
        let shown = Command::new("ip").args("-o link show dev v0".split(' ')).output().unwrap();
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        shown.contains("state UP") && !shown.contains("qdisc noop ")
    });
}

/// Opens what an earlier user has had, and the kernel may release later than is waited for.
fn once_released<T>(open: impl Fn() -> Result<T, OpenError>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        match open() {
            Err(OpenError::QueueBusy { .. } | OpenError::ProgramPresent { .. })
                if Instant::now() < end => {}
            opened => return opened.unwrap(),
        }
    }
}

/// Returns how many packets of the near end have reached the far end's driver, or were dropped because
/// its queue was full: one that waits in this queue is in neither.
pub(crate) fn arrived() -> u64 {
    near(9) + near(11)
}

/// Returns how many packets have come back to the near end, or were dropped there.
pub(crate) fn returned() -> u64 {
    near(1) + near(3)
}

/// Returns a figure of the near end: 1 are the received packets, 3 is the "drop" of them, 9 and 11 are
/// the same of the transmitted ones.
fn near(field: usize) -> u64 {
    let table = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = table.lines().find_map(|line| line.trim().strip_prefix("v0:")).unwrap();
    line.split_whitespace().nth(field).unwrap().parse().unwrap()
}

/// Returns how many packets to the near end the kernel has dropped, because the queue of the
/// processor was full.
pub(crate) fn reply_drops() -> u64 {
    near(3)
}

/// Asks a mirror each of `questions` until it answers. A question is asked again if the kernel counts
/// a packet as dropped meanwhile, and for no other reason: it has one queue for each processor, which
/// all namespaces share. Only such a question may be answered again later.
pub(crate) fn ask(socket: &UdpSocket, questions: impl IntoIterator<Item = Vec<u8>>) {
    socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let drops = || reply_drops() + near(11);
    let (mut answered, mut repeated, mut bytes) = (Vec::new(), 0, [0; 2048]);
    for question in questions {
        let end = Instant::now() + LIMIT;
        let mut before = drops();
        socket.send(&question).unwrap();
        loop {
            match socket.recv(&mut bytes) {
                Ok(len) if bytes[..len] == question => break,
                Ok(len) => {
                    let answer = bytes[..len].to_vec();
                    let is_late = repeated > 0 && answered.contains(&answer);
                    assert!(is_late, "{answer:?} is no answer to {question:?}");
                    repeated -= 1;
                }
                Err(error) => {
                    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}");
                    assert!(Instant::now() < end, "no answer to {question:?}");
                    let now = drops();
                    if now > before {
                        socket.send(&question).unwrap();
                        (before, repeated) = (now, repeated + 1);
                    }
                }
            }
        }
        answered.push(question);
    }
}

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 0x11];

fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Waits until `is_so`.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < end, "not in {LIMIT:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a command in the namespace of the calling thread.
pub(crate) fn run(command: &str) {
    let mut words = command.split_whitespace();
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Returns the number that a datagram begins with.
pub(crate) fn number_of(packet: &Packet) -> Option<u64> {
    let mut bytes = [0; 50];
    number_of_bytes(packet.peek(&mut bytes))
}

/// Returns the number that a datagram begins with, from the bytes of its packet.
pub(crate) fn number_of_bytes(bytes: &[u8]) -> Option<u64> {
    // Ethernet, IPv4, UDP to the port.
    let is_numbered =
        bytes.len() >= 50 && bytes[12..14] == [8, 0] && bytes[36..38] == PORT.to_be_bytes();
    is_numbered.then(|| u64::from_be_bytes(bytes[42..50].try_into().unwrap()))
}

/// Receives on all sockets until `each` returns false, or nothing is being sent and nothing has
/// arrived for 300 ms; `each` is called with each packet. The last look at the sockets begins after
/// that time: a thread that was stopped for longer leaves nothing in a ring.
pub(crate) fn receive_until(
    sockets: &mut [Socket],
    is_sending: impl Fn() -> bool,
    mut each: impl FnMut(&mut Socket, Packet) -> bool,
) {
    let (mut last, mut packets) = (Instant::now(), Vec::new());
    loop {
        if is_sending() {
            last = Instant::now();
        }
        let (began, is_quiet) = (Instant::now(), last.elapsed() >= Duration::from_millis(300));
        for socket in &mut *sockets {
            if socket.receive(&mut packets, 64) == 0 {
                socket.wait(Duration::from_millis(1)).unwrap();
                continue;
            }
            last = Instant::now();
            for packet in packets.drain(..) {
                if !each(socket, packet) {
                    return;
                }
            }
        }
        if is_quiet && last < began {
            return;
        }
    }
}
