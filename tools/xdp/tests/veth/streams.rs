//! Streams of packets in both directions.

use crate::common::{
    Wire, arrived, ask, number_of, receive_until, reply_drops, returned, run, wait_until,
};
use pinfold_xdp::error::TransmitRefused;
use pinfold_xdp::socket::BusyPoll;
use pinfold_xdp::system::Generator;
use pinfold_xdp::{ChunkSize, LinkType, Options, Redirect, RingSizes, Socket, mirror, redirect};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Sends `count` numbered datagrams of `bytes` bytes.
fn send(sender: &std::net::UdpSocket, count: u64, bytes: usize) {
    let mut datagram = vec![0x5a; bytes];
    for number in 0..count {
        datagram[..8].copy_from_slice(&number.to_be_bytes());
        sender.send(&datagram).unwrap();
    }
}

/// Receives `sent` numbered datagrams of `bytes` bytes through one socket: each is whole, or counted
/// as dropped. Returns how many were received.
fn receive_whole(wire: &Wire, options: Options, sent: u64, bytes: usize) -> usize {
    let (before, earlier) = (wire.driver_drops(), arrived());
    let mut sockets = wire.receive(options);
    let sender = wire.sender();
    let sending = std::thread::spawn(move || send(&sender, sent, bytes));
    let (mut seen, end) = (BTreeSet::new(), Instant::now() + Duration::from_secs(60));
    // The thread of the kernel that empties the driver's queue may get no processor.
    let is_underway = || arrived() < earlier + sent && Instant::now() < end;
    receive_until(
        &mut sockets,
        || !sending.is_finished() || is_underway(),
        |socket, packet| {
            assert!(packet.len() >= 42, "a packet of {} bytes", packet.len());
            if let Some(number) = number_of(&packet) {
                assert_eq!(packet.len(), bytes + 42);
                let mut all = Vec::new();
                packet.append_to(&mut all);
                assert!(all[50..].iter().all(|byte| *byte == 0x5a), "{number}");
                assert!(seen.insert(number), "{number} arrived twice");
            }
            socket.recycle(packet);
            true
        },
    );
    sending.join().unwrap();
    let report = sockets[0].stats().unwrap();
    let drops = wire.driver_drops() - before;
    let dropped = report.kernel_drops() + drops;
    assert_eq!(seen.len() as u64 + dropped, sent, "{report}, drivers {drops}");
    assert_eq!(report.unknown_entries, 0);
    seen.len()
}

/// Repeats `attempt` until it has received more than `least` packets: no more than the rings hold,
/// where this thread gets no processor while they are sent.
fn receive_more_than(least: usize, attempt: impl Fn() -> usize) {
    let seen: Vec<usize> = (0..20).map(|_| attempt()).take_while(|&seen| seen <= least).collect();
    assert!(seen.len() < 20, "{seen:?} received");
}

#[test]
fn every_packet_of_a_stream_is_received_or_counted() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    for (chunk, bytes) in
        [(ChunkSize::Page, 22), (ChunkSize::HalfPage, 22), (ChunkSize::HalfPage, 1472)]
    {
        let options = Socket::options().chunk(chunk);
        receive_more_than(1000, || receive_whole(&wire, options, 50_000, bytes));
    }
}

/// With the smallest rings over as many chunks as the fill ring has entries, the rings are empty and
/// full all the time: every packet is whole or counted as dropped, and none is of length zero.
#[test]
fn packets_through_the_smallest_rings_are_whole() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    for (chunk, shift, bytes) in
        [(ChunkSize::Page, 12, 22), (ChunkSize::Page, 12, 1472), (ChunkSize::HalfPage, 11, 700)]
    {
        let rings = RingSizes { fill: 64, completion: 64, receive: 64, transmit: 64 };
        let options = Socket::options().chunk(chunk).rings(rings).memory(64 << shift);
        // More than the rings hold, so that each entry was used again.
        receive_more_than(64, || receive_whole(&wire, options, 20_000, bytes));
    }
}

