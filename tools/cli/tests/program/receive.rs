//! `receive` on a pair of virtual interfaces, in a network namespace of the test.

use crate::common::{
    Ended, Folder, Running, finish, finish_with, pinfold, skipped, start, wait_until,
};
use crate::receive_to::datagram;
use crate::wire::{LIMIT, Wire, arrived, ask, number_of_bytes, reply_drops};
use rustix::process::{Pid, Signal, kill_process, setpriority_process};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Starts the program on the far end, and waits until it receives.
pub(crate) fn receiving(args: &[&str]) -> Running {
    receiving_by(|| start(&[&["receive", "v1"][..], args].concat()))
}

/// Starts a program by `start`, and waits until it receives.
pub(crate) fn receiving_by(start: impl Fn() -> Running) -> Running {
    once_released(|| until(start(), "a queue receives", receives)).unwrap()
}

/// Runs the program on the far end, which an earlier run may have had, up to its end.
pub(crate) fn receive(args: &[&str]) -> Ended {
    ended_once_released(|| pinfold(&[&["receive", "v1"][..], args].concat()))
}

/// Returns the end of `run`, to which what an earlier run had is free.
pub(crate) fn ended_once_released(run: impl Fn() -> Ended) -> Ended {
    let (Ok(ended) | Err(ended)) = once_released(|| Err::<Ended, _>(run()));
    ended
}

/// Repeats a run that ends because a queue or the interface is in use: the kernel releases those of
/// an earlier run in deferred work, under a lock that the interfaces of all namespaces share, and
/// the program waits for no more than 5 s. Any other end is returned at once.
fn once_released<T>(run: impl Fn() -> Result<T, Ended>) -> Result<T, Ended> {
    let in_use = ["is in use by another AF_XDP socket", "has an XDP program already"];
    let end = Instant::now() + LIMIT;
    loop {
        match run() {
            Err(ended)
                if ended.code == Some(1)
                    && in_use.iter().any(|words| ended.err.contains(words))
                    && Instant::now() < end => {}
            result => return result,
        }
    }
}

/// Waits until `is_so` of a program; an error if it ends before.
fn until(mut child: Running, what: &str, is_so: impl Fn(&Child) -> bool) -> Result<Running, Ended> {
    let end = Instant::now() + LIMIT;
    while !is_so(&child) {
        if child.try_wait().unwrap().is_some() {
            return Err(finish(child));
        }
        assert!(Instant::now() < end, "not in {LIMIT:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(child)
}

/// Waits until a program is on the far end, which one that `child` has started may have attached.
pub(crate) fn attached(child: Running) -> Running {
    until(child, "a program is on the interface", |_| has_program()).unwrap()
}

/// Waits until an attached program receives.
pub(crate) fn attached_receiving(child: Running) -> Running {
    until(child, "a queue receives", receives).unwrap()
}

/// Ends the program as Ctrl-C does. It has 10 s for its end, so it gets processors before all others.
pub(crate) fn interrupt(child: &Child) {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap().flatten();
    for task in tasks {
        let id = task.file_name().to_str().and_then(|id| id.parse().ok()).unwrap();
        // Of one thread. It may have ended; without it a busy machine may take too long.
        setpriority_process(Pid::from_raw(id), -20).ok();
    }
    kill_process(Pid::from_child(child), Signal::INT).unwrap();
}

/// Ends the program as Ctrl-C does, and returns its report.
pub(crate) fn interrupted(child: Running) -> serde_json::Value {
    interrupt(&child);
    reported(child)
}

/// Returns the report of a program that ends by a signal.
pub(crate) fn reported(child: Running) -> serde_json::Value {
    let ended = finish(child);
    assert_eq!(ended.code, Some(130), "{ended:#?}");
    ended.report()
}

/// Returns how many packets the kernel has dropped at the sockets of the program.
pub(crate) fn dropped(report: &serde_json::Value) -> u64 {
    let drops = &report["drops"];
    ["receive_ring_full", "no_page", "other"]
        .iter()
        .map(|cause| drops[*cause].as_u64().unwrap())
        .sum()
}

/// Waits until `sent` packets have arrived, and each thread of a queue has waited for packets
/// afterwards.
pub(crate) fn wait_until_received(child: &Child, sent: u64) {
    let end = Instant::now() + LIMIT;
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
    // Another thread may end meanwhile: the kernel's workers for files do.
    let statuses =
        tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok());
    let queues = statuses.filter(|status| status.starts_with("Name:\treceive\n"));
    let count = |status: String| {
        let mut lines = status.lines();
        lines
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse().ok())
            .unwrap()
    };
    queues.map(count).collect()
}

/// Returns whether a program has the first thread of a queue. They start when the sockets of all
/// queues are behind the XDP program; until then the kernel's stack gets packets.
fn receives(child: &Child) -> bool {
    let is_queue = |task: std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name == "receive\n")
    };
    let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id()));
    tasks.into_iter().flatten().flatten().any(is_queue)
}

fn has_program() -> bool {
    let shown =
        Command::new("ip").args(["-details", "link", "show", "dev", "v1"]).output().unwrap();
    String::from_utf8_lossy(&shown.stdout).contains("prog/xdp")
}

/// Waits until the program of a run that has ended is no longer on the far end.
pub(crate) fn wait_until_detached() {
    wait_until("no program is on the interface", || !has_program());
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
    let holders = report["pages"]["holders"].as_object().unwrap().values();
    assert_eq!(
        report["pages"]["in_use"],
        holders.map(|pages| pages.as_u64().unwrap()).sum::<u64>()
    );
    crate::around::assert_report_documented("receive.md", &report);
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
    receive(&["--pcap", &file]).failed(1, &["packets.pcap exists; --force replaces it"]);
    let nowhere = folder.arg("no/x");
    receive(&["--pcap", &nowhere]).failed(1, &[&nowhere, "check the path"]);
}

