//! Sockets that cannot be opened, and the errors.

use crate::common::{Wire, run};
use pinfold_xdp::{
    Attached, ChunkSize, Copying, LinkType, OpenError, Redirect, RingSizes, Socket, redirect,
};

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
    // At the other end, which has more queues here than there are there, the driver runs it.
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