/// A size that the kernel would refuse, or round, is refused with the limits.
#[test]
fn rings_of_other_sizes_are_refused_by_name() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    for size in [0, 1, 2, 32, 63, 65, 511, 1022, 1 << 17] {
        let rings = RingSizes { fill: 64, completion: 64, receive: size, transmit: 64 };
        let refused = Socket::options().rings(rings).open(&wire.far()).unwrap_err().to_string();
        assert!(refused.contains(&size.to_string()) && refused.contains("64"), "{refused}");
    }
}

#[test]
fn packets_beyond_those_that_the_program_holds_are_counted() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let rings = RingSizes { fill: 64, completion: 64, receive: 64, transmit: 64 };
    // 128 chunks: the program can hold that many, and then the kernel has none.
    let mut sockets = wire.receive(Socket::options().rings(rings).memory(128 << 12));
    let before = wire.driver_drops();
    let archive = sockets[0].holder("archive").unwrap();
    let sender = wire.sender();
    // Until all chunks are held, and a hundred that find none. Slowly, so that the driver drops
    // nothing.
    let all_held = Arc::new(AtomicBool::new(false));
    let is_all_held = Arc::clone(&all_held);
    let earlier = arrived();
    let sending = std::thread::spawn(move || {
        let (mut sent, mut left, end) = (0u64, 100, Instant::now() + Duration::from_secs(60));
        while left > 0 {
            assert!(Instant::now() < end, "not all chunks are held after {sent} packets");
            left -= u64::from(is_all_held.load(Ordering::Acquire));
            sender.send(&[&sent.to_be_bytes()[..], &[0; 14]].concat()).unwrap();
            sent += 1;
            std::thread::sleep(Duration::from_micros(200));
        }
        wait_until("they arrive", || arrived() >= earlier + sent);
        sent
    });
    let mut held = Vec::new();
    receive_until(
        &mut sockets,
        || !sending.is_finished(),
        |_, packet| {
            packet.hold_for(archive);
            held.push(packet);
            all_held.store(held.len() == 128, Ordering::Release);
            true
        },
    );
    let sent = sending.join().unwrap();
    let report = sockets[0].stats().unwrap();
    assert_eq!(held.len(), 128, "{report}");
    let numbered = held.iter().filter_map(number_of).count() as u64;
    let others = held.len() as u64 - numbered;
    let dropped = report.kernel_drops() + wire.driver_drops() - before;
    assert!(numbered + dropped >= sent && numbered + dropped <= sent + others + 8, "{report}");
    assert!(report.kernel.fill_ring_empty > 0, "{report}");
    let named =
        report.holders.iter().find(|holder| holder.name.as_deref() == Some("archive")).unwrap();
    assert_eq!(named.pages, 128);
    // Returned on another thread: the socket receives again.
    let (to_other, at_other) = mpsc::channel();
    let other =
        std::thread::spawn(move || at_other.into_iter().for_each(|packets: Vec<_>| drop(packets)));
    to_other.send(held).unwrap();
    drop(to_other);
    other.join().unwrap();
    let again = wire.sender();
    let mut count = 0;
    // The kernel gets chunks before the packets arrive.
    assert!(!sockets[0].wait(Duration::from_millis(1)).unwrap());
    let earlier = arrived();
    let sending = std::thread::spawn(move || {
        send(&again, 50, 22);
        wait_until("they arrive", || arrived() >= earlier + 50);
    });
    receive_until(
        &mut sockets,
        || !sending.is_finished(),
        |socket, packet| {
            count += usize::from(number_of(&packet).is_some());
            socket.recycle(packet);
            true
        },
    );
    sending.join().unwrap();
    assert_eq!(count, 50, "{}", sockets[0].stats().unwrap());
}

