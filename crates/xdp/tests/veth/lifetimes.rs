//! Lifetimes: of pages and sockets, of programs and processes, of sockets and interfaces.

use crate::common::{Wire, number_of, receive_until, run};
use pinfold::xdp::RingSizes;
use pinfold_xdp::{ChunkSize, Packet, Redirect, Socket, SocketError};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn pages_never_returned_are_named_after_the_socket_is_closed() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let mut sockets = wire.receive(Socket::options());
    let leak = sockets[0].holder("leak").unwrap();
    let sender = wire.sender();
    for number in 0..10u64 {
        sender.send(&[&number.to_be_bytes()[..], &[0; 14]].concat()).unwrap();
    }
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

/// By `receive` alone: a wait refills the ring as well.
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
    let end = Instant::now() + Duration::from_secs(60);
    while has_program() {
        assert!(Instant::now() < end, "the program stayed attached");
        std::thread::sleep(Duration::from_millis(10));
    }
    // The queue is free, too.
    drop(wire.receive(Socket::options()));
}

/// Returns whether a program is on the interface.
fn has_program() -> bool {
    let shown =
        Command::new("ip").args(["-details", "link", "show", "dev", "v1"]).output().unwrap();
    String::from_utf8_lossy(&shown.stdout).contains("prog/xdp")
}
