//! `receive` on links of all kinds: refusals of the native mode, raw IP, the default route, and
//! replies with checksums.

use crate::common::{Folder, finish, finish_with, pinfold, skipped, start, wait_until};
use crate::receive::{
    interrupt, interrupted, receive, receiving, receiving_by, wait_until_received,
};
use crate::wire::{LIMIT, Wire, arrived, ask, run};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The driver of veth takes no native program at this MTU.
#[test]
fn a_refusal_of_the_native_mode_is_one_note_with_its_cause() {
    let Some(wire) = Wire::new(1, 3520) else { return };
    let child = receiving(&["--count", "5", "--json"]);
    let sender = wire.sender();
    // Every size that the MTU allows is received.
    let end = Instant::now() + LIMIT;
    for len in [1usize, 1400, 3000, 3492, 3492] {
        // In the generic mode, the kernel may drop one, and counts that.
        loop {
            assert!(Instant::now() < end, "each datagram of {len} bytes is dropped");
            let (before, drops) = (arrived(), wire.driver_drops());
            sender.send(&vec![7; len]).unwrap();
            wait_until("it arrives", || arrived() > before);
            if wire.driver_drops() == drops {
                break;
            }
        }
    }
    let ended = finish(child);
    let notes: Vec<_> = ended.err.lines().collect();
    assert_eq!(notes.len(), 1, "{ended:#?}");
    for part in
        ["v1: native XDP refused by the driver", "os error 34", "MTU is too large", "generic mode"]
    {
        assert!(notes[0].contains(part), "{part:?} is not in {ended:#?}");
    }
    let report = ended.json();
    assert_eq!((&report["packets"], &report["xdp"]), (&5.into(), &"generic".into()), "{report}");
    let by = |mode| receive(&["--xdp", mode, "--seconds", "100ms", "--json"]);
    by("native")
        .failed(1, &["v1: native XDP refused by the driver", "os error 34", "MTU is too large"]);
    assert_eq!(by("generic").json()["xdp"], "generic");
    run("ip link set dev v0 mtu 1500");
    assert_eq!(by("native").json()["xdp"], "native");
}

#[test]
fn the_loopback_interface_is_not_advised_another_mtu() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    let ended = pinfold(&["receive", "lo"]);
    assert!(!ended.err.contains("ip link set"), "{ended:#?}");
    ended.failed(1, &["the MTU of lo is 65536", "name another one"]);
}

/// Sockets of the kernel, which check what comes back.
#[test]
fn replies_of_udp_and_tcp_are_accepted_over_both_protocols() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    std::fs::write("/proc/sys/net/ipv6/conf/v0/disable_ipv6", "0").ok();
    let has_v6 =
        Command::new("ip").args("addr add fd99::1/64 dev v0 nodad".split(' ')).output().unwrap();
    if has_v6.status.success() {
        run("ip neigh add fd99::2 lladdr 02:00:00:00:00:11 dev v0 nud permanent");
        // The kernel adds this route in deferred work.
        wait_until("fd99::1 is an address of this host", || {
            let shown = Command::new("ip").args("-6 route show table local".split(' ')).output();
            String::from_utf8_lossy(&shown.unwrap().stdout).contains("fd99::1")
        });
    } else {
        skipped("IPv6 is not available");
    }
    let child = receiving(&["--reflect", "--json"]);
    let limit = Some(Duration::from_secs(60));
    for (here, there) in [("10.99.0.1", "10.99.0.2"), ("fd99::1", "fd99::2")] {
        if here.contains(':') && !has_v6.status.success() {
            continue;
        }
        let socket = UdpSocket::bind((here, 0)).unwrap();
        socket.connect((there, 7000)).unwrap();
        ask(&socket, (0..5u8).map(|number| vec![number; 1 + 300 * usize::from(number)]));
        // A connection to itself: the mirror answers a SYN by a SYN, and so on.
        let mut stream = TcpStream::connect((there, 7000)).unwrap();
        stream.set_read_timeout(limit).unwrap();
        for number in 0..5u8 {
            let question = vec![number; 700];
            stream.write_all(&question).unwrap();
            let mut answer = [0; 700];
            stream
                .read_exact(&mut answer)
                .unwrap_or_else(|error| panic!("{there}, {number}: {error}"));
            assert_eq!(answer[..], question, "{there}");
        }
        if Command::new("ping").arg("-V").output().is_ok() {
            let ping = Command::new("ping")
                .args(["-c", "3", "-i", "0.01", "-w", "60", there])
                .output()
                .unwrap();
            assert!(ping.status.success(), "{there}: {}", String::from_utf8_lossy(&ping.stdout));
        } else {
            skipped("ping is not installed");
        }
    }
    let report = interrupted(child);
    let protocol = |name: &str| report["protocols"][name].as_u64().unwrap_or(0);
    assert!(protocol("tcp") >= 10 && protocol("udp") >= 5, "{report}");
}

