//! A soak of `serve`: clients that write, verify, leave in the middle of requests and come back,
//! and a server that is killed or terminated under them and started again over the same data.

mod disk;

use crate::common::{Folder, skipped};
use crate::serve::Server;
use disk::{Region, connect};
use rustix::process::{Signal, kill_process};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The variable with the duration in seconds; without it, the soak is skipped.
const SECONDS: &str = "PINFOLD_SERVE_SOAK_SECONDS";
/// Clients that write, each to its own region.
const CLIENTS: u64 = 4;
/// The sectors of a region.
const SECTORS: u64 = 4096;
/// The longest time until clients leave, and until the server is ended under them.
const WORK_MS: u64 = 700;
/// The time limit for a server to notice that its clients have left.
const PATIENCE: Duration = Duration::from_secs(60);

/// The resources of a server while no client is connected: descriptors, threads, and mappings of
/// files and of rings.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Resources {
    descriptors: usize,
    threads: usize,
    mappings: usize,
}

impl Resources {
    fn of(server: &Server) -> Self {
        let proc = format!("/proc/{}", server.id().as_raw_nonzero());
        let names = std::fs::read_dir(format!("{proc}/task")).unwrap().map(|task| {
            std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default()
        });
        // The kernel's workers of a ring come and go.
        let own: Vec<_> =
            names.filter(|name| !name.is_empty() && !name.starts_with("iou-")).collect();
        // The software IOMMU has one thread, from when a loop first sleeps beside a flush.
        let of_flushes = usize::from(own.iter().any(|name| name.starts_with("pinfold-flushes")));
        let maps = std::fs::read_to_string(format!("{proc}/maps")).unwrap();
        Self {
            descriptors: std::fs::read_dir(format!("{proc}/fd")).unwrap().count(),
            threads: own.len() - of_flushes,
            // The heap and the stacks have no path.
            mappings: maps
                .lines()
                .filter(|line| line.contains('/') || line.contains("anon_inode"))
                .count(),
        }
    }
}

#[test]
fn a_soak_of_serve_loses_no_write_and_leaks_nothing() {
    let Some(seconds) = std::env::var(SECONDS).ok().and_then(|text| text.parse().ok()) else {
        return skipped(&format!("make soak-serve, or {SECONDS}=20 and this test's name"));
    };
    let folder = Folder::new();
    let bytes = CLIENTS * SECTORS * disk::SECTOR;
    let soft = format!("soft:{}", folder.sparse("image", bytes));
    let targets =
        [(folder.sparse("disk", bytes), "--threads 2"), (soft, "--threads 2 --buffers 8M")];
    let mut regions = targets.clone().map(|_| Region::all(CLIENTS, SECTORS));
    let (began, limit) = (Instant::now(), Duration::from_secs(seconds));
    let (mut rounds, mut answered) = (0, 0);
    while began.elapsed() < limit || rounds < 2 {
        for ((target, options), regions) in targets.iter().zip(&mut regions) {
            answered += round(&folder, target, options, regions, rounds);
        }
        rounds += 1;
    }
    println!(
        "{rounds} rounds of each target in {:.0} s, {answered} requests answered",
        began.elapsed().as_secs_f64()
    );
}

/// Starts a server, verifies all that is there, works, checks that nothing has leaked, works again,
/// and ends the server meanwhile.
fn round(folder: &Folder, target: &str, options: &str, regions: &mut [Region], round: u64) -> u64 {
    let server = Server::start(folder, target, options);
    // Resources that the server creates for a first client stay.
    for region in &mut *regions {
        region.verify_after_end(&mut connect(&server.socket).unwrap());
    }
    let before = settled(&server, None);
    let mut answered =
        work(&server, regions, false, || std::thread::sleep(Duration::from_millis(WORK_MS)));
    settled(&server, Some(&before));
    // At another moment each time.
    let moment = Duration::from_millis(round * 137 % WORK_MS);
    let (signal, code) =
        if round.is_multiple_of(2) { (Signal::KILL, 137) } else { (Signal::TERM, 0) };
    answered += work(&server, regions, true, || {
        std::thread::sleep(moment);
        kill_process(server.id(), signal).unwrap();
    });
    let ended = server.wait();
    assert_eq!(ended.code, Some(code), "{ended:#?}");
    if signal == Signal::TERM {
        let report = ended.json();
        assert_eq!(report["stack"]["memory"][0]["frames_in_use"], 0, "{report}");
    }
    answered
}

/// Waits until the server has only what it had `before`, and returns what that is; without it,
/// until two looks agree.
fn settled(server: &Server, before: Option<&Resources>) -> Resources {
    let until = Instant::now() + PATIENCE;
    let mut last = Resources::of(server);
    loop {
        std::thread::sleep(Duration::from_millis(300));
        let now = Resources::of(server);
        if now == *before.unwrap_or(&last) {
            return now;
        }
        assert!(Instant::now() < until, "{now:?} with no client connected, before {before:?}");
        last = now;
    }
}

/// Makes all clients work until `end` returns; the server ends meanwhile if `ends`. Returns the
/// number of answers.
fn work(server: &Server, regions: &mut [Region], ends: bool, end: impl FnOnce()) -> u64 {
    let stop = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let client = |region| scope.spawn(move || Region::work(region, &server.socket, stop, ends));
        let working: Vec<_> = regions.iter_mut().map(client).collect();
        let copying = scope.spawn(move || copy(server, stop));
        end();
        stop.store(true, Ordering::SeqCst);
        copying.join().unwrap();
        working.into_iter().map(|client| client.join().unwrap()).sum()
    })
}

/// Reads everything with nbdcopy again and again, and kills it at some moment, where it is
/// installed.
fn copy(server: &Server, stop: &AtomicBool) {
    for moment in (0..).map(|number| number * 23 % 90) {
        let mut command = Command::new("nbdcopy");
        command
            .args([server.uri.as_str(), "null:"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let Ok(mut child) = command.spawn() else { return };
        std::thread::sleep(Duration::from_millis(moment));
        child.kill().unwrap();
        child.wait().unwrap();
        if stop.load(Ordering::SeqCst) {
            return;
        }
    }
}
