//! `pinfold receive --to`: packets to a target.

use crate::common::{Folder, finish, pinfold};
use crate::receive::{
    dropped, interrupted, receive, receiving, receiving_by, wait_until_detached,
    wait_until_received,
};
use crate::wire::{Wire, arrived, number_of_bytes};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Returns the bytes of datagram `number`: of every length up to 1,400, and different from those of
/// any other.
pub(crate) fn datagram(number: u64) -> Vec<u8> {
    let len = 8 + number * 131 % 1392;
    let rest = (0..len - 8).map(|at| (number * 7 + at * 13 + (at >> 8)).to_le_bytes()[0]);
    number.to_be_bytes().into_iter().chain(rest).collect()
}

/// Checks every byte of the slots of the last run: of each number at most one packet, which is what
/// was sent. Returns how many there are.
pub(crate) fn check_slots(stored: &[u8]) -> usize {
    let word =
        |slot: &[u8], at: usize| u32::from_le_bytes(slot[at..at + 4].try_into().unwrap()) as usize;
    let long = |slot: &[u8], at: usize| u64::from_le_bytes(slot[at..at + 8].try_into().unwrap());
    let run = stored.get(32..40);
    let slots = stored.chunks(4096).enumerate();
    let slots = slots.filter(|(_, slot)| slot.starts_with(b"PINFOLD1") && slot.get(32..40) == run);
    let mut numbers = Vec::new();
    for (at, slot) in slots {
        let (offset, len) = (word(slot, 24), word(slot, 28));
        assert_eq!(long(slot, 8), at as u64);
        assert!(long(slot, 16) > 1_600_000_000_000_000_000);
        let packet = &slot[offset..offset + len];
        let number = number_of_bytes(packet).unwrap();
        // Ethernet, IPv4, UDP; shorter ones would be padded.
        assert_eq!(packet[42..], datagram(number), "datagram {number} in slot {at}");
        assert!(slot[40..offset].iter().all(|&byte| byte == 0), "in front of datagram {number}");
        let block = (offset + len).next_multiple_of(512);
        assert!(
            slot[offset + len..block].iter().all(|&byte| byte == 0),
            "behind datagram {number}"
        );
        numbers.push(number);
    }
    let count = numbers.len();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), count, "a packet was stored twice");
    count
}

