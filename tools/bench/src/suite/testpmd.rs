//! The suite `testpmd`: `pinfold receive` and DPDK's testpmd (its af_xdp driver, forwarding nothing)
//! on the same interface, in turn.
//!
//! testpmd also makes the packets (64 bytes, its af_packet driver), as fast as it can. It polls
//! without end, so its processor time is that of a whole processor whatever arrives, with the seconds
//! before and after in which nothing is sent: compare its packets, not its time. `pinfold receive`
//! sleeps when nothing arrives; with --busy-poll the driver's part of reception is in its time as
//! well, otherwise it is the kernel's. Rates are over the seconds that the sender runs, its start
//! included.

use super::Entry;
use super::program;
use crate::error::BenchError;
use crate::harness::{COUNTS_RMW, Harness, Samples, Subject};
use crate::record::{Metric, Record};
use rustix::process::{Pid, Signal};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The cases.
pub(super) const CASES: &[Entry] =
    &[("beside-64", "packets of 64 bytes: sent, received, lost, CPU time of the receiver")];

/// The subjects.
pub(super) const SUBJECTS: &[Entry] = &[
    ("pinfold", "pinfold receive"),
    ("pinfold-busy-poll", "pinfold receive --busy-poll"),
    ("testpmd-af-xdp", "DPDK's testpmd with its af_xdp driver"),
];

const CASE: &str = "beside-64";
const TESTPMD: &str = "dpdk-testpmd";
/// The programs, and their packages.
const PROGRAMS: [(&str, &str); 2] =
    [(TESTPMD, "dpdk-dev librte-net-af-packet* librte-net-af-xdp*"), ("ip", "iproute2")];
/// The time for which a run sends packets.
const RUN: Duration = Duration::from_secs(3);
const QUICK_RUN: Duration = Duration::from_secs(1);
/// The most runs: they take seconds.
const MOST_RUNS: usize = 6;
/// The time limit for a receiver until its program is attached, and for its end.
const PATIENCE: Duration = Duration::from_secs(60);
/// The interval between two checks of these.
const LOOK: Duration = Duration::from_millis(100);

/// Returns why this machine cannot measure the suite, if so.
pub(super) fn unable() -> Option<String> {
    if let Some(error) = program::missing(&PROGRAMS) {
        return Some(error.to_string());
    }
    let is_root = rustix::process::geteuid().is_root();
    (!is_root).then(|| "only root may create interfaces: run it with sudo".to_owned())
}

/// Measures the suite.
///
/// # Errors
/// [`BenchError::NoNetwork`] where it cannot be measured, or the failure of a program.
pub(super) fn run(harness: &Harness<'_>) -> Result<Vec<Record>, BenchError> {
    if COUNTS_RMW {
        return Ok(Vec::new());
    }
    if let Some(why) = unable() {
        return Err(BenchError::NoNetwork(why));
    }
    let quick = harness.options().quick;
    let harness = match quick {
        true => harness.once(),
        false => harness.with_runs(harness.options().runs.min(MOST_RUNS)),
    };
    let duration = if quick { QUICK_RUN } else { RUN };
    let (own, space) = (program::own()?, Space::create()?);
    let subjects = SUBJECTS.iter().map(|&(name, _)| {
        let (own, space) = (&own, &space);
        Subject::new(name, move |out: &mut Samples| measure(out, own, space, name, duration))
    });
    harness.interleave(subjects.collect())
}

/// A network namespace with two connected interfaces, which is removed when this is dropped.
struct Space {
    name: String,
    folder: PathBuf,
}

impl Space {
    fn create() -> Result<Self, BenchError> {
        let name = format!("pinfold-bench-{}", std::process::id());
        let folder = program::unique(&std::env::temp_dir(), "testpmd");
        std::fs::create_dir(&folder).map_err(BenchError::Scratch)?;
        let space = Self { name, folder };
        ip(&format!("netns add {}", space.name))?;
        space.ip("link add v0 type veth peer name v1")?;
        for end in ["v0", "v1"] {
            space.ip(&format!("link set {end} addrgenmode none"))?;
            space.ip(&format!("link set {end} arp off up"))?;
        }
        Ok(space)
    }

    fn ip(&self, words: &str) -> Result<String, BenchError> {
        ip(&format!("-n {} {words}", self.name))
    }

    /// Returns a command that runs in the namespace, and whose output goes to a file of this name.
    fn command(&self, program: &Path, output: &str) -> Result<Command, BenchError> {
        let file = std::fs::File::create(self.folder.join(output)).map_err(BenchError::Scratch)?;
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(program);
        let errors = file.try_clone().map_err(BenchError::Scratch)?;
        command.stdin(Stdio::piped()).stdout(file).stderr(errors);
        Ok(command)
    }

    /// Returns a command of testpmd, with a driver, on the processor that is not `idle`.
    fn testpmd(&self, driver: &str, idle: &str, output: &str) -> Result<Command, BenchError> {
        let mut command = self.command(Path::new(TESTPMD), output)?;
        command.args(["--no-huge", "-m", "256", "--no-pci", "--no-telemetry", "--no-shconf"]);
        command.args(["-l", "0,1", "--main-lcore", idle, &format!("--vdev={driver}"), "--"]);
        command.args(["--total-num-mbufs=16384", "--auto-start", "--interactive"]);
        Ok(command)
    }

