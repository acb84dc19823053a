//! Two connected virtual interfaces, in a network namespace of the calling thread.
#![expect(unsafe_code, reason = "moving a thread into a new namespace; it concerns no memory")]

use crate::error::BenchError;
use pinfold_xdp::system::Interface;
use rustix::process::setpriority_process;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};
use std::fs::File;
use std::os::fd::AsFd;
use std::process::Command;

/// The end that sends, and the one that sockets are on.
const NEAR: &str = "v0";
const FAR: &str = "v1";

/// A new namespace with a pair of interfaces, for the calling thread and those that it starts. The
/// thread returns to its own when this is dropped, and the namespace ends with what refers to it.
#[derive(Debug)]
pub(super) struct Wire {
    before: File,
    pub(super) queues: usize,
}

impl Wire {
    /// Creates the pair with this number of queues.
    pub(super) fn new(queues: usize) -> Result<Self, BenchError> {
        let unable = |what: &str, error: &dyn std::fmt::Display| {
            BenchError::NoNetwork(format!("{what}: {error}"))
        };
        if !rustix::process::geteuid().is_root() {
            return Err(BenchError::NoNetwork(
                "it needs root, for a network namespace: sudo pinfold-bench receive".into(),
            ));
        }
        if processors()?.len() < 2 {
            return Err(BenchError::NoNetwork("it needs two processors: one sends".into()));
        }
        let before = File::open("/proc/thread-self/ns/net")
            .map_err(|error| unable("/proc/thread-self/ns/net", &error))?;
        // SAFETY: a new network namespace concerns sockets that are created later, and nothing in
        // memory.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }
            .map_err(|error| unable("no network namespace", &error))?;
        // From here on, dropping it returns to the previous namespace.
        let wire = Self { before, queues };
        let end = |name| format!("{name} mtu 1500 numrxqueues {queues} numtxqueues {queues}");
        run("ip", &format!("link add {} type veth peer name {}", end(NEAR), end(FAR)))?;
        for name in [NEAR, FAR] {
            // No packets of the kernel's own.
            run("ip", &format!("link set dev {name} addrgenmode none"))?;
            run("ip", &format!("link set dev {name} arp off up"))?;
        }
        // The receiving thread polls the driver; the interrupt is only for what it leaves for
        // longer than 200 us.
        let settings = format!(
            "mount -t sysfs sysfs /sys && cd /sys/class/net/{FAR} && echo 100 > napi_defer_hard_irqs && \
             echo 200000 > gro_flush_timeout"
        );
        command(
            Command::new("unshare").args(["--mount", "sh", "-c", &settings]),
            "unshare --mount",
        )?;
        Ok(wire)
    }

    /// Returns the end that sends.
    pub(super) fn near(&self) -> Result<Interface, BenchError> {
        Ok(Interface::named(NEAR)?)
    }

    /// Returns the end that sockets are on.
    pub(super) fn far(&self) -> Result<Interface, BenchError> {
        Ok(Interface::named(FAR)?)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // It cannot fail for a namespace that the thread was in. The interfaces end some time after
        // the namespace's last use.
        let _ = Command::new("ip").args(["link", "del", NEAR]).output();
        let _ = move_into_link_name_space(self.before.as_fd(), Some(LinkNameSpaceType::Network));
    }
}

fn run(program: &str, words: &str) -> Result<(), BenchError> {
    command(Command::new(program).args(words.split_whitespace()), &format!("{program} {words}"))
}

fn command(command: &mut Command, what: &str) -> Result<(), BenchError> {
    let unable = |why: &str| BenchError::NoNetwork(format!("{what}: {}", why.trim()));
    let output = command.output().map_err(|error| unable(&error.to_string()))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(unable(&String::from_utf8_lossy(&output.stderr)))
    }
}

/// Returns the processors that the program may use.
pub(super) fn processors() -> Result<Vec<usize>, BenchError> {
    let allowed = sched_getaffinity(None).map_err(|errno| BenchError::Processor(errno.into()))?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect())
}

/// Keeps the calling thread on a processor, before all others there: 256 packets wait between the
/// two ends at most, so sender and receiver must run at the same time.
pub(super) fn run_on(processor: usize) -> Result<(), BenchError> {
    let mut set = CpuSet::new();
    set.set(processor);
    sched_setaffinity(None, &set).map_err(|errno| BenchError::Processor(errno.into()))?;
    // Of the calling thread alone, on Linux. Without it the figures are only rougher.
    let _ = setpriority_process(None, -20);
    Ok(())
}
