//! Sockets that cannot be opened, and lifetimes: of pages and sockets, of programs and processes, of
//! sockets and interfaces.

use crate::common::{Wire, arrived, number_of, receive_until, run, wait_until};
use pinfold_xdp::{
    Attached, ChunkSize, Copying, LinkType, OpenError, Packet, Redirect, RingSizes, Socket,
    SocketError, redirect,
};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn pages_never_returned_are_named_after_the_socket_is_closed() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let mut sockets = wire.receive(Socket::options());
    let leak = sockets[0].holder("leak").unwrap();
    let (sender, before) = (wire.sender(), arrived());
    for number in 0..10u64 {
        sender.send(&[&number.to_be_bytes()[..], &[0; 14]].concat()).unwrap();
    }
    wait_until("they arrive", || arrived() >= before + 10);
    let mut held = Vec::new();
    receive_until(
        &mut sockets,
        || false,
        |socket, packet| {
            if number_of(&packet).is_some() {
                packet.hold_for(leak);
                held.push(packet);
            } else {
                socket.recycle(packet);
            }
            true
        },
    );
    assert_eq!(held.len(), 10);
    let closed = sockets.remove(0).close();
    let holders = closed.holders();
    assert_eq!(
        (holders.len(), holders[0].name.as_deref(), holders[0].pages),
        (1, Some("leak"), 10)
    );
    // They are still what was received, and other packets do not change them.
    for (number, packet) in held.iter().enumerate() {
        assert_eq!(number_of(packet), Some(number as u64));
    }
    held.truncate(3);
    assert_eq!(closed.holders()[0].pages, 3);
    drop(held);
    assert!(closed.holders().is_empty());
}

/// With `receive` alone: a wait refills the ring as well.
#[test]
fn reception_goes_on_when_pages_come_back_from_another_thread() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let rings = RingSizes { fill: 64, completion: 64, receive: 64, transmit: 64 };
    for (chunk, memory) in [(ChunkSize::Page, 64 << 12), (ChunkSize::HalfPage, 64 << 11)] {
        let mut sockets = wire.receive(Socket::options().rings(rings).chunk(chunk).memory(memory));
        let (socket, sender) = (&mut sockets[0], wire.sender());
        let report = socket.stats().unwrap();
        assert_eq!(report.in_kernel, 64, "the fill ring is full");
        let (mut held, mut number) = (Vec::new(), 0u64);
        let mut receive = |socket: &mut Socket, packets: &mut Vec<Packet>, all: usize| {
            let end = Instant::now() + Duration::from_secs(60);
            while packets.len() < all {
                assert!(
                    Instant::now() < end,
                    "{} of {all}: {}",
                    packets.len(),
                    socket.stats().unwrap()
                );
                sender.send(&[&number.to_be_bytes()[..], &[0; 14]].concat()).unwrap();
                number += 1;
                std::thread::sleep(Duration::from_micros(200));
                socket.receive(packets, 64);
            }
        };
        receive(socket, &mut held, 64);
        let before = socket.stats().unwrap().counts.empty;
        for _ in 0..100 {
            assert_eq!(socket.receive(&mut held, 64), 0, "all chunks are held");
        }
        let asked = socket.stats().unwrap().counts.empty - before;
        assert!(
            (1..=100).contains(&asked),
            "{chunk:?}: the source was asked {asked} times by 100 calls"
        );
        std::thread::spawn(move || drop(held)).join().unwrap();
        let mut packets = Vec::new();
        receive(socket, &mut packets, 50);
        socket.recycle_all(&mut packets);
        assert!(packets.is_empty());
        // Chunks that the kernel does not have are free again.
        socket.receive(&mut packets, 64);
        socket.recycle_all(&mut packets);
        let report = socket.stats().unwrap();
        if chunk == ChunkSize::Page {
            assert_eq!(report.pool.in_use, report.in_kernel);
            assert_eq!(report.holders[0].name.as_deref(), Some("socket"));
        }
        assert!(sockets.remove(0).close().holders().is_empty());
    }
}