#[test]
fn queues_are_received_by_threads_of_their_own() {
    let Some(wire) = Wire::new(2, 1500) else { return };
    let sockets = wire.receive(Socket::options());
    let (before, earlier) = (wire.driver_drops(), arrived());
    let (count, sent) = (16u64, 2_000u64);
    // Each source port is one flow, which the kernel assigns to a queue.
    let senders: Vec<_> = (0..count).map(|_| wire.sender()).collect();
    let sending = Arc::new(AtomicBool::new(true));
    let is_sending = Arc::clone(&sending);
    let sender = std::thread::spawn(move || {
        for sender in &senders {
            send(sender, sent, 22);
        }
        let end = Instant::now() + Duration::from_secs(60);
        while arrived() < earlier + count * sent && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        is_sending.store(false, Ordering::Release);
        wire.driver_drops() - before
    });
    let receivers: Vec<_> = sockets
        .into_iter()
        .map(|socket| {
            let sending = Arc::clone(&sending);
            std::thread::spawn(move || {
                let (mut sockets, mut count) = ([socket], 0u64);
                receive_until(
                    &mut sockets,
                    || sending.load(Ordering::Acquire),
                    |socket, packet| {
                        count += u64::from(number_of(&packet).is_some());
                        socket.recycle(packet);
                        true
                    },
                );
                (count, sockets[0].stats().unwrap())
            })
        })
        .collect();
    let driver = sender.join().unwrap();
    let reports: Vec<_> = receivers.into_iter().map(|receiver| receiver.join().unwrap()).collect();
    let received: u64 = reports.iter().map(|(count, _)| count).sum();
    let dropped: u64 = reports.iter().map(|(_, report)| report.kernel_drops()).sum();
    assert_eq!(received + dropped + driver, count * sent, "{reports:?}");
}

#[test]
fn a_socket_that_polls_the_driver_receives_kernel_packets() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let mut sockets = wire.receive(Socket::options().busy_poll(BusyPoll::default()));
    let socket = &mut sockets[0];
    let began = Instant::now();
    let limit = Duration::from_millis(20);
    assert!(!socket.wait(limit).unwrap(), "nothing was sent");
    assert!(began.elapsed() >= limit);
    let generator = Generator::through(&wire.near()).unwrap();
    let packet = [&[0xff; 12][..], &[0x88, 0xb5], &[0x5a; 46]].concat();
    assert!(generator.send(&packet[..13], 1).is_err(), "shorter than a header");
    let (mut packets, mut received) = (Vec::new(), 0);
    for _ in 0..100 {
        // Sends as many as the driver has room for.
        if let Err(error) = generator.send(&packet, 64) {
            assert_eq!(error.errno.raw(), 22, "{error}");
            eprintln!("SKIPPED: needs Linux 5.18, for packets made by the kernel");
            return;
        }
        let end = Instant::now() + Duration::from_secs(60);
        received += 64;
        while socket.traffic().received < received && Instant::now() < end {
            socket.receive(&mut packets, 64);
            for received in packets.drain(..) {
                let mut bytes = Vec::new();
                received.append_to(&mut bytes);
                assert_eq!(bytes, packet);
                socket.recycle(received);
            }
            socket.wait(Duration::ZERO).unwrap();
        }
    }
    let report = socket.stats().unwrap();
    assert_eq!(
        (report.traffic.received, report.kernel_drops(), report.unknown_entries),
        (6400, 0, 0),
        "{report}"
    );
}

#[test]
fn a_mirror_answers_datagrams() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let mut sockets = wire.receive(Socket::options());
    let sender = wire.sender();
    let asking = std::thread::spawn(move || {
        let question = |number: u64| [&number.to_be_bytes()[..], b" are you there?"].concat();
        ask(&sender, (0..1000).map(question));
    });
    let mut reflected = 0;
    receive_until(
        &mut sockets,
        || !asking.is_finished(),
        |socket, mut packet| {
            if number_of(&packet).is_none() || !mirror::reflect(&mut packet, LinkType::Ethernet) {
                socket.recycle(packet);
                return true;
            }
            socket.transmit(packet).unwrap();
            socket.flush().unwrap();
            reflected += 1;
            true
        },
    );
    asking.join().unwrap();
    // Those whose answer was dropped came again.
    assert_eq!(reflected, 1000 + reply_drops());
    let socket = &mut sockets[0];
    let end = Instant::now() + Duration::from_secs(60);
    while socket.collect() > 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    let report = socket.stats().unwrap();
    assert_eq!((report.traffic.sent, report.kernel.transmit_invalid), (reflected, 0), "{report}");
    // The kernel has what the fill ring holds, and nothing else is in use.
    assert_eq!(report.pool.in_use, report.in_kernel, "{report}");
}

