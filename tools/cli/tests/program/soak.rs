//! A soak of reception: packets that are held for long, programs that are killed in the middle, and
//! starts again.

use crate::common::{Folder, Running, finish, skipped};
use crate::receive::{dropped, interrupted, receiving, wait_until_detached, wait_until_received};
use crate::receive_to::{check_slots, datagram};
use crate::wire::{Wire, arrived, number_of, receive_until};
use pinfold_xdp::{Packet, Socket};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// The variable with the duration in seconds; without it, the soak is skipped, since other tests of
/// the process would change its counts.
const SECONDS: &str = "PINFOLD_RECEIVE_SOAK_SECONDS";
/// The number of packets that a round sends.
const ROUND: u64 = 20_000;
/// The number of packets of each holder at a time: together fewer than the pages that are not in a
/// ring.
const HELD: usize = 1500;
const HOLDERS: usize = 3;

/// The resources of this process: its descriptors, the rings that are mapped, and its locked
/// memory.
#[derive(PartialEq, Eq, Debug)]
struct Resources {
    descriptors: usize,
    rings: usize,
    locked: String,
}

impl Resources {
    fn here() -> Self {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        Self {
            descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
            rings: maps.lines().filter(|line| line.contains("socket:")).count(),
            locked: status
                .lines()
                .find(|line| line.starts_with("VmLck"))
                .unwrap_or_default()
                .to_owned(),
        }
    }
}

#[test]
fn a_soak_of_reception_loses_no_packet_and_no_page() {
    let Some(seconds) = std::env::var(SECONDS).ok().and_then(|text| text.parse().ok()) else {
        return skipped(&format!(
            "runs alone: make soak-receive, or {SECONDS}=20 and this test's name"
        ));
    };
    let Some(wire) = Wire::new(2, 1500) else { return };
    let folder = Folder::new();
    let (began, limit) = (Instant::now(), Duration::from_secs(seconds));
    let before = Resources::here();
    let (mut rounds, mut totals) = (0, Totals::default());
    while began.elapsed() < limit {
        totals.add(&held(&wire));
        assert_eq!(Resources::here(), before, "after round {rounds} of held packets");
        totals.add(&stored(&wire, &folder));
        killed(&wire, &folder, rounds);
        // The queues are free at once, and the programs have left nothing here.
        assert_eq!(Resources::here(), before, "after round {rounds}");
        rounds += 1;
    }
    assert!(rounds > 0 && totals.received > 0, "{totals:?}");
    println!(
        "{rounds} rounds in {:.0} s, each ends with a kill: {totals:?}",
        began.elapsed().as_secs_f64()
    );
}

/// Packets of rounds that were not killed.
#[derive(Debug, Default)]
struct Totals {
    sent: u64,
    received: u64,
    dropped_at_sockets: u64,
    dropped_by_driver: u64,
}

impl Totals {
    fn check(self) -> Self {
        let Self { sent, received, dropped_at_sockets, dropped_by_driver } = self;
        assert_eq!(received + dropped_at_sockets + dropped_by_driver, sent, "{self:?}");
        self
    }

    fn add(&mut self, other: &Self) {
        self.sent += other.sent;
        self.received += other.received;
        self.dropped_at_sockets += other.dropped_at_sockets;
        self.dropped_by_driver += other.dropped_by_driver;
    }
}

