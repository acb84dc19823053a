//! `receive` on interfaces whose queues or offloads are not what a program would wish: they are
//! named, and the counts stay true.

use crate::common::{Folder, Running, finish, finish_with, pinfold, skipped, wait_until};
use crate::receive::{
    dropped, ended_once_released, interrupt, interrupted, receive, receiving, receiving_by,
    wait_until_detached, wait_until_received,
};
use crate::receive_to::datagram;
use crate::wire::{LIMIT, Wire, arrived, returned, run, up};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Returns a wire whose near end has as many transmit queues as its far end receives from, which
/// has other transmit queues.
fn uneven(receive: u32, transmit: u32) -> Option<Wire> {
    let wire = Wire::new(1, 1500)?;
    run("ip link del v0");
    run(&format!(
        "ip link add v0 numtxqueues {receive} numrxqueues {transmit} type veth peer name v1 numtxqueues {transmit} numrxqueues \
         {receive}"
    ));
    for name in ["v0", "v1"] {
        std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1").ok();
        run(&format!("ip link set dev {name} addrgenmode none"));
    }
    up();
    run("ip addr add 10.99.0.1/24 dev v0");
    run("ip link set dev v1 address 02:00:00:00:00:11");
    run("ip neigh add 10.99.0.2 lladdr 02:00:00:00:00:11 dev v0 nud permanent");
    Some(wire)
}

/// Returns the lines of standard error as they are written.
fn lines(child: &mut Child) -> Receiver<String> {
    let err = BufReader::new(child.stderr.take().unwrap());
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        err.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
    });
    lines
}

/// Ends the program as Ctrl-C does, and returns its report and what it wrote to standard error.
fn ended(child: Running) -> (serde_json::Value, String) {
    interrupt(&child);
    let ended = finish(child);
    assert_eq!(ended.code, Some(130), "{ended:#?}");
    (ended.report(), ended.err)
}

#[test]
fn replies_are_counted_once_the_kernel_has_sent_them() {
    for (transmit, note) in [(1, true), (3, true), (4, false)] {
        let Some(_wire) = uneven(4, transmit) else { return };
        let child = receiving(&["--reflect", "--json"]);
        let before = arrived();
        let sockets: Vec<_> = (0..64).map(|_| UdpSocket::bind(("10.99.0.1", 0)).unwrap()).collect();
        // More than a transmit ring has entries, in each queue.
        for round in 0..200u64 {
            sockets.iter().for_each(|socket| {
                socket.connect(("10.99.0.2", 7000)).unwrap();
                assert!(socket.send(&round.to_be_bytes()).is_ok());
            });
        }
        wait_until_received(&child, before + 64 * 200);
        let (report, err) = ended(child);
        let (packets, reflected) =
            (report["packets"].as_u64().unwrap(), report["reflected"].as_u64().unwrap());
        let by = &report["not_reflected_by"];
        assert_eq!(reflected + report["not_reflected"].as_u64().unwrap(), packets, "{report}");
        assert_eq!(by["no_transmit_queue"].as_u64().unwrap() > 0, note, "{report}");
        assert_eq!((&by["not_sent"], &by["no_reply"]), (&0.into(), &0.into()), "{report}");
        assert_eq!(report["transmit_queues"], transmit, "{report}");
        assert!(reflected > 0 && !err.contains("quarantined"), "{err} {report}");
        let words = format!("v1 has {transmit} transmit queue");
        assert_eq!(err.contains(&words), note, "{err}");
        assert_eq!(report["notes"].to_string().contains(&words), note, "{report}");
        // The packets that left the interface, by the counters of its other end.
        assert_eq!(returned(), reflected, "received and dropped by v0: {report}");
        assert_eq!(report["pages"]["in_use"], report["pages"]["in_kernel"], "{report}");
    }
}

#[test]
fn a_chosen_queue_that_does_not_transmit_is_refused() {
    let Some(_wire) = uneven(4, 2) else { return };
    let reflect =
        |queue| pinfold(&["receive", "v1", "--reflect", "--seconds", "100ms", "--queue", queue]);
    reflect("2")
        .failed(2, &["--queue 2: v1 has 2 transmit queues", "below 2", "--set-channels v1 tx 3"]);
    reflect("4").failed(1, &["v1 has no queue 4"]);
    let (sending, counted) = (reflect("1"), receive(&["--seconds", "100ms"]));
    assert_eq!((sending.code, counted.code), (Some(0), Some(0)), "{sending:#?} {counted:#?}");
    assert!(!sending.err.contains("transmit"), "it has all that it needs: {sending:#?}");
    assert!(!counted.err.contains("transmit"), "nothing is sent: {counted:#?}");
}