/// `struct ifreq`, as `TUNSETIFF` takes it.
#[repr(C)]
struct TunRequest {
    name: [u8; 16],
    flags: u16,
    rest: [u8; 22],
}

/// Creates a tun device, whose packets are those of the file.
fn tun(name: &str) -> std::io::Result<File> {
    // `TUNSETIFF`; `IFF_TUN`, `IFF_NO_PI`.
    const SET: rustix::ioctl::Opcode = 0x4004_54ca;
    const FLAGS: u16 = 0x1001;
    let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun")?;
    let mut request = TunRequest { name: [0; 16], flags: FLAGS, rest: [0; 22] };
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: the request takes an `ifreq` of 40 bytes, which it reads and writes.
    let update = unsafe { rustix::ioctl::Updater::<SET, TunRequest>::new(&mut request) };
    // SAFETY: it does nothing else to memory.
    unsafe { rustix::ioctl::ioctl(&file, update) }?;
    Ok(file)
}

/// Returns a datagram over IPv4, without a checksum of its own.
fn raw_datagram(from: u8, to: u8, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let len = |header: usize| u16::try_from(header + payload.len()).unwrap().to_be_bytes();
    let mut packet =
        [&[0x45, 0][..], &len(28), &[0, 7, 0, 0, 64, 17, 0, 0, 10, 98, 0, from, 10, 98, 0, to]]
            .concat();
    let sum: u32 =
        packet.chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    let sum = u16::try_from((sum >> 16) + (sum & 0xffff)).unwrap();
    packet[10..12].copy_from_slice(&(!sum).to_be_bytes());
    packet.extend([ports.0.to_be_bytes(), ports.1.to_be_bytes(), len(8), [0; 2]].concat());
    packet.extend(payload);
    packet
}

#[test]
fn raw_ip_is_captured_and_reflected_as_raw_ip() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    let mut tun = match tun("t9") {
        Ok(file) => file,
        Err(error) => return skipped(&format!("no tun device: {error}")),
    };
    std::fs::write("/proc/sys/net/ipv6/conf/t9/disable_ipv6", "1").ok();
    run("ip link set dev t9 up");
    let sent: Vec<_> =
        (0..5u8).map(|number| raw_datagram(1, 2, (1000, 2000), &[number; 40])).collect();
    let folder = Folder::new();
    let file = folder.arg("packets.pcap");
    let child =
        receiving_by(|| start(&["receive", "t9", "--pcap", &file, "--count", "5", "--json"]));
    sent.iter().for_each(|packet| tun.write_all(packet).unwrap());
    let report = finish(child).json();
    assert_eq!(
        (&report["link"], &report["protocols"]["udp"]),
        (&"raw-ip".into(), &5.into()),
        "{report}"
    );
    let mut reader = pcap_file::pcap::PcapReader::new(File::open(&file).unwrap()).unwrap();
    // LINKTYPE_RAW, 101.
    assert_eq!(reader.header().datalink, pcap_file::DataLink::RAW);
    for packet in &sent {
        assert_eq!(*reader.next_packet().unwrap().unwrap().data, packet[..]);
    }

    let child = receiving_by(|| start(&["receive", "t9", "--reflect", "--json"]));
    for (number, packet) in sent.iter().enumerate() {
        tun.write_all(packet).unwrap();
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(
            poll(&mut [PollFd::new(&tun, PollFlags::IN)], Some(&limit)).unwrap(),
            1,
            "no reply"
        );
        let mut reply = [0; 2000];
        let len = tun.read(&mut reply).unwrap();
        assert_eq!(reply[..len], raw_datagram(2, 1, (2000, 1000), &packet[28..]), "{number}");
    }
    interrupt(&child);
    let ended = finish(child);
    let report = ended.report();
    assert_eq!(
        (&report["reflected"], &report["not_reflected"]),
        (&5.into(), &0.into()),
        "{report}"
    );
}