/// Sends a round of numbered datagrams, up to 64 in a millisecond, unless it is stopped; counts
/// them.
fn send(wire: &Wire, sent: &AtomicU64, stop: &AtomicBool) {
    let sender = wire.sender();
    for number in 0..ROUND {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        sender.send(&datagram(number)).unwrap();
        sent.fetch_add(1, Ordering::Relaxed);
        if number % 64 == 63 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Receives a round in this process; other threads hold most packets for long, and check each
/// before they return its page.
fn held(wire: &Wire) -> Totals {
    let driver = wire.driver_drops();
    let mut sockets = wire.receive(Socket::options());
    let tags: Vec<_> = sockets.iter().map(|socket| socket.holder("holder").unwrap()).collect();
    let (sent, stop) = (&AtomicU64::new(0), &AtomicBool::new(false));
    let mut seen = vec![false; usize::try_from(ROUND).unwrap()];
    std::thread::scope(|scope| {
        let sending = scope.spawn(move || send(wire, sent, stop));
        let holders: Vec<_> = (0..HOLDERS)
            .map(|_| {
                let (sender, packets) = channel();
                (sender, scope.spawn(move || hold(&packets)))
            })
            .collect();
        receive_until(
            &mut sockets,
            || !sending.is_finished(),
            |socket, packet| {
                let number = number_of(&packet).expect("only numbered packets are sent");
                let at = usize::try_from(number).unwrap();
                assert!(!std::mem::replace(&mut seen[at], true), "packet {number} arrived twice");
                // One of four returns at once.
                match holders.get(at % (HOLDERS + 1)) {
                    Some((holder, _)) => {
                        packet.hold_for(tags[socket.queue() as usize]);
                        holder.send((number, packet)).unwrap();
                    }
                    None => socket.recycle(packet),
                }
                true
            },
        );
        for (sender, holder) in holders {
            drop(sender);
            holder.join().unwrap();
        }
    });
    let mut dropped_at_sockets = 0;
    for mut socket in sockets {
        socket.wait(Duration::ZERO).unwrap();
        let report = socket.stats().unwrap();
        assert_eq!((report.pool.in_use, report.unknown_entries), (report.in_kernel, 0), "{report}");
        dropped_at_sockets += report.kernel.dropped + report.kernel.receive_ring_full;
        assert!(socket.close().holders().is_empty(), "a page has not come back");
    }
    Totals {
        sent: sent.load(Ordering::Relaxed),
        received: seen.iter().filter(|seen| **seen).count() as u64,
        dropped_at_sockets,
        dropped_by_driver: wire.driver_drops() - driver,
    }
    .check()
}

/// Holds packets, the newest [`HELD`], and checks that each is what was sent before its page
/// returns.
fn hold(packets: &Receiver<(u64, Packet)>) {
    let mut held = VecDeque::new();
    let check = |(number, packet): (u64, Packet)| {
        let mut bytes = Vec::new();
        packet.append_to(&mut bytes);
        assert_eq!(bytes[42..], datagram(number), "packet {number} changed while it was held");
    };
    for packet in packets {
        held.push_back(packet);
        if held.len() > HELD {
            held.pop_front().into_iter().for_each(check);
        }
    }
    held.into_iter().for_each(check);
}

/// Starts a program that stores packets in a file.
fn storing(file: &str) -> Running {
    receiving(&["--to", file, "--force", "--json"])
}

/// Stores a round by a program that is interrupted afterwards.
fn stored(wire: &Wire, folder: &Folder) -> Totals {
    let file = folder.arg("packets");
    let (driver, before) = (wire.driver_drops(), arrived());
    let child = storing(&file);
    let sent = AtomicU64::new(0);
    send(wire, &sent, &AtomicBool::new(false));
    wait_until_received(&child, before + sent.load(Ordering::Relaxed));
    let report = interrupted(child);
    wait_until_detached();
    assert_eq!(report["stored"], check_slots(&std::fs::read(&file).unwrap()), "{report}");
    assert_eq!(report["stored"], report["packets"], "{report}");
    assert_eq!(report["pages"]["holders"].get("store"), None, "{report}");
    Totals {
        sent: sent.load(Ordering::Relaxed),
        received: report["packets"].as_u64().unwrap(),
        dropped_at_sockets: dropped(&report),
        dropped_by_driver: wire.driver_drops() - driver,
    }
    .check()
}

/// Kills a program in the middle of a round: its XDP program is detached, and what it stored is
/// whole.
fn killed(wire: &Wire, folder: &Folder, round: u64) {
    let file = folder.arg("packets");
    let child = storing(&file);
    let (sent, stop) = (&AtomicU64::new(0), &AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(move || send(wire, sent, stop));
        // At another moment each time, some of them before the first packet.
        std::thread::sleep(Duration::from_millis(round * 37 % 300));
        kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
        assert_eq!(finish(child).code, Some(137));
        stop.store(true, Ordering::Relaxed);
    });
    wait_until_detached();
    let stored = check_slots(&std::fs::read(&file).unwrap()) as u64;
    let sent = sent.load(Ordering::Relaxed);
    assert!(stored <= sent, "{stored} packets of {sent} stored");
}