#[test]
fn tags_that_an_offload_removes_are_named_until_it_is_off() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    if Command::new("ethtool").arg("--version").output().is_err() {
        return skipped("ethtool is not installed");
    }
    let folder = Folder::new();
    let file = folder.arg("packets");
    let look = |iface: &str, more: &[&str]| {
        let args = [&["receive", iface, "--seconds", "100ms", "--json", "--force"], more].concat();
        let ended = ended_once_released(|| pinfold(&args));
        // The kernel may take long to release what the run before had.
        let told = ended.err.lines().filter(|line| !line.contains("or one that has just ended"));
        let told: Vec<_> = told.collect();
        (ended.report(), told.join("\n"))
    };
    for more in [&["--reflect"][..], &["--pcap", &file], &["--to", &file], &[]] {
        let (report, err) = look("v1", more);
        assert_eq!(report["vlan_tags"], "removed", "{report}");
        let is_told =
            err.contains("VLAN tags are left out of the packets by v0, the other end of v1");
        assert_eq!(is_told, !more.is_empty(), "only of what keeps packets: {err}");
        assert_eq!(report["notes"].as_array().unwrap().len(), usize::from(is_told), "{report}");
    }
    // The command of the note.
    let (_, err) = look("v1", &["--reflect"]);
    let command = err.split('`').nth(1).unwrap().strip_prefix("sudo ").unwrap();
    run(command);
    let (report, err) = look("v1", &["--reflect"]);
    assert_eq!(
        (&report["vlan_tags"], err.as_str()),
        (&"in-packet".into(), ""),
        "{command}: {report}"
    );
    // Its own offload is not what decides.
    let (report, _) = look("v0", &[]);
    assert_eq!(report["vlan_tags"], "removed", "{report}");
    // One in another namespace cannot be asked.
    let other = Command::new("unshare").args(["--net", "sleep", "600"]).spawn().unwrap();
    let other = Running::from(other);
    let inside = format!("/proc/{}/ns/net", other.id());
    let own = std::fs::read_link("/proc/thread-self/ns/net").unwrap();
    wait_until("another namespace", || std::fs::read_link(&inside).unwrap() != own);
    run(&format!("ip link set dev v0 netns {}", other.id()));
    let (report, err) = look("v1", &["--reflect"]);
    drop(other);
    assert_eq!(report["vlan_tags"], "unknown", "{report}");
    assert!(
        err.contains("unless the other end of v1, in another network namespace, keeps them"),
        "{err}"
    );
}

#[test]
fn tags_that_the_stack_removes_are_named() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    let made = Command::new("ip")
        .args("link add link v1 name m1 type macvlan".split(' '))
        .output()
        .unwrap();
    if !made.status.success() {
        return skipped(&String::from_utf8_lossy(&made.stderr));
    }
    run("ip link set dev m1 up");
    let ended = pinfold(&["receive", "m1", "--reflect", "--seconds", "100ms", "--json"]);
    assert!(ended.out.contains("\"vlan_tags\":\"removed\""), "{ended:#?}");
    assert!(
        ended.err.contains("VLAN tags are taken out of the packets before they reach m1"),
        "{ended:#?}"
    );
}

#[test]
fn merged_packets_that_are_dropped_are_named_with_the_command() {
    let Some(_wire) = Wire::new(1, 1500) else { return };
    let mut child = receiving(&["--reflect", "--xdp", "generic", "--json"]);
    let lines = lines(&mut child);
    // The mirror answers a SYN by a SYN. Data written then goes out in packets beyond the MTU.
    let mut stream = TcpStream::connect(("10.99.0.2", 7000)).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(&[7; 60_000]).unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    let told = std::iter::from_fn(|| {
        lines.recv_timeout(end.saturating_duration_since(Instant::now())).ok()
    })
    .find(|line| line.contains("has merged beyond the MTU"))
    .unwrap();
    for part in ["v1: ", "ethtool -K v1 gro off", "gso off"] {
        assert!(told.contains(part), "{part:?} is not in {told}");
    }
    let (report, _) = ended(child);
    assert!(report["drops"]["other"].as_u64().unwrap() > 0, "{report}");
    assert!(report["notes"].to_string().contains("merged"), "{report}");
}

