//! `nvme-driver`, unmodified, through VFIO on a model controller, under check: the data is right,
//! and what the driver does wrong is reported. Each test runs another one of this program, which is
//! ignored otherwise.
#![expect(clippy::unwrap_used, reason = "tests")]

#[path = "../examples/nvme_driver_vfio/main.rs"]
#[expect(dead_code, reason = "its main")]
mod example;

use pinfold_check::{CheckConfig, CheckReport, DeviceConfig, DeviceModel, Ending, run};
use pinfold_nvme_model::MemoryMedia;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const BDF: &str = "0000:01:00.0";

#[test]
#[ignore = "needs the device that the tests below provide"]
fn ignored_stopped() {
    example::run(BDF, true).unwrap();
}

#[test]
#[ignore = "needs the device that the tests below provide"]
fn ignored_dropped() {
    example::run(BDF, false).unwrap();
}

/// Runs `test` under check. One at a time: check becomes the parent of what its program leaves.
fn check(test: &str, block_bytes: u32, hostile: Option<u64>) -> CheckReport {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    let device = DeviceConfig {
        bdf: BDF.parse().unwrap(),
        group: 7,
        media: Arc::new(MemoryMedia::new(64 << 20).unwrap()),
        model: DeviceModel::Nvme { block_bytes, not_ready: Duration::ZERO },
    };
    let program = std::env::current_exe().unwrap().into_os_string();
    let words = ["--exact", test, "--ignored", "--nocapture"].map(Into::into);
    let mut config = CheckConfig::new(vec![device], [program].into_iter().chain(words).collect());
    config.hostile = hostile;
    // Any driver may give up a device that has larger pages, fails, or is pulled; this one does not
    // tell that a namespace is not ready yet.
    config.knobs = ["mpsmin=0", "cfs=0", "remove=0", "not-ready-ms=0"]
        .map(|knob| knob.parse().unwrap())
        .into();
    config.time_limit = Some(Duration::from_secs(120));
    run(&config).unwrap()
}

/// Asserts that the data was right, and that the driver does wrong what `known` says, and nothing
/// else.
fn verified(report: &CheckReport, known: &[(&str, u64)]) {
    let lines: Vec<String> = report.findings.iter().map(ToString::to_string).collect();
    assert_eq!(report.ending, Ending::Exit(0), "{lines:#?}");
    let counts: Vec<_> = report.counts.iter().map(|(id, count)| (*id, *count)).collect();
    assert_eq!(counts, known, "{lines:#?}");
}

/// The driver clears CC.EN and never writes CC.SHN.
const SKIPPED: &str =
    "note shutdown-skipped: 0000:01:00.0: the device was closed without a shutdown";

#[test]
fn a_driver_that_is_stopped_skips_the_shutdown() {
    for block_bytes in [512, 4096] {
        let report = check("ignored_stopped", block_bytes, None);
        verified(&report, &[("shutdown-skipped", 1)]);
        let line = report.findings[0].to_string();
        assert!(line.starts_with(SKIPPED), "{line}");
    }
}

/// Nothing in the driver stops the controller when it is dropped: its queues are freed while the
/// controller may write to them.
#[test]
fn a_driver_that_is_dropped_frees_the_queues_of_an_enabled_controller() {
    let report = check("ignored_dropped", 512, None);
    verified(&report, &[("queue-unmapped", 4), ("shutdown-skipped", 1)]);
    let line = report.findings[0].to_string();
    assert!(line.starts_with("error queue-unmapped: 0000:01:00.0: "), "{line}");
    assert!(line.contains(" is unmapped, and submission queue 0 is in "), "{line}");
}

#[test]
fn hostile_devices_find_nothing_else() {
    for seed in 1..=4 {
        verified(&check("ignored_stopped", 512, Some(seed)), &[("shutdown-skipped", 1)]);
    }
}