/// Others read the file while the program runs, and it is complete up to then after a kill.
#[test]
fn packets_are_in_the_file_soon_after_they_have_arrived() {
    let Some(wire) = Wire::new(1, 1500) else { return };
    let folder = Folder::new();
    let file = folder.arg("packets.pcap");
    let child = receiving(&["--pcap", &file]);
    let count = || {
        let mut reader =
            pcap_file::pcap::PcapReader::new(std::fs::File::open(&file).unwrap()).unwrap();
        let mut packets = 0;
        while reader.next_packet().is_some_and(|packet| packet.is_ok()) {
            packets += 1;
        }
        packets
    };
    assert_eq!(count(), 0, "a header");
    let sender = wire.sender();
    (0..30).for_each(|number| assert!(sender.send(&datagram(number)).is_ok()));
    let end = Instant::now() + Duration::from_secs(60);
    while count() < 30 {
        assert!(Instant::now() < end, "{} of 30", count());
        std::thread::sleep(Duration::from_millis(20));
    }
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    assert_eq!((finish(child).code, count()), (Some(137), 30));
    wait_until_detached();
}

#[test]
fn a_mirror_answers_until_it_is_interrupted() {
    let Some(wire) = Wire::new(2, 1500) else { return };
    let child = receiving(&["--reflect"]);
    ask(&wire.sender(), (0..100u64).map(|number| number.to_be_bytes().to_vec()));
    interrupt(&child);
    let ended = finish(child);
    assert_eq!(ended.code, Some(130), "{ended:#?}");
    // Those whose answer was dropped came again.
    let all = 100 + reply_drops();
    for part in [
        "receive v1: 2 queues",
        &format!("{all} packets"),
        &format!("udp {all}"),
        &format!("reflected     {all} packets, 0 not sent"),
        "socket",
    ] {
        assert!(ended.out.contains(part), "{part:?} is not in {ended:#?}");
    }
    wait_until_detached();
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
        interrupt(&child);
        signal(Signal::CONT);
        let report = reported(child);
        let driver = wire.driver_drops() - driver;
        assert_eq!(
            (&report["packets"], dropped(&report)),
            (&(SENT - driver).into(), 0),
            "{report}"
        );
        if !to.is_empty() {
            assert_eq!(report["stored"], report["packets"], "{report}");
        }
    }
}

#[test]
fn unreceivable_interfaces_are_named() {
    pinfold(&["receive", "no-such-link"]).failed(1, &["no interface no-such-link", "ip link"]);
    pinfold(&["receive", "lo", "--pcap", "f", "--reflect"]).failed(2, &["--reflect"]);
    let Some(_wire) = Wire::new(1, 1500) else { return };
    for queue in ["7", "4294967294", "4294967295"] {
        let words = format!("v1 has no queue {queue}");
        pinfold(&["receive", "v1", "--queue", queue]).failed(1, &[&words, "queue 0"]);
    }
    pinfold(&["receive", "v1", "--memory", "1M"]).failed(2, &["--memory", "at least 8 MiB"]);
    pinfold(&["receive", "v1", "--memory", "100T"]).failed(2, &["lower --memory"]);
    pinfold(&["receive", "v1", "--pcap", "-"]).failed(2, &["standard output"]);
    crate::wire::run("ip route add default via 10.99.0.2 dev v0");
    pinfold(&["receive", "v0"]).failed(1, &["default route", "--force"]);
    crate::wire::run("ip route del default");
    let child = receiving(&[]);
    let waits = "v1 is in use by another program, or one that has just ended";
    pinfold(&["receive", "v1"]).failed(1, &[waits, "queue 0 of v1 is in use"]);
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    assert_eq!(finish(child).code, Some(137));
    wait_until_detached();
    let report = receive(&["--seconds", "200ms", "--small-chunks", "--json"]).json();
    assert_eq!((&report["packets"], &report["zero_copy"]), (&0.into(), &false.into()), "{report}");
}

/// Runs the program by another one, which takes something away from it.
fn limited(by: &[&str]) -> Ended {
    let mut command = Command::new(by[0]);
    command.args(&by[1..]).arg(env!("CARGO_BIN_EXE_pinfold")).args([
        "receive",
        "v1",
        "--seconds",
        "100ms",
    ]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    finish_with(command)
}

#[test]
fn missing_permissions_are_named_with_the_command() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    if Command::new("setpriv").arg("--version").output().is_err() {
        return skipped("setpriv is not installed");
    }
    let without = limited(&["setpriv", "--bounding-set=-all", "--inh-caps=-all"]);
    without.failed(
        1,
        &["socket (AF_XDP): not permitted", "AF_XDP needs cap_net_raw", "the bounding set"],
    );
    let without =
        limited(&["setpriv", "--bounding-set=-bpf,-sys_admin", "--inh-caps=-bpf,-sys_admin"]);
    without.failed(1, &["not permitted; AF_XDP needs cap_bpf"]);
    // The memory of the arena is locked where that is allowed, and registered in any case.
    let lock = ["--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"];
    let without =
        limited(&[&["prlimit", "--memlock=1048576:1048576", "setpriv"][..], &lock].concat());
    without.failed(
        1,
        &["33554432 bytes for packets cannot be locked", "RLIMIT_MEMLOCK", "CAP_IPC_LOCK"],
    );
    wait_until_detached();
}