/// Each case in a namespace of its own: the commands, the interface, and that of the route.
#[test]
fn the_default_route_is_found_wherever_it_is() {
    let cases: &[(&[&str], &str, &str)] = &[
        (&["ip route add default via 10.99.0.2 dev v0"], "v0", ""),
        // The other end of the pair: what the route sends arrives there.
        (&["ip route add default via 10.99.0.2 dev v0"], "v1", "of v0"),
        (
            &["sysctl -q net.ipv6.conf.v0.disable_ipv6=0", "ip -6 route add default dev v0"],
            "v0",
            "",
        ),
        (&["ip route add default dev v0 table 100", "ip rule add from all lookup 100"], "v0", ""),
        (&["ip route add 0.0.0.0/1 dev v0", "ip route add 128.0.0.0/1 dev v0"], "v0", ""),
        (
            &[
                "ip route add 0.0.0.0/2 dev v0",
                "ip route add 64.0.0.0/2 dev v0",
                "ip route add 128.0.0.0/2 dev v0",
                "ip route add 192.0.0.0/2 dev v0",
            ],
            "v0",
            "",
        ),
        // All but what is private, as of a VPN: in parts, and no part of those that are left out.
        (
            &[
                "ip route add 0.0.0.0/5 dev v0",
                "ip route add 8.0.0.0/7 dev v0",
                "ip route add 11.0.0.0/8 dev v0",
                "ip route add 12.0.0.0/6 dev v0",
                "ip route add 16.0.0.0/4 dev v0",
                "ip route add 32.0.0.0/3 dev v0",
            ],
            "v0",
            "",
        ),
        // A single one of these parts.
        (&["ip route add 192.0.0.0/3 dev v0"], "v0", ""),
        (
            &[
                "sysctl -q net.ipv6.conf.v0.disable_ipv6=0",
                "ip -6 route add 2000::/4 dev v0",
                "ip -6 route add 3000::/4 dev v0",
            ],
            "v0",
            "",
        ),
        (
            &[
                "sysctl -q net.ipv6.conf.v0.disable_ipv6=0",
                "sysctl -q net.ipv6.conf.d0.disable_ipv6=0",
                "ip -6 route add default nexthop dev d0 nexthop dev v0",
            ],
            "v0",
            "",
        ),
        // Of packets from one address, or with a mark; others leave by another interface.
        (
            &[
                "ip route add default dev d0",
                "ip route add default dev v0 table 100",
                "ip rule add from 10.99.0.1 lookup 100",
            ],
            "v0",
            "",
        ),
        (
            &[
                "ip route add default dev d0",
                "ip route add default dev v0 table 100",
                "ip rule add fwmark 7 lookup 100",
            ],
            "v0",
            "",
        ),
        (&["ip route add default nexthop dev d0 nexthop dev v0"], "v0", ""),
        (&["ip nexthop add id 7 dev v0", "ip route add default nhid 7"], "v0", ""),
        (
            &[
                "sysctl -q net.ipv4.nexthop_compat_mode=0",
                "ip nexthop add id 7 dev v0",
                "ip nexthop add id 8 group 7",
                "ip route add default nhid 8",
            ],
            "v0",
            "",
        ),
        (
            &[
                "ip link add br9 type bridge",
                "ip link set br9 up",
                "ip link set d0 master br9",
                "ip route add default dev br9",
            ],
            "d0",
            "of br9",
        ),
        (
            &[
                "ip link add link d0 name d0.5 type vlan id 5",
                "ip link set d0.5 up",
                "ip route add default dev d0.5",
            ],
            "d0",
            "of d0.5",
        ),
        (
            &[
                "ip link add x0 type vxlan id 5 dstport 4789 dev d0",
                "ip link set x0 up",
                "ip route add default dev x0",
            ],
            "d0",
            "of x0",
        ),
        (
            &[
                "ip link add link d0 name m0 type macvlan",
                "ip link set m0 up",
                "ip route add default dev m0",
            ],
            "d0",
            "of m0",
        ),
        (
            &[
                "ip link add bond9 type bond",
                "ip link set d0 down",
                "ip link set d0 master bond9",
                "ip link set bond9 up",
                "ip route add default dev bond9",
            ],
            "d0",
            "of bond9",
        ),
        (
            &[
                "ip link add red type vrf table 30",
                "ip link set red up",
                "ip link set d0 master red",
                "ip route add default dev d0 table 30",
            ],
            "d0",
            "",
        ),
        (
            &[
                "ip link add red type vrf table 30",
                "ip link set red up",
                "ip link set d0 master red",
                "ip route add default dev red",
            ],
            "d0",
            "of red",
        ),
    ];
    let mut tried = 0;
    for (commands, interface, over) in cases {
        let Some(_wire) = Wire::new(1, 1500) else { return };
        run("ip link add d0 type veth peer name d1");
        run("ip link set dev d1 up");
        run("ip link set dev d0 up");
        let failed = commands.iter().find_map(|command| {
            let mut words = command.split_whitespace();
            let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
            (!output.status.success())
                .then(|| format!("{command}: {}", String::from_utf8_lossy(&output.stderr).trim()))
        });
        if let Some(failed) = failed {
            skipped(&failed);
            continue;
        }
        let ended = pinfold(&["receive", interface, "--seconds", "100ms"]);
        assert!(
            ended.code == Some(1) && ended.err.lines().count() == 1,
            "{commands:?}: {ended:#?}"
        );
        let words = format!(
            "{interface} carries the default route{}{over}:",
            if over.is_empty() { "" } else { " " }
        );
        ended.failed(1, &[&words, "--force"]);
        tried += 1;
    }
    assert!(tried >= 8, "{tried} of {} cases", cases.len());
    // One that the route does not need, and one that the user insists on.
    let Some(_wire) = Wire::new(1, 1500) else { return };
    run("ip link add d0 type veth peer name d1");
    run("ip link set dev d1 up");
    run("ip link set dev d0 up");
    run("ip route add default dev d0");
    run("ip route add unreachable default metric 9999");
    // Private addresses, and a table that no rule selects.
    run("ip route add 192.168.0.0/16 dev v0");
    run("ip route add default dev v0 table 200");
    pinfold(&["receive", "v1", "--seconds", "100ms"]).ok();
    pinfold(&["receive", "d0", "--seconds", "100ms", "--force"]).ok();
}