#[test]
fn packets_not_taken_by_the_kernel_are_freed_with_the_socket() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let frame = [&[2, 0, 0, 0, 0, 0x11, 2, 0, 0, 0, 0, 0x12, 0x88, 0xb5][..], &[7; 50]].concat();
    let mut far = Socket::options().open(&wire.far()).unwrap();
    for _ in 0..64 {
        let packet = far.packet(&frame).unwrap();
        far.transmit(packet).unwrap();
    }
    run("ip link set dev v1 down");
    assert!(far.flush().is_err());
    assert_eq!((far.drain(), far.traffic().sent), (64, 0));
    let closed = far.close();
    assert!(closed.holders().is_empty(), "{:?}", closed.holders());
}

#[test]
fn a_queue_that_does_not_transmit_refuses_packets() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    run("ip link del v0");
    run(
        "ip link add v0 numtxqueues 4 numrxqueues 1 type veth peer name v1 numtxqueues 1 numrxqueues 4",
    );
    run("ip link set dev v0 up");
    run("ip link set dev v1 up");
    let interface = redirect::interface("v1").unwrap();
    assert_eq!((interface.queues(), interface.transmit_queues()), (Some(4), Some(1)));
    let frame = [&[2, 0, 0, 0, 0, 0x11, 2, 0, 0, 0, 0, 0x12, 0x88, 0xb5][..], &[7; 50]].concat();
    for queue in 0..4 {
        let mut socket = Socket::options().queue(queue).open(&interface).unwrap();
        let packet = socket.packet(&frame).unwrap();
        let sent = socket.transmit(packet);
        assert_eq!(interface.can_transmit(queue), queue == 0);
        match sent {
            Ok(()) => assert_eq!((queue, socket.drain()), (0, 0)),
            Err(refused) => {
                assert_eq!(refused.why, TransmitRefused::NoQueue { queue, queues: 1 });
                socket.recycle(refused.packet);
            }
        }
        assert!(socket.close().holders().is_empty());
    }
}

#[test]
fn packets_that_cannot_be_sent_come_back() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let rings = RingSizes { fill: 64, completion: 64, receive: 64, transmit: 64 };
    let mut far = Socket::options().rings(rings).open(&wire.far()).unwrap();
    let mut near = Socket::options().rings(rings).open(&wire.near()).unwrap();
    let frame = [&[2, 0, 0, 0, 0, 0x11, 2, 0, 0, 0, 0, 0x12, 0x88, 0xb5][..], &[7; 50]].concat();
    let foreign = near.packet(&frame).unwrap();
    let refused = far.transmit(foreign).unwrap_err();
    assert_eq!(refused.why, TransmitRefused::Foreign);
    assert_eq!(refused.packet.len(), 64);
    let short = far.packet(&frame[..13]).unwrap();
    let why = far.transmit(short).unwrap_err().why;
    assert_eq!(why, TransmitRefused::Length { least: 14, limit: 1518 });
    assert!(far.packet(&[0; 4097]).is_err());
    // Unless it is flushed, the ring fills up.
    for _ in 0..64 {
        let packet = far.packet(&frame).unwrap();
        far.transmit(packet).unwrap();
    }
    let packet = far.packet(&frame).unwrap();
    assert_eq!(far.transmit(packet).unwrap_err().why, TransmitRefused::Full);
    // Queued packets arrive at the other end, once a program passes it there.
    let redirect = Redirect::attach(&wire.near()).unwrap();
    near.redirect(&redirect).unwrap();
    far.flush().unwrap();
    wait_until("they arrive", || returned() >= 64);
    let (mut count, mut sockets) = (0, [near]);
    receive_until(
        &mut sockets,
        || false,
        |socket, packet| {
            let mut bytes = Vec::new();
            packet.append_to(&mut bytes);
            count += usize::from(bytes == frame);
            socket.recycle(packet);
            true
        },
    );
    assert_eq!(count, 64);
}
