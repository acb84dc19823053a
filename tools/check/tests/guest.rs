//! The programs of the virtual machine's tests (`vm/guest/tests`: `domain.sh`, `fault.sh`) on model
//! devices. There the kernel is the reference; here they take seconds. Each test runs another one of
//! this program, which is ignored otherwise.
#![expect(clippy::unwrap_used, reason = "tests")]

#[path = "../../../crates/nvme/examples/iommu_fault.rs"]
#[expect(dead_code, reason = "its main")]
mod iommu_fault;
#[path = "../../../crates/pinfold/examples/vfio_check.rs"]
#[expect(dead_code, reason = "its main")]
mod vfio_check;

use pinfold_check::{CheckConfig, CheckReport, DeviceConfig, DeviceModel, Ending, run};
use pinfold_nvme_model::MemoryMedia;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const FIRST: &str = "0000:01:00.0";
const SECOND: &str = "0000:02:00.0";

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

#[test]
#[ignore = "needs the devices that the tests below provide"]
fn ignored_type_1() {
    vfio_check::run(&words(&[FIRST, "type1", &format!("with={SECOND}")])).unwrap();
}

#[test]
#[ignore = "needs the devices that the tests below provide"]
fn ignored_iommufd() {
    vfio_check::run(&words(&[FIRST, "iommufd", &format!("with={SECOND}")])).unwrap();
}

#[test]
#[ignore = "needs the devices that the tests below provide"]
fn ignored_limit_of_type_1() {
    vfio_check::run(&words(&[FIRST, "type1", "memlock"])).unwrap();
}

#[test]
#[ignore = "needs the devices that the tests below provide"]
fn ignored_limit_of_iommufd() {
    vfio_check::run(&words(&[FIRST, "iommufd", "memlock"])).unwrap();
}

#[test]
#[ignore = "needs the devices that the tests below provide"]
fn ignored_fault() {
    for bdf in [FIRST, SECOND] {
        iommu_fault::run(&words(&[bdf, "1"])).unwrap();
    }
}

/// Runs `test` under check, with blocks of 512 bytes and of 4 KiB. One at a time: check becomes the
/// parent of what its program leaves.
fn check(test: &str) -> CheckReport {
    check_from(&[], test)
}

/// Likewise, started by the program `starter`.
fn check_from(starter: &[&str], test: &str) -> CheckReport {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    let device = |bdf: &str, group, block_bytes| DeviceConfig {
        bdf: bdf.parse().unwrap(),
        group,
        media: Arc::new(MemoryMedia::new(16 << 20).unwrap()),
        model: DeviceModel::Nvme { block_bytes, not_ready: Duration::ZERO },
    };
    let devices = vec![device(FIRST, 7, 512), device(SECOND, 8, 4096)];
    let program = std::env::current_exe().unwrap().into_os_string();
    let words = ["--exact", test, "--ignored", "--nocapture"].map(Into::into);
    let starter = starter.iter().map(Into::into);
    let program = starter.chain([program]).chain(words).collect();
    let mut config = CheckConfig::new(devices, program);
    config.time_limit = Some(Duration::from_secs(500));
    let report = run(&config).unwrap();
    let lines: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
    assert_eq!(report.ending, Ending::Exit(0), "{lines:#?}");
    report
}

/// Asserts that nothing but these was found.
fn found(report: &CheckReport, ids: &[&str]) {
    let lines: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
    let counts: Vec<&str> = report.counts.keys().copied().collect();
    assert_eq!(counts, ids, "{lines:#?}");
}

/// Whether this user may lock the 64 MiB of `vfio_check`, and a little more: check limits a program as
/// the kernel does.
fn may_lock() -> bool {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    let may = rustix::process::geteuid().is_root() || limit.is_none_or(|limit| limit >= 96 << 20);
    if !may {
        println!("skipped: RLIMIT_MEMLOCK is below 96 MiB");
    }
    may
}

#[test]
fn a_domain_of_type_1_keeps_its_guarantees() {
    if !may_lock() {
        return;
    }
    found(&check("ignored_type_1"), &[]);
}

#[test]
fn a_domain_of_iommufd_keeps_its_guarantees() {
    if !may_lock() {
        return;
    }
    found(&check("ignored_iommufd"), &[]);
}

/// Of the virtual machine's `domain_reports_memlock`, which a user runs to whom the nodes are given:
/// here root without the capability, or the user of this test.
#[test]
fn a_domain_names_the_limit_of_locked_memory() {
    if !may_lock() {
        return;
    }
    let all = ["setpriv", "--bounding-set=-ipc_lock", "prlimit", "--memlock=8388608:8388608"];
    let starter = if rustix::process::geteuid().is_root() { &all[..] } else { &all[2..] };
    for test in ["ignored_limit_of_type_1", "ignored_limit_of_iommufd"] {
        found(&check_from(starter, test), &[]);
    }
}

/// It submits revoked memory, which is found.
#[test]
fn revoked_memory_is_unreachable() {
    if !may_lock() {
        return;
    }
    found(&check("ignored_fault"), &["dma-unmapped"]);
}
