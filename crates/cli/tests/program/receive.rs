//! `receive` on a pair of virtual interfaces, in a network namespace of the test.

use crate::common::{Ended, Folder, finish, finish_with, pinfold, skipped, start};
use crate::wire::{Wire, number_of_bytes};
use rustix::process::{Pid, Signal, kill_process};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Starts the program on the far end, and waits until it has attached its own.
fn receiving(args: &[&str]) -> Child {
    let child = start(&[&["receive", "v1"][..], args].concat());
    wait_for_program(true);
    child
}

fn wait_for_program(wanted: bool) {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let shown = Command::new("ip").args(["-details", "link", "show", "dev", "v1"]).output().unwrap();
        if String::from_utf8_lossy(&shown.stdout).contains("prog/xdp") == wanted {
            return;
        }
        assert!(Instant::now() < end, "a program on the interface: not {wanted}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn packets_are_counted_and_written_to_a_file() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let folder = Folder::new();
    let file = folder.arg("packets.pcap");
    let child = receiving(&["--count", "200", "--pcap", &file, "--json"]);
    let sender = wire.sender();
    for number in 0..250u64 {
        sender.send(&[&number.to_be_bytes()[..], &[9; 92]].concat()).unwrap();
        std::thread::sleep(Duration::from_micros(100));
    }
    let report = finish(child).json();
    assert_eq!((&report["packets"], &report["captured"]), (&200.into(), &200.into()), "{report}");
    assert_eq!(
        (&report["protocols"]["udp"], &report["sizes"][0][0]),
        (&200.into(), &"256".into()),
        "{report}"
    );
    assert_eq!(report["bytes"], 200 * 142, "{report}");
    // As another library reads the file.
    let mut reader = pcap_file::pcap::PcapReader::new(std::fs::File::open(&file).unwrap()).unwrap();
    assert_eq!(reader.header().datalink, pcap_file::DataLink::ETHERNET);
    for number in 0..200u64 {
        let packet = reader.next_packet().unwrap().unwrap();
        assert_eq!((number_of_bytes(&packet.data), packet.orig_len), (Some(number), 142));
        assert!(packet.timestamp.as_secs() > 1_600_000_000);
    }
    assert!(reader.next_packet().is_none());
    // And as tcpdump does.
    match Command::new("tcpdump").args(["-nr", &file]).output() {
        Ok(output) => {
            let lines = String::from_utf8_lossy(&output.stdout).lines().count();
            assert_eq!((output.status.success(), lines), (true, 200));
        }
        Err(_) => skipped("tcpdump is not installed"),
    }
    // It is not replaced.
    pinfold(&["receive", "v1", "--pcap", &file]).failed(1, &["packets.pcap", "--force"]);
}

#[test]
fn a_mirror_answers_until_it_is_interrupted() {
    let Some(wire) = Wire::new(2, 1500) else { return };
    let child = receiving(&["--reflect"]);
    let sender = wire.sender();
    sender.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    for number in 0..100u64 {
        sender.send(&number.to_be_bytes()).unwrap();
        let mut answer = [0; 16];
        assert_eq!(sender.recv(&mut answer).unwrap(), 8);
        assert_eq!(answer[..8], number.to_be_bytes());
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let ended = finish(child);
    assert_eq!(ended.code, Some(130), "{ended:#?}");
    for part in ["receive v1: 2 queues", "100 packets", "udp 100", "reflected     100, not 0", "socket"] {
        assert!(ended.out.contains(part), "{part:?} is not in {ended:#?}");
    }
    wait_for_program(false);
}

#[test]
fn what_cannot_be_received_is_named() {
    pinfold(&["receive", "no-such-link"]).failed(1, &["no interface no-such-link", "ip link"]);
    pinfold(&["receive", "lo", "--pcap", "f", "--reflect"]).failed(2, &["--reflect"]);
    let Some(_wire) = Wire::new(1, 1500) else { return };
    pinfold(&["receive", "v1", "--queue", "7"]).failed(1, &["v1 has no queue 7", "queue 0"]);
    pinfold(&["receive", "v1", "--memory", "1M"]).failed(1, &["2048", "256", "chunks"]);
    crate::wire::run("ip route add default via 10.99.0.2 dev v0");
    pinfold(&["receive", "v0"]).failed(1, &["default route", "--force"]);
    let child = receiving(&[]);
    pinfold(&["receive", "v1"]).failed(1, &["queue 0 of v1 is in use"]);
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    assert_eq!(finish(child).code, Some(137));
    wait_for_program(false);
    let report = pinfold(&["receive", "v1", "--seconds", "200ms", "--small-chunks", "--json"]).json();
    assert_eq!((&report["packets"], &report["zero_copy"]), (&0.into(), &false.into()), "{report}");
}

/// Runs the program by another one, which takes something away from it.
fn limited(by: &[&str]) -> Ended {
    let mut command = Command::new(by[0]);
    command.args(&by[1..]).arg(env!("CARGO_BIN_EXE_pinfold")).args(["receive", "v1", "--seconds", "100ms"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish_with(command)
}

#[test]
fn what_is_not_permitted_is_named_with_the_command_that_permits_it() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    if Command::new("setpriv").arg("--version").output().is_err() {
        return skipped("setpriv is not installed");
    }
    let without = limited(&["setpriv", "--bounding-set=-all", "--inh-caps=-all"]);
    without.failed(
        1,
        &["socket (AF_XDP): not permitted", "cap_net_raw", "sudo setcap", "cap_bpf,cap_ipc_lock+ep"],
    );
    let without = limited(&["setpriv", "--bounding-set=-bpf,-sys_admin", "--inh-caps=-bpf,-sys_admin"]);
    without.failed(1, &["not permitted; AF_XDP needs cap_bpf"]);
    // The memory of the arena is locked where that is allowed, and registered in any case.
    let lock = ["--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"];
    let without = limited(&[&["prlimit", "--memlock=1048576:1048576", "setpriv"][..], &lock].concat());
    without.failed(1, &["33554432 bytes for packets cannot be locked", "RLIMIT_MEMLOCK", "CAP_IPC_LOCK"]);
    wait_for_program(false);
}