/// Sends numbered datagrams to `receive --to` and returns its report: received, and dropped by
/// cause, is what was sent.
fn store(wire: &Wire, to: &str, more: &[&str]) -> serde_json::Value {
    const SENT: u64 = 4000;
    let (before, before_all) = (wire.driver_drops(), arrived());
    let child = receiving(&[&["--to", to, "--json"], more].concat());
    let (sender, end) = (wire.sender(), Instant::now() + Duration::from_secs(60));
    for number in 0..SENT {
        sender.send(&datagram(number)).unwrap();
        // The driver's queue is short, and another thread of the kernel may have to empty it.
        while number % 64 == 63 && before_all + number >= arrived() {
            assert!(Instant::now() < end, "{number} packets do not arrive");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    wait_until_received(&child, before_all + SENT);
    let report = interrupted(child);
    let count = |value: &serde_json::Value| value.as_u64().unwrap();
    let driver = wire.driver_drops() - before;
    assert_eq!(count(&report["packets"]) + dropped(&report) + driver, SENT, "{report}");
    assert_eq!(
        count(&report["stored"]) + count(&report["not_stored"]),
        count(&report["packets"]),
        "{report}"
    );
    // What a ring holds has room, also where the program gets no processor meanwhile.
    assert!(count(&report["packets"]) >= count(&report["ring"]), "{report}");
    // Every page has come back to a ring or the pool.
    assert_eq!(report["pages"]["holders"].get("store"), None, "{report}");
    assert_eq!(&report["to"], to, "{report}");
    report
}

#[test]
fn every_byte_is_stored_in_a_file_by_several_queues() {
    let Some(wire) = Wire::new(2, 1500) else { return };
    let folder = Folder::new();
    let file = folder.arg("packets");
    let report = store(&wire, &file, &[]);
    let stored = std::fs::read(&file).unwrap();
    assert_eq!(report["stored"], check_slots(&stored), "{report}");
    assert_eq!(report["stored"], stored.len() / 4096, "no slot is vacant: {report}");
    assert_eq!(report["not_stored"], 0, "{report}");
    assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o077, 0, "readable by its owner only");
    receive(&["--to", &file]).failed(1, &["packets", "would be overwritten", "--force"]);
    let report = receive(&["--to", &file, "--force", "--seconds", "100ms", "--json"]).json();
    assert_eq!(
        (&report["stored"], std::fs::metadata(&file).unwrap().len()),
        (&0.into(), 0),
        "{report}"
    );
}

/// Both kinds of file, with the packets that fit, and the setting that refused more.
#[test]
fn a_limit_of_file_sizes_is_named_with_what_fits() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let folder = Folder::new();
    for (option, name) in [("--pcap", "packets.pcap"), ("--to", "packets")] {
        let file = folder.arg(name);
        // Blocks of 1024 bytes in bash, of 512 in other shells.
        let limited = ["-c", "ulimit -f 100 && exec \"$@\"", "sh", env!("CARGO_BIN_EXE_pinfold")];
        let mut child = receiving_by(|| {
            let mut command = Command::new("sh");
            command.args(limited).args(["receive", "v1", option, &file]);
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().unwrap().into()
        });
        let sender = wire.sender();
        // More than the buffer of a capture holds.
        let (mut number, end) = (0, Instant::now() + Duration::from_secs(60));
        while child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "{option}: it goes on beyond the limit");
            sender.send(&datagram(number)).unwrap();
            number += 1;
            std::thread::sleep(Duration::from_micros(100));
        }
        let ended = finish(child);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(ended.err.contains("ulimit -f"), "{ended:?}");
        let len = std::fs::metadata(&file).unwrap().len();
        assert!((1..=100 << 10).contains(&len), "{option}: {len} bytes");
        wait_until_detached();
    }
}

#[test]
fn every_byte_is_stored_through_a_controller_until_it_is_full() {
    let Some(wire) = Wire::new(2, 1500) else { return };
    let folder = Folder::new();
    let image = folder.arg("disk.img");
    let to = format!("soft:{image}");
    let create = |bytes| std::fs::File::create(&image).unwrap().set_len(bytes).unwrap();
    create(64 << 20);
    let report = store(&wire, &to, &[]);
    assert_eq!(report["stored"], check_slots(&std::fs::read(&image).unwrap()), "{report}");
    assert_eq!(report["not_stored"], 0, "{report}");
    receive(&["--to", &to]).failed(1, &["disk.img", "--force"]);
    // Fewer than before: the rest of the image is the earlier run's.
    let before = arrived();
    let child = receiving(&["--to", &to, "--force", "--json"]);
    let sender = wire.sender();
    (0..100).for_each(|number| assert!(sender.send(&datagram(number)).is_ok()));
    wait_until_received(&child, before + 100);
    let (report, slots) = (interrupted(child), check_slots(&std::fs::read(&image).unwrap()));
    assert!(report["stored"] == slots && slots <= 100, "{slots} of 100: {report}");
    // A hundred slots, and a block that is none.
    create(100 * 4096 + 512);
    let report = store(&wire, &to, &["--force"]);
    assert_eq!(
        (&report["stored"], check_slots(&std::fs::read(&image).unwrap())),
        (&100.into(), 100)
    );
    let report = store(&wire, "soft:1M", &[]);
    assert_eq!(report["stored"], 256, "{report}");
}

#[test]
fn a_write_that_fails_ends_the_program_and_frees_the_interface() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let folder = Folder::new();
    // In mounts of its own, which end with the program.
    let script = format!(
        "mount -t tmpfs -o size=64k tmpfs '{0}' && exec '{1}' receive v1 --to '{0}/packets'",
        folder.arg(""),
        env!("CARGO_BIN_EXE_pinfold")
    );
    let child = receiving_by(|| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap().into()
    });
    let sender = wire.sender();
    for number in 0..200 {
        sender.send(&datagram(number)).unwrap();
    }
    finish(child).failed(1, &["packets", "No space left"]);
    wait_until_detached();
}