#[test]
fn the_memory_of_all_queues_is_one_budget() {
    let Some(wire) = Wire::new(32, 1500) else { return };
    // The limit of a control group is not known, so it is assumed to be 512 MiB, and there are no
    // hugepages.
    let hidden = |more: &str| {
        let script = format!(
            "umount -Rl /sys/fs/cgroup && {{ mount -t tmpfs none /sys/kernel/mm/hugepages || true; }} && exec env --default-signal=INT '{}' receive v1 --json {more}",
            env!("CARGO_BIN_EXE_pinfold")
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let refused = finish_with(hidden("--memory 32M --seconds 100ms"));
    if refused.err.contains("umount") {
        return skipped(&refused.err);
    }
    refused.failed(
        2,
        &["32 buffers of 32 MiB", "512 MiB allowed by caution", "--memory, or name one --queue"],
    );
    for to in ["", "--to soft:4M", "--reflect"] {
        let (before, driver) = (arrived(), wire.driver_drops());
        let child = receiving_by(|| hidden(to).spawn().unwrap().into());
        let sender = wire.sender();
        (0..100).for_each(|number| assert!(sender.send(&datagram(number)).is_ok()));
        wait_until_received(&child, before + 100);
        let (report, err) = ended(child);
        assert_eq!(
            (&report["memory_per_queue"], &report["ring"]),
            (&(8 << 20).into(), &1024.into()),
            "{err}"
        );
        assert_eq!(report["packets"], 100 - (wire.driver_drops() - driver), "{report}");
        wait_until_detached();
    }
}

// `receive` with packets that programs of others make.

#[test]
fn every_packet_of_testpmd_is_received_or_dropped_for_a_cause() {
    let generator = Command::new("dpdk-testpmd");
    let drivers = Command::new("sh")
        .args(["-c", "ls /usr/lib/*/librte_net_af_packet.so.*"])
        .output()
        .unwrap();
    if Command::new("dpdk-testpmd").arg("--version").output().is_err() || !drivers.status.success()
    {
        return skipped("needs testpmd (sudo apt-get install dpdk-dev librte-net-af-packet23)");
    }
    let Some(wire) = Wire::new(1, 1500) else { return };
    let (before, arrived) = (wire.driver_drops(), arrived());
    let child = receiving(&["--json"]);
    let (out, sent) = generate(generator);
    wait_until_received(&child, arrived + sent);
    let report = interrupted(child);
    let (received, dropped) = (report["protocols"]["udp"].as_u64().unwrap(), dropped(&report));
    let driver = wire.driver_drops() - before;
    assert!(sent >= SENT, "{out}");
    assert_eq!(
        received + dropped + driver,
        sent,
        "{driver} dropped by the driver: {report}\n{out}"
    );
    assert!(received > 0, "{report}");
    assert_eq!(report["packets"], received, "nothing else was sent: {report}");
}

/// The fewest packets that testpmd sends.
const SENT: u64 = 100_000;

/// Makes testpmd send packets of 64 bytes through the near end. Returns its output, and the number
/// of packets sent.
fn generate(mut testpmd: Command) -> (String, u64) {
    // Memory without hugepages, which other tests count.
    testpmd.args(
        "--no-huge -m 128 --no-pci --no-telemetry --no-shconf -l 0,1 --vdev=net_af_packet0,iface=v0 --"
            .split(' '),
    );
    testpmd.args(
        "--forward-mode=txonly --txpkts=64 --total-num-mbufs=4096 --auto-start --interactive"
            .split(' '),
    );
    testpmd.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = testpmd.spawn().unwrap();
    let mut commands = child.stdin.take().unwrap();
    let end = Instant::now() + LIMIT;
    while arrived() < SENT && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    commands.write_all(b"quit\n").unwrap();
    drop(commands);
    let ended = finish(child);
    let mut sent = ended.out.lines().filter_map(|line| line.trim().strip_prefix("TX-packets: "));
    let sent = sent
        .next_back()
        .and_then(|rest| rest.split_whitespace().next())
        .unwrap_or_else(|| panic!("{ended:#?}"));
    (ended.out.clone(), sent.parse().unwrap())
}

#[test]
fn a_flood_of_pings_is_answered() {
    if Command::new("ping").arg("-V").output().is_err() {
        return skipped("ping is not installed");
    }
    let Some(_wire) = Wire::new(1, 1500) else { return };
    let child = receiving(&["--reflect", "--json"]);
    let ping = Command::new("ping")
        .args(["-q", "-f", "-c", "2000", "-w", "60", "10.99.0.2"])
        .output()
        .unwrap();
    let words = String::from_utf8_lossy(&ping.stdout).into_owned();
    let report = interrupted(child);
    let count = |key: &str| report[key].as_u64().unwrap();
    // A ping that waits too long for an answer sends another request, which is answered as well.
    assert!(ping.status.success() && words.contains("2000 received"), "{words}{report}");
    assert!(count("packets") >= 2000 && count("reflected") >= 2000, "{words}{report}");
    assert_eq!((count("packets"), dropped(&report)), (count("reflected"), 0), "{words}{report}");
}
