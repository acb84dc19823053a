//! What cannot be opened, and what the errors say.

use crate::common::{Wire, run};
use pinfold_xdp::{ChunkSize, Copying, OpenError, Redirect, RingSizes, Socket, redirect};

#[test]
fn what_does_not_exist_is_named() {
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
    assert!(matches!(&error, OpenError::QueueBusy { interface, queue: 0 } if interface == "v1"), "{error}");
    assert!(matches!(&attached, OpenError::ProgramPresent { interface } if interface == "v1"), "{attached}");
    drop(sockets);
    // Both are free again, at once and as often as it is done.
    for _ in 0..20 {
        drop(wire.receive(Socket::options()));
    }
}

#[test]
fn packets_larger_than_a_chunk_are_refused_before_they_would_be_dropped() {
    let Some(wire) = Wire::new(1, 3000) else { return };
    let half = Socket::options().chunk(ChunkSize::HalfPage);
    let error = half.open(&wire.far()).unwrap_err();
    assert!(matches!(error, OpenError::Mtu { mtu: 3000, limit: 1774, chunk: 2048, .. }), "{error}");
    assert!(error.to_string().contains("use chunks of 4096 bytes"), "{error}");
    drop(Socket::options().open(&wire.far()).unwrap());
    run("ip link set dev v1 mtu 9000");
    let error = Socket::options().open(&wire.far()).unwrap_err();
    assert!(error.to_string().contains("ip link set dev v1 mtu 3822"), "{error}");
}

#[test]
fn an_interface_that_is_down_and_drivers_without_zero_copy_are_named() {
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