#[test]
fn a_default_route_over_an_unbound_tunnel_is_refused() {
    let mut tried = 0;
    for (kind, command) in [
        ("vxlan", "ip link add x0 type vxlan id 5 dstport 4789"),
        ("geneve", "ip link add x0 type geneve id 5 remote 10.99.0.2"),
        ("gretap", "ip link add x0 type gretap remote 10.99.0.2"),
        ("ipip", "ip link add x0 type ipip remote 10.99.0.2"),
        ("sit", "ip link add x0 type sit remote 10.99.0.2"),
        ("wireguard", "ip link add x0 type wireguard"),
        ("tun", "ip tuntap add x0 mode tun"),
        ("dummy", "ip link add x0 type dummy"),
        ("bridge", "ip link add x0 type bridge"),
    ] {
        let Some(_wire) = Wire::new(1, 1500) else { return };
        let output = Command::new("sh").args(["-c", command]).output().unwrap();
        if !output.status.success() {
            skipped(&format!("{command}: {}", String::from_utf8_lossy(&output.stderr).trim()));
            continue;
        }
        run("ip link set dev x0 up");
        run("ip route add default dev x0");
        let ended = pinfold(&["receive", "v0", "--seconds", "100ms"]);
        if ["dummy", "bridge"].contains(&kind) {
            ended.ok();
        } else {
            let words = format!("it leads to x0, of the kind {kind}");
            ended.failed(
                1,
                &["whether v0 carries the default route is not known", &words, "--force"],
            );
            pinfold(&["receive", "v0", "--seconds", "100ms", "--force"]).ok();
        }
        tried += 1;
    }
    assert!(tried >= 1, "no kind of interface can be added");
}

#[test]
fn the_default_route_is_found_without_proc() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    run("ip route add default via 10.99.0.2 dev v0");
    let script = format!("umount -l /proc && exec '{}' receive v0", env!("CARGO_BIN_EXE_pinfold"));
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let ended = finish_with(command);
    if ended.err.contains("umount") {
        return skipped(&ended.err);
    }
    ended.failed(1, &["v0 carries the default route", "--force"]);
}

#[test]
fn packets_without_a_correct_reply_are_counted() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let child = receiving(&["--reflect", "--json"]);
    let before = arrived();
    // Three fragments.
    wire.sender().send(&[7; 4000]).unwrap();
    wait_until_received(&child, before + 3);
    let report = interrupted(child);
    assert_eq!(
        (&report["reflected"], &report["not_reflected"]),
        (&0.into(), &3.into()),
        "{report}"
    );
}