/// A controller that is not ready has its requests sent again for ten seconds, but not after a
/// signal.
#[test]
fn a_signal_ends_the_retries_of_what_is_being_stored() {
    const LIMIT: Duration = Duration::from_secs(10);
    let Some(wire) = Wire::new(1, 1500) else { return };
    let before = arrived();
    let child = receiving(&["--to", "soft:1M,not-ready=1h", "--json"]);
    let (sender, sent) = (wire.sender(), Instant::now());
    (0..10).for_each(|number| assert!(sender.send(&datagram(number)).is_ok()));
    wait_until_received(&child, before + 10);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    // Later the limit may end them first.
    let is_early = sent.elapsed() < LIMIT / 4;
    let ended = finish(child);
    assert!(!is_early || sent.elapsed() < LIMIT, "it waits for the limit: {ended:#?}");
    let report = ended.report();
    assert_eq!((&report["stored"], &report["not_stored"]), (&0.into(), &10.into()), "{report}");
    ended.failed(1, &["soft:1M"]);
    wait_until_detached();
}

#[test]
fn a_program_that_cannot_receive_overwrites_nothing() {
    let Some(_wire) = Wire::new(2, 1500) else { return };
    let folder = Folder::new();
    let (file, absent) = (folder.file("old", b"contents"), folder.arg("absent"));
    // The other queue is free, and the interface has a program.
    let child = receiving(&["--queue", "0"]);
    for kept in ["--to", "--pcap"] {
        pinfold(&["receive", "v1", "--queue", "1", kept, &file, "--force"])
            .failed(1, &["v1", "XDP"]);
        pinfold(&["receive", "v1", "--queue", "1", kept, &absent]).failed(1, &["v1", "XDP"]);
    }
    assert_eq!(
        (std::fs::read(&file).unwrap(), folder.names()),
        (b"contents".to_vec(), vec!["old".to_owned()])
    );
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    assert_eq!(finish(child).code, Some(137));
}

#[test]
fn a_target_that_cannot_store_is_named() {
    for other in [&["--reflect"][..], &["--small-chunks"], &["--pcap", "f"]] {
        pinfold(&[&["receive", "lo", "--to", "f"], other].concat()).failed(2, &["--to", other[0]]);
    }
    let Some(_wire) = Wire::new(1, 1500) else { return };
    let folder = Folder::new();
    let to = |target: &str| receive(&["--seconds", "100ms", "--to", target]);
    to("vfio:0000:01:00.0").failed(2, &["--to vfio:0000:01:00.0", "file:PATH"]);
    to("soft:2048").failed(1, &["soft:2k", "2048", "4096"]);
    to(&folder.arg("no/file")).failed(1, &["no/file", "check the path"]);
    to(&format!("soft:{}", folder.arg("no.img"))).failed(1, &["no.img", "check the path"]);
    to("/dev/null").failed(1, &["/dev/null"]);
    to("/dev/full").failed(1, &["/dev/full"]);
    let small = folder.arg("small.img");
    std::fs::File::create(&small).unwrap().set_len(1024).unwrap();
    to(&format!("soft:{small}")).failed(1, &["small.img", "1024", "4096"]);
    let absent = folder.arg("absent");
    pinfold(&["receive", "v1", "--queue", "7", "--to", &absent]).failed(1, &["no queue 7"]);
    assert!(
        !std::path::Path::new(&absent).exists(),
        "a queue that cannot be opened leaves no file"
    );
    wait_until_detached();
}

/// In use by QEMU, for example, whose locks these are.
#[test]
fn a_file_that_is_in_use_is_not_emptied() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    let folder = Folder::new();
    let path = folder.file("disk", &[7; 8192]);
    let held = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    assert_eq!(::pinfold::lock_image(&held, true), ::pinfold::ImageLock::Held);
    for to in ["--to", "--pcap"] {
        receive(&["--seconds", "100ms", "--memory", "8M", to, &path, "--force"])
            .failed(1, &["is in use"]);
        assert_eq!(std::fs::read(&path).unwrap(), [7; 8192], "{to}");
    }
}