    fn output(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.join(name)).unwrap_or_default()
    }

    /// Waits until a program is attached to the receiving interface, or none is.
    fn wait_attached(&self, wanted: bool, receiver: Option<&mut Child>) -> Result<(), BenchError> {
        let until = Instant::now() + PATIENCE;
        let mut receiver = receiver;
        while self.ip("-details link show dev v1")?.contains("prog/xdp") != wanted {
            let ended =
                receiver.as_mut().is_some_and(|child| !matches!(child.try_wait(), Ok(None)));
            if ended || Instant::now() > until {
                let reason = self.output("received").lines().last().unwrap_or_default().to_owned();
                return Err(BenchError::Client { client: "the receiver".to_owned(), reason });
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        // Errors are ignored: the namespace or the folder may not have been created.
        let _ = ip(&format!("netns del {}", self.name));
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn ip(words: &str) -> Result<String, BenchError> {
    program::run(Command::new("ip").args(words.split_whitespace())).map(|(out, ..)| out)
}

/// A program that is killed when this is dropped before its end.
struct Running(Child);

impl Running {
    fn start(mut command: Command) -> Result<Self, BenchError> {
        let name = TESTPMD.to_owned();
        let failed =
            |error: std::io::Error| BenchError::Client { client: name, reason: error.to_string() };
        command.spawn().map(Self).map_err(failed)
    }

    /// Tells it to end: testpmd by its input, any other by a signal.
    fn stop(&mut self, is_testpmd: bool) {
        if is_testpmd && let Some(mut input) = self.0.stdin.take() {
            let _ = input.write_all(b"quit\n");
        } else if let Some(pid) = Pid::from_raw(self.0.id().cast_signed()) {
            let _ = rustix::process::kill_process(pid, Signal::TERM);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn measure(
    out: &mut Samples,
    own: &Path,
    space: &Space,
    name: &'static str,
    duration: Duration,
) -> Result<(), BenchError> {
    space.wait_attached(false, None)?;
    let is_testpmd = name == "testpmd-af-xdp";
    let command = if is_testpmd {
        let mut command = space.testpmd("net_af_xdp0,iface=v1", "1", "received")?;
        command.arg("--forward-mode=rxonly");
        command
    } else {
        let mut command = space.command(own, "received")?;
        command.args(["receive", "v1", "--json"]);
        command.args(["--busy-poll"].iter().filter(|_| name == "pinfold-busy-poll"));
        command
    };
    let mut receiver = Running::start(command)?;
    space.wait_attached(true, Some(&mut receiver.0))?;
    std::thread::sleep(Duration::from_secs(1));
    let mut command = space.testpmd("net_af_packet0,iface=v0", "0", "sent")?;
    command.args(["--forward-mode=txonly", "--txpkts=64"]);
    let mut sender = Running::start(command)?;
    std::thread::sleep(duration);
    sender.stop(true);
    program::end(&mut sender.0)?;
    receiver.stop(is_testpmd);
    let time = program::end(&mut receiver.0)?;
    let label = if is_testpmd { "RX-packets:" } else { "\"packets\":" };
    let counts = [("sent", "TX-packets:"), ("received", label)]
        .map(|(file, label)| count(&space.output(file), label, file == "received" && !is_testpmd));
    let [Some(sent), Some(got)] = counts else {
        let reason = "it has printed no number of packets".to_owned();
        return Err(BenchError::Client { client: name.to_owned(), reason });
    };
    let seconds = duration.as_secs_f64();
    let mut figure = |metric, unit, value| out.figure(CASE, metric, unit, value);
    figure(Metric::Rate, "packets/s sent", sent / seconds);
    figure(Metric::Rate, "packets/s received", got / seconds);
    figure(Metric::Count, "% lost", 100.0 * (sent - got).max(0.0) / sent);
    figure(Metric::Count, "ns CPU/packet", time.as_secs_f64() * 1e9 / got);
    Ok(())
}

/// Returns the number behind the first or the last `label`, if it is positive.
fn count(text: &str, label: &str, is_first: bool) -> Option<f64> {
    let number = |rest: &str| {
        let digits = rest.trim_start().split(|c: char| !c.is_ascii_digit()).next()?;
        digits.parse::<f64>().ok()
    };
    let mut all = text.split(label).skip(1).filter_map(number);
    let found = if is_first { all.next() } else { all.last() };
    found.filter(|count| *count > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_count_of_testpmd_and_the_first_of_pinfold_are_taken() {
        let testpmd = "  RX-packets: 5   RX-dropped: 0\n  TX-packets: 1\n  RX-packets: 700  x\n";
        assert_eq!(count(testpmd, "RX-packets:", false), Some(700.0));
        assert_eq!(count(testpmd, "TX-packets:", false), Some(1.0));
        assert_eq!(
            count("{\"packets\":42,\"queues\":[{\"packets\":7}]}", "\"packets\":", true),
            Some(42.0)
        );
        assert_eq!(count("none", "RX-packets:", false), None);
    }
}