#[test]
fn a_removed_interface_ends_the_wait() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let mut sockets = wire.receive(Socket::options());
    let socket = &mut sockets[0];
    run("ip link set dev v1 down");
    assert!(!socket.wait(Duration::from_millis(20)).unwrap(), "down, and still there");
    run("ip link set dev v1 up");
    run("ip link del dev v1");
    let end = Instant::now() + Duration::from_secs(60);
    let mut packets = Vec::new();
    let error = loop {
        // Packets received before are still there.
        socket.receive(&mut packets, 64);
        packets.clear();
        match socket.wait(Duration::from_millis(20)) {
            Err(error) => break error,
            Ok(_) => assert!(Instant::now() < end, "the wait did not end"),
        }
    };
    assert!(matches!(error, SocketError::Gone { queue: 0, .. }), "{error}");
    drop(sockets);
}

/// The variable that makes a process the child of the next test: it attaches, prints a line, and
/// waits for its end.
const CHILD: &str = "PINFOLD_XDP_TEST_CHILD";

#[test]
fn nothing_stays_attached_when_a_process_is_killed() {
    if std::env::var_os(CHILD).is_some() {
        let interface = pinfold_xdp::redirect::interface("v1").unwrap();
        let mut socket = Socket::options().open(&interface).unwrap();
        socket.redirect(&Redirect::attach(&interface).unwrap()).unwrap();
        println!("attached");
        std::thread::sleep(Duration::from_secs(60));
        return;
    }
    let Some(wire) = Wire::new(1, 1500) else { return };
    let name = "lifetimes::nothing_stays_attached_when_a_process_is_killed";
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    assert!(lines.any(|line| line.unwrap().contains("attached")), "the child did not attach");
    assert!(has_program(), "the child's program is not there");
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the program is detached", || !has_program());
    // The queue is free, too.
    drop(wire.receive(Socket::options()));
}

/// Returns whether a program is on the interface.
fn has_program() -> bool {
    let shown =
        Command::new("ip").args(["-details", "link", "show", "dev", "v1"]).output().unwrap();
    String::from_utf8_lossy(&shown.stdout).contains("prog/xdp")
}

#[test]
fn missing_interfaces_and_queues_are_named() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let error = redirect::interface("v9").unwrap_err();
    assert!(matches!(&error, OpenError::NoInterface { name } if name == "v9"), "{error}");
    let error = Socket::options().queue(3).open(&wire.far()).unwrap_err();
    assert!(matches!(error, OpenError::NoQueue { queue: 3, queues: Some(1), .. }), "{error}");
    assert!(error.to_string().contains("it has one, queue 0"), "{error}");
}

#[test]
fn a_queue_in_use_is_named() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let sockets = wire.receive(Socket::options());
    // Both errors come after a wait for the release, at the same time.
    let far = wire.far();
    let (error, attached) = std::thread::scope(|scope| {
        let opened = scope.spawn(|| Socket::options().open(&far));
        let attached = Redirect::attach(&far).unwrap_err();
        (opened.join().unwrap().unwrap_err(), attached)
    });
    assert!(
        matches!(&error, OpenError::QueueBusy { interface, queue: 0 } if interface == "v1"),
        "{error}"
    );
    assert!(
        matches!(&attached, OpenError::ProgramPresent { interface } if interface == "v1"),
        "{attached}"
    );
    drop(sockets);
    // Both are free again, at once and as often as it is done.
    for _ in 0..20 {
        drop(wire.receive(Socket::options()));
    }
}

