//! `receive` on a pair of virtual interfaces, in a network namespace of the test.

use crate::common::{Ended, Folder, finish, finish_with, pinfold, skipped, start};
use crate::wire::{Wire, number_of_bytes};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Starts the program on the far end, and waits until it has attached its own.
pub(crate) fn receiving(args: &[&str]) -> Child {
    let child = start(&[&["receive", "v1"][..], args].concat());
    wait_for_program(true);
    wait_for_queues(&child);
    child
}

/// Ends the program as Ctrl-C does, and returns its report.
pub(crate) fn interrupted(child: Child) -> serde_json::Value {
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    reported(child)
}

/// Returns the report of a program that ends by a signal.
fn reported(child: Child) -> serde_json::Value {
    let ended = finish(child);
    assert_eq!(ended.code, Some(130), "{ended:#?}");
    serde_json::from_str(&ended.out).unwrap()
}

/// Returns how many packets the kernel has dropped at the sockets of the program.
pub(crate) fn dropped(report: &serde_json::Value) -> u64 {
    let drops = &report["drops"];
    ["receive_ring_full", "no_page", "other"].iter().map(|cause| drops[*cause].as_u64().unwrap()).sum()
}

/// Returns how many packets of the near end have reached the far end's driver, or were dropped because its queue was full.
pub(crate) fn arrived() -> u64 {
    let table = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = table.lines().find_map(|line| line.trim().strip_prefix("v0:")).unwrap();
    let fields: Vec<_> = line.split_whitespace().collect();
    // "packets" and "drop" of the transmitted ones: a packet that waits in the driver's queue is in neither.
    [9, 11].iter().map(|&at| fields[at].parse::<u64>().unwrap()).sum()
}

/// Waits until `sent` packets have arrived, and each thread of a queue has waited for packets afterwards.
pub(crate) fn wait_until_received(child: &Child, sent: u64) {
    let end = Instant::now() + Duration::from_secs(60);
    while arrived() < sent {
        assert!(Instant::now() < end, "{} of {sent} packets have arrived", arrived());
        std::thread::sleep(Duration::from_millis(5));
    }
    let before = waits(child);
    while !waits(child).iter().zip(&before).all(|(now, before)| *now >= before + 3) {
        assert!(Instant::now() < end, "a queue is not waited for: {before:?}, {:?}", waits(child));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns how often each thread of a queue has waited.
fn waits(child: &Child) -> Vec<u64> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
    let statuses = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).unwrap());
    let queues = statuses.filter(|status| status.starts_with("Name:\treceive\n"));
    let count = |status: String| {
        let mut lines = status.lines();
        lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse().ok()).unwrap()
    };
    queues.map(count).collect()
}

/// Waits for the first thread of a queue. They start when the sockets of all queues are behind the program; until then the
/// kernel's stack gets packets.
fn wait_for_queues(child: &Child) {
    let end = Instant::now() + Duration::from_secs(60);
    let is_queue = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.unwrap().path().join("comm")).is_ok_and(|name| name == "receive\n")
    };
    // Without the folder the program has ended, which the caller finds out.
    while std::fs::read_dir(format!("/proc/{}/task", child.id())).is_ok_and(|mut tasks| !tasks.any(is_queue))
    {
        assert!(Instant::now() < end, "no queue receives");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn wait_for_program(wanted: bool) {
    let end = Instant::now() + Duration::from_secs(60);
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
    assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o077, 0, "readable by its owner only");
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
    sender.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    for number in 0..100u64 {
        sender.send(&number.to_be_bytes()).unwrap();
        let mut answer = [0; 16];
        assert_eq!(sender.recv(&mut answer).unwrap(), 8);
        assert_eq!(answer[..8], number.to_be_bytes());
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let ended = finish(child);
    assert_eq!(ended.code, Some(130), "{ended:#?}");
    for part in
        ["receive v1: 2 queues", "100 packets", "udp 100", "reflected     100 packets, 0 not sent", "socket"]
    {
        assert!(ended.out.contains(part), "{part:?} is not in {ended:#?}");
    }
    wait_for_program(false);
}

#[test]
fn packets_in_the_ring_at_the_end_are_received() {
    const SENT: u64 = 500;
    let Some(wire) = Wire::new(1, 1500) else { return };
    for to in [&[][..], &["--to", "soft:4M"]] {
        let (before, driver) = (arrived(), wire.driver_drops());
        let child = receiving(&[to, &["--json"]].concat());
        let signal = |signal| kill_process(Pid::from_child(&child), signal).unwrap();
        signal(Signal::STOP);
        let status = format!("/proc/{}/status", child.id());
        let end = Instant::now() + Duration::from_secs(60);
        while !std::fs::read_to_string(&status).unwrap().contains("State:\tT") {
            assert!(Instant::now() < end, "the program does not stop");
            std::thread::sleep(Duration::from_millis(5));
        }
        // They fit into the ring, which the kernel fills meanwhile.
        let sender = wire.sender();
        for number in 0..SENT {
            sender.send(&datagram(number)).unwrap();
        }
        while arrived() < before + SENT {
            assert!(Instant::now() < end, "{} packets have arrived", arrived() - before);
            std::thread::sleep(Duration::from_millis(5));
        }
        // Its end is requested before it can receive them.
        signal(Signal::INT);
        signal(Signal::CONT);
        let report = reported(child);
        let driver = wire.driver_drops() - driver;
        assert_eq!((&report["packets"], dropped(&report)), (&(SENT - driver).into(), 0), "{report}");
        if !to.is_empty() {
            assert_eq!(report["stored"], report["packets"], "{report}");
        }
    }
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

/// The bytes of datagram `number`: of every length up to 1,400, and different from those of any other.
pub(crate) fn datagram(number: u64) -> Vec<u8> {
    let len = 8 + number * 131 % 1392;
    let rest = (0..len - 8).map(|at| (number * 7 + at * 13 + (at >> 8)).to_le_bytes()[0]);
    number.to_be_bytes().into_iter().chain(rest).collect()
}

/// Checks every byte of the slots: of each number at most one packet, which is what was sent. Returns how many there are.
pub(crate) fn check_slots(stored: &[u8]) -> usize {
    let word = |slot: &[u8], at: usize| u32::from_le_bytes(slot[at..at + 4].try_into().unwrap()) as usize;
    let long = |slot: &[u8], at: usize| u64::from_le_bytes(slot[at..at + 8].try_into().unwrap());
    let slots = stored.chunks(4096).enumerate().filter(|(_, slot)| slot.starts_with(b"PINFOLD1"));
    let mut numbers = Vec::new();
    for (at, slot) in slots {
        let (offset, len) = (word(slot, 24), word(slot, 28));
        assert_eq!(long(slot, 8), at as u64);
        assert!(long(slot, 16) > 1_600_000_000_000_000_000);
        let packet = &slot[offset..offset + len];
        let number = number_of_bytes(packet).unwrap();
        // Ethernet, IPv4, UDP; shorter ones would be padded.
        assert_eq!(packet[42..], datagram(number), "datagram {number} in slot {at}");
        assert!(slot[32..offset].iter().all(|&byte| byte == 0), "in front of datagram {number}");
        let block = (offset + len).next_multiple_of(512);
        assert!(slot[offset + len..block].iter().all(|&byte| byte == 0), "behind datagram {number}");
        numbers.push(number);
    }
    let count = numbers.len();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), count, "a packet was stored twice");
    count
}

