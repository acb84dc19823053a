//! `receive` with packets that programs of others make.

use crate::common::{finish, skipped};
use crate::receive::{arrived, dropped, interrupted, receiving, wait_until_received};
use crate::wire::Wire;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

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

/// How many packets testpmd sends at least.
const SENT: u64 = 100_000;

/// Has testpmd send packets of 64 bytes through the near end. Returns its output, and how many it
/// has sent.
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
    let end = Instant::now() + Duration::from_secs(60);
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