#[test]
fn packets_larger_than_a_chunk_are_refused_not_dropped() {
    let Some(wire) = Wire::new(1, 3000) else { return };
    let half = Socket::options().chunk(ChunkSize::HalfPage);
    let error = half.open(&wire.far()).unwrap_err();
    assert!(matches!(error, OpenError::Mtu { mtu: 3000, limit: 1774, chunk: 2048, .. }), "{error}");
    assert!(error.to_string().contains("use chunks of 4096 bytes"), "{error}");
    drop(Socket::options().open(&wire.far()).unwrap());
    run("ip link set dev v1 mtu 9000");
    let error = Socket::options().open(&wire.far()).unwrap_err();
    assert!(error.to_string().contains("ip link set dev v1 mtu 3822"), "{error}");
    // Every program of the machine depends on that of the loopback interface.
    run("ip link set dev lo mtu 65536");
    let error = Socket::options().open(&redirect::interface("lo").unwrap()).unwrap_err();
    assert!(matches!(error, OpenError::Mtu { mtu: 65536, is_loopback: true, .. }), "{error}");
    assert!(!error.to_string().contains("ip link set"), "{error}");
}

/// The driver's reasons: packets of the other end that are too large, and more queues there than
/// here.
#[test]
fn any_refusal_of_the_driver_leads_to_the_generic_mode() {
    let Some(wire) = Wire::new(1, 3520) else { return };
    let check = |errno, reason: &str| {
        let far = wire.far();
        let native = Redirect::attach_as(&far, Attached::Native).unwrap_err();
        assert!(
            matches!(&native, OpenError::Refused { attached: Attached::Native, .. }),
            "{native}"
        );
        let text = native.to_string();
        assert!(
            ["v1", "native XDP", errno, reason].iter().all(|part| text.contains(part)),
            "{text}"
        );
        let redirect = Redirect::attach(&far).unwrap();
        assert_eq!(redirect.attached(), Attached::Generic);
        drop(redirect);
        let redirect = Redirect::attach_as(&far, Attached::Generic).unwrap();
        assert_eq!(redirect.attached(), Attached::Generic);
    };
    check("os error 34", "MTU is too large");
    run("ip link del v0");
    run(
        "ip link add v0 numtxqueues 2 numrxqueues 2 type veth peer name v1 numtxqueues 1 numrxqueues 1",
    );
    run("ip link set dev v0 up");
    run("ip link set dev v1 up");
    check("os error 28", "queues");
    // At the end that has more queues, the driver runs it.
    assert_eq!(Redirect::attach(&wire.near()).unwrap().attached(), Attached::Native);
}

#[test]
fn links_without_a_header_that_is_known_are_named() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    let made = std::process::Command::new("ip")
        .args("link add gre9 type gre local 10.99.0.1 remote 10.99.0.2".split(' '))
        .output()
        .unwrap();
    if !made.status.success() {
        return eprintln!("SKIPPED: no GRE tunnel: {}", String::from_utf8_lossy(&made.stderr));
    }
    run("ip link set dev gre9 up");
    let error = Socket::options().open(&redirect::interface("gre9").unwrap()).unwrap_err();
    assert!(matches!(error, OpenError::LinkType { link: LinkType::Other(778), .. }), "{error}");
    assert!(error.to_string().contains("gre9 is a link of type GRE tunnel"), "{error}");
}

#[test]
fn an_interface_that_is_down_or_without_zero_copy_is_named() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let error = Socket::options().copying(Copying::Never).open(&wire.far()).unwrap_err();
    assert!(matches!(error, OpenError::NoZeroCopy { queue: 0, .. }), "{error}");
    run("ip link set dev v1 down");
    let error = Socket::options().open(&wire.far()).unwrap_err();
    assert!(matches!(error, OpenError::Down { .. }), "{error}");
}

#[test]
fn sizes_that_do_not_fit_are_named() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let rings = RingSizes { fill: 2048, completion: 2048, receive: 2048, transmit: 2048 };
    for (rings, memory) in [
        (rings, 1 << 20),
        (RingSizes { fill: 100, ..rings }, 32 << 20),
        (RingSizes { receive: 0, ..rings }, 32 << 20),
        (RingSizes { transmit: 1 << 20, ..rings }, 32 << 20),
    ] {
        let error = Socket::options().rings(rings).memory(memory).open(&wire.far()).unwrap_err();
        assert!(matches!(error, OpenError::Sizes { .. }), "{error}");
    }
}