/// Sends numbered datagrams to `receive --to` and returns its report: received, and dropped by cause, is what was sent.
fn store(wire: &Wire, to: &str, more: &[&str]) -> serde_json::Value {
    const SENT: u64 = 4000;
    let (before, arrived) = (wire.driver_drops(), arrived());
    let child = receiving(&[&["--to", to, "--json"], more].concat());
    let sender = wire.sender();
    for number in 0..SENT {
        sender.send(&datagram(number)).unwrap();
        if number % 64 == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    wait_until_received(&child, arrived + SENT);
    let report = interrupted(child);
    let count = |value: &serde_json::Value| value.as_u64().unwrap();
    let driver = wire.driver_drops() - before;
    assert_eq!(count(&report["packets"]) + dropped(&report) + driver, SENT, "{report}");
    assert_eq!(
        count(&report["stored"]) + count(&report["not_stored"]),
        count(&report["packets"]),
        "{report}"
    );
    assert!(count(&report["packets"]) > SENT / 2, "{report}");
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
    pinfold(&["receive", "v1", "--to", &file]).failed(1, &["packets", "would be overwritten", "--force"]);
    let report = pinfold(&["receive", "v1", "--to", &file, "--force", "--seconds", "100ms", "--json"]).json();
    assert_eq!((&report["stored"], std::fs::metadata(&file).unwrap().len()), (&0.into(), 0), "{report}");
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
    pinfold(&["receive", "v1", "--to", &to]).failed(1, &["disk.img", "--force"]);
    // A hundred slots, and a block that is none.
    create(100 * 4096 + 512);
    let report = store(&wire, &to, &["--force"]);
    assert_eq!((&report["stored"], check_slots(&std::fs::read(&image).unwrap())), (&100.into(), 100));
    let report = store(&wire, "soft:1M", &[]);
    assert_eq!(report["stored"], 256, "{report}");
}

#[test]
fn a_write_that_fails_ends_the_program_and_frees_the_interface() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let folder = Folder::new();
    // In mounts of its own, which end with the program.
    let script = format!(
        "mount -t tmpfs -o size=64k tmpfs '{0}' && exec '{1}' receive v1 --seconds 20 --to '{0}/packets'",
        folder.arg(""),
        env!("CARGO_BIN_EXE_pinfold")
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script]);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_program(true);
    wait_for_queues(&child);
    let sender = wire.sender();
    for number in 0..200 {
        sender.send(&datagram(number)).unwrap();
    }
    finish(child).failed(1, &["packets", "No space left"]);
    wait_for_program(false);
}

#[test]
fn a_program_that_cannot_receive_overwrites_nothing() {
    let Some(_wire) = Wire::new(2, 1500) else { return };
    let folder = Folder::new();
    let (file, absent) = (folder.file("old", b"contents"), folder.arg("absent"));
    // The other queue is free, and the interface has a program.
    let child = receiving(&["--queue", "0"]);
    for kept in ["--to", "--pcap"] {
        pinfold(&["receive", "v1", "--queue", "1", kept, &file, "--force"]).failed(1, &["v1", "XDP"]);
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
    let to = |target: &str| pinfold(&["receive", "v1", "--seconds", "100ms", "--to", target]);
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
    assert!(!std::path::Path::new(&absent).exists(), "a queue that cannot be opened leaves no file");
    wait_for_program(false);
}
