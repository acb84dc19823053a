//! Sending: what a mirror returns reaches the kernel's own sockets, and pages come back from the
//! completion ring.

use crate::common::{Wire, number_of, receive_until, run};
use pinfold_xdp::error::TransmitRefused;
use pinfold_xdp::{LinkType, Redirect, RingSizes, Socket, mirror, redirect};
use std::time::{Duration, Instant};

#[test]
fn a_mirror_answers_datagrams() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let mut sockets = wire.receive(Socket::options());
    let sender = wire.sender();
    sender.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let asking = std::thread::spawn(move || {
        for number in 0..1000u64 {
            let question = [&number.to_be_bytes()[..], b" are you there?"].concat();
            sender.send(&question).unwrap();
            let mut answer = [0; 64];
            let len = sender.recv(&mut answer).unwrap();
            assert_eq!(&answer[..len], question);
        }
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
    assert_eq!(reflected, 1000);
    let socket = &mut sockets[0];
    let end = Instant::now() + Duration::from_secs(60);
    while socket.collect() > 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    let report = socket.stats().unwrap();
    assert_eq!((report.traffic.sent, report.kernel.transmit_invalid), (1000, 0), "{report}");
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
