//! `pinfold check`: programs in C with planted faults and their clean twins, QEMU, and this program.

use crate::common::{Ended, Folder, bytes, copy_program, pinfold};
use serde_json::Value;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Compiles a program of `tools/check/tests/c`.
fn program(name: &str) -> PathBuf {
    program_as(name, name, &["-g"])
}

/// Like [`program`], into another file, with options of the compiler.
fn program_as(name: &str, file: &str, options: &[&str]) -> PathBuf {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let folder = FOLDER.get_or_init(|| tempfile::tempdir().unwrap());
    let path = folder.path().join(file);
    let _one = ONE.lock().unwrap();
    if !path.exists() {
        let source = Path::new(env!("CARGO_MANIFEST_DIR"));
        let source = source.join(format!("../../tools/check/tests/c/{name}.c"));
        let mut cc = Command::new("cc");
        cc.args([
            "-O1",
            "-fno-inline",
            "-fno-optimize-sibling-calls",
            "-Wall",
            "-pthread",
            "-Wno-unused-function",
            "-o",
        ]);
        cc.arg(&path).arg(source).args(options);
        assert!(cc.status().unwrap().success());
    }
    path
}

/// Runs a program under check; returns the outcome and the report.
fn check(options: &[&str], program: &[&str]) -> (Ended, Value) {
    let folder = tempfile::tempdir().unwrap();
    let report = folder.path().join("report.json");
    let mut args = vec!["check", "--json", "--report", report.to_str().unwrap()];
    if !options.contains(&"--time-limit") {
        args.extend(["--time-limit", "500s"]);
    }
    args.extend(options);
    args.push("--");
    args.extend(program);
    let ended = pinfold(&args);
    let text = std::fs::read_to_string(&report).unwrap_or_else(|_| panic!("{ended:#?}"));
    let report = serde_json::from_str(&text).unwrap();
    (ended, report)
}

fn ids(report: &Value) -> Vec<String> {
    let counts = report["counts"].as_object().unwrap();
    counts.keys().cloned().collect()
}

/// The planted fault is reported, with nothing but its `consequences`; its clean twin is not. The
/// device has `options`.
fn planted_in(name: &str, options: &[&str], id: &str, consequences: &[&str]) {
    planted_as(name, options, id, id, consequences);
}

/// Like [`planted_in`], of a fault with another name than the finding; returns the finding.
fn planted_as(name: &str, options: &[&str], fault: &str, id: &str, consequences: &[&str]) -> Value {
    let faults = program(name);
    let faults = faults.to_str().unwrap();
    // A fault in flight is one only while the command is: not where the device, or the program, got
    // no processor for longer than the device is late. And a program that waits for ever does so
    // only when it has come to it.
    let is_late = options.iter().any(|option| option.contains("late-us="));
    let limits: &[&str] = match fault {
        "failure-ignored" | "still-masked" => &["20s", "60s", "180s"],
        _ if is_late => &["500s"; 3],
        _ => &["500s"],
    };
    let run = |limit| check(&[options, &["--time-limit", limit]].concat(), &[faults, fault]);
    let mut limits = limits.iter();
    let (mut ended, mut report) = run(limits.next().unwrap());
    while !ids(&report).iter().any(|found| found == id)
        && let Some(limit) = limits.next()
    {
        (ended, report) = run(limit);
    }
    let found = ids(&report);
    assert!(found.iter().any(|found| found == id), "{report:#}{ended:#?}");
    for other in found.iter().filter(|found| *found != id) {
        assert!(consequences.contains(&other.as_str()), "{report:#}");
    }
    let is_it = |finding: &&Value| finding["id"] == id;
    let finding = report["findings"].as_array().unwrap().iter().find(is_it).unwrap().clone();
    let worst = report["findings"].as_array().unwrap().iter().any(|f| f["severity"] == "error");
    let code = match (worst, &report["time_limit"]) {
        (true, _) => 3,
        (false, Value::Bool(true)) => 124,
        (false, _) => 0,
    };
    assert_eq!(ended.code, Some(code), "{ended:#?}");
    assert!(!finding["text"].as_str().unwrap().is_empty());

    let options: Vec<&str> = options.iter().copied().chain(["--fail-on", "note"]).collect();
    let (ended, report) = check(&options, &[faults, fault, "clean"]);
    assert_eq!((ended.code, ids(&report).len()), (Some(0), 0), "{report:#}{ended:#?}");
    finding
}

const PLAIN: &[&str] = &[];
/// A device that is late with everything, or slow to become ready: what a driver does too early is
/// too early on a busy machine, too.
const LATE: &[&str] = &["--knob", "late=1,late-us=20000"];
const SLOW: &[&str] = &["--knob", "ready-ms=20"];

/// A device that fails with its first command.
const FAILING: &[&str] = &["--knob", "cfs=1"];

macro_rules! planted {
    ($($name:ident $id:literal [$device:ident] [$($consequence:literal),*];)*) => {
        const PLANTED: &[&str] = &[$($id),*];

        $(#[test] fn $name() { planted_in("faults", $device, $id, &[$($consequence),*]); })*
    };
}

planted! {
    access_to_what_is_unmapped "dma-unmapped" [PLAIN] [];
    access_to_what_is_mapped_again "dma-remapped" [LATE] ["unmap-in-flight", "dma-unmapped"];
    unmap_while_a_command_uses_it "unmap-in-flight" [LATE] ["dma-unmapped"];
    access_to_memory_that_is_gone "memory-gone" [PLAIN] [];
    two_reads_into_the_same_bytes "overlapping-reads" [PLAIN] [];
    data_that_changes_in_flight "data-changed" [LATE] [];
    a_map_for_the_wrong_direction "dma-direction" [PLAIN] [];
    a_map_that_was_refused "map-refused-ignored" [PLAIN] [];
    an_unmap_of_a_part "unmap-part" [PLAIN] [];
    an_unmap_of_nothing "unmap-nothing" [PLAIN] [];
    nearly_all_mappings "entry-limit" [PLAIN] [];
    a_page_that_is_mapped_often "mapped-often" [PLAIN] [];
    mappings_that_are_left "maps-left" [PLAIN] [];
    a_doorbell_out_of_range "doorbell-value" [PLAIN] [];
    a_head_before_its_completion "cq-head-ahead" [PLAIN] [];
    a_tail_that_passes_the_head "sq-overrun" [PLAIN] [
        "completion-queue-full", "reset-in-flight", "shutdown-skipped"
    ];
    a_doorbell_of_no_queue "doorbell-queue" [PLAIN] [];
    a_full_completion_queue "completion-queue-full" [PLAIN] [];
    an_entry_that_changes "entry-changed" [LATE] [];
    an_identifier_in_flight_twice "command-id-twice" [PLAIN] [];
    a_queue_that_is_unmapped "queue-unmapped" [PLAIN] [];
    a_queue_beyond_the_granted "queue-limit" [PLAIN] [];
    a_completion_queue_deleted_first "queue-order" [PLAIN] [];
    a_prp_with_an_offset "prp" [PLAIN] [];
    an_sgl_where_there_are_none "sgl" [PLAIN] [];
    a_transfer_that_is_too_large "transfer-size" [PLAIN] [];
    blocks_out_of_range "lba-range" [PLAIN] [];
    a_reserved_field "command-field" [PLAIN] [];
    an_unknown_opcode "opcode" [PLAIN] [];
    an_unknown_namespace "namespace" [PLAIN] [];
    admin_queues_that_change "admin-queue-changed" [PLAIN] [];
    admin_queues_that_are_invalid "enable" [PLAIN] [];
    an_enable_that_does_not_wait "enable-early" [SLOW] [];
    bus_mastering_that_is_off "bus-master-off" [PLAIN] ["shutdown-skipped"];
    an_interrupt_without_an_eventfd "interrupt-lost" [PLAIN] [];
    a_reset_with_commands_in_flight "reset-in-flight" [LATE] ["overlapping-reads"];
    a_failure_that_is_ignored "failure-ignored" [FAILING] ["maps-left"];
    a_shutdown_that_is_skipped "shutdown-skipped" [PLAIN] [];
    a_request_that_is_not_covered "not-covered" [PLAIN] [];
}

#[test]
fn what_a_device_takes_prp2_for_is_said() {
    for (fault, words) in [
        // Its second entry is the last one of a page, and so the address of the next list.
        ("prp-cross", ["for a list of 3 entries, of which entry 1 is 0x0", "was ever mapped"]),
        // The second page, which the device may only write.
        ("prp-list", ["for a list of 2 entries", "is not mapped for it to be read"]),
        // The second page, whose contents are taken for entries.
        ("prp-page", ["for a list of 2 entries, of which entry 0 is 0x0", "was ever mapped"]),
        ("prp-second", ["PRP2 0x0 for the second page of 4608 bytes", "was ever mapped"]),
        ("prp-entry", ["for a list of 3 entries, of which entry 2 is 0x0", "was ever mapped"]),
        ("prp", ["for the second page of 8192 bytes", "not the address of a page"]),
    ] {
        let finding = planted_as("faults", PLAIN, fault, "prp", &[]);
        let text = finding["text"].as_str().unwrap();
        assert!(words.iter().all(|words| text.contains(words)), "{finding:#}");
        let detail = finding["details"][0].as_str().unwrap();
        assert!(
            detail.contains("PRP2 ") && detail.contains(" (a list of ")
                || detail.ends_with(" (the second page)"),
            "{finding:#}"
        );
    }
}

#[test]
fn a_finding_leads_to_the_mistake() {
    for (fault, id, words) in [
        // The address that the program has itself, and the map's.
        ("own-address", "dma-unmapped", "own address of what is mapped at 0x108000: "),
        ("own-prp2", "prp", "own address of what is mapped at 0x109000: "),
        (
            "short-queue",
            "dma-unmapped",
            "an entry of submission queue 2, which is in 0x108000 to 0x109fff",
        ),
        ("entry-sizes", "queue-limit", "while CC.IOSQES or CC.IOCQES was not the size"),
        ("entry-sizes", "queue-limit", "create completion queue 2 of 32 entries; "),
        // Not for the sizes of entries.
        ("queue-size", "queue-limit", "the controller refused a command: invalid queue size"),
        ("one-too-many", "queue-limit", "an entry of zeroes, which the driver has not written"),
        ("io-one-too-many", "queue-limit", "an entry of zeroes, which the driver has not written"),
        ("io-one-too-many", "queue-limit", "(QSIZE and AQA are 0-based)"),
        ("early-doorbell", "doorbell-queue", "the admin queues do when CSTS.RDY is 1"),
        ("head-not-rung", "completion-queue-full", "the entries before entry 0"),
        ("doorbell-deleted", "doorbell-queue", "submission queue 1 (0x1008) was written"),
        ("sq-before-cq", "queue-order", "create submission queue 2 of 32 entries; "),
    ] {
        let finding = planted_as("faults", PLAIN, fault, id, &[]);
        assert!(finding.to_string().contains(words), "{words}: {finding:#}");
    }
}

#[test]
fn a_number_that_is_one_too_large_is_named() {
    let nlb = "perhaps NLB (CDW12) has the number of blocks: it is 0-based, one less";
    let size = "perhaps AQA or QSIZE (CDW10) has the number of entries: both are 0-based, one less";
    // Of one block, or of an entry, more than there is: in the first finding.
    for (device, fault, id, words) in [
        (PLAIN, "prp-second", "prp", nlb),
        (PLAIN, "prp-entry", "prp", nlb),
        (PLAIN, "lba-one-more", "lba-range", nlb),
        (PLAIN, "transfer-end", "transfer-size", nlb),
        (PLAIN, "reads-adjacent", "overlapping-reads", nlb),
        (&["--knob", "sgl=1"], "sgl-short", "sgl", nlb),
        (PLAIN, "sq-one-more", "dma-unmapped", size),
        (PLAIN, "cq-one-more", "cq-head-ahead", size),
        (PLAIN, "queue-one-more", "queue-limit", size),
    ] {
        let finding = planted_as("faults", device, fault, id, &[]);
        assert!(finding["details"].to_string().contains(words), "{fault}: {finding:#}");
    }
    // Other numbers have other causes.
    for (fault, id) in [
        ("lba-range", "lba-range"),
        ("transfer-size", "transfer-size"),
        ("short-queue", "dma-unmapped"),
        ("cq-head-ahead", "cq-head-ahead"),
        ("overlapping-reads", "overlapping-reads"),
        ("aliased", "overlapping-reads"),
        ("dma-unmapped", "dma-unmapped"),
        ("prp-list", "prp"),
        ("prp", "prp"),
    ] {
        let finding = planted_as("faults", PLAIN, fault, id, &[]);
        assert!(!finding.to_string().contains("perhaps"), "{finding:#}");
    }
}

/// The message without an eventfd, and of the clean twin: two that arrive, and are replaced and disabled.
#[test]
fn a_message_without_an_eventfd() {
    let finding = planted_as("faults", PLAIN, "message-lost", "interrupt-lost", &[]);
    assert!(finding["text"].as_str().unwrap().contains("interrupt 1 is raised"), "{finding:#}");
}

#[test]
fn an_interrupt_that_stays_masked() {
    let others = ["maps-left", "shutdown-skipped"];
    let finding = planted_as("faults", PLAIN, "still-masked", "interrupt-lost", &others);
    assert!(
        finding["text"].as_str().unwrap().contains("VFIO_IRQ_SET_ACTION_UNMASK"),
        "{finding:#}"
    );
}

#[test]
fn requests_that_are_not_covered_are_named() {
    for (fault, request) in [
        ("not-covered", "request 0x3bff of a device"),
        ("not-covered-feature", "request 0x3b75 of a device"),
        ("not-covered-group", "request 0x3bff of a group"),
        ("not-covered-container", "request 0x3bff of a container"),
        ("not-covered-iommufd", "request 0x3bff of an iommufd"),
    ] {
        let finding = planted_as("faults", PLAIN, fault, "not-covered", &[]);
        assert_eq!(finding["text"], format!("not covered: {request}"));
    }
}

#[test]
fn bus_mastering_that_is_switched_off_with_commands_in_flight() {
    // Longer than any pause between the doorbell and the call.
    let late = ["--knob", "late=1,late-us=600000"];
    let finding = planted_as("faults", &late, "bus-master-in-flight", "bus-master-off", &[]);
    let text = "bus mastering was switched off with 1 command in flight";
    assert!(finding["text"].as_str().unwrap().ends_with(text), "{finding:#}");
}

#[test]
fn two_reads_into_a_page_that_is_mapped_twice() {
    let finding = planted_as("faults", PLAIN, "aliased", "overlapping-reads", &[]);
    let text = "0x108000 to 0x108fff and 0x200000000 to 0x200000fff are the same memory";
    assert!(finding["text"].as_str().unwrap().contains(text), "{finding:#}");
}

/// A device that is late with admin commands, too, as only a hostile one is; else it behaves well.
const LATE_ADMIN: &[&str] = &[
    "--hostile",
    "1",
    "--knob",
    "mqes=1023,dstrd=0,mpsmin=0,mdts=8,queues=16,block=512,ready-ms=1,not-ready-ms=0,aborts=1,events=0,\
     spurious=0,late=1,late-us=600000,reorder=0,retry=0,scatter=0,cfs=0,remove=0,burst-us=0",
];

#[test]
fn data_of_admin_commands_is_in_flight() {
    let finding =
        planted_as("faults", LATE_ADMIN, "log-unmapped", "unmap-in-flight", &["dma-unmapped"]);
    let text =
        "0x108000 to 0x108fff is unmapped while a command in flight uses 0x108000 to 0x1081ff";
    assert!(finding["text"].as_str().unwrap().ends_with(text), "{finding:#}");
    assert!(finding["details"][0].as_str().unwrap().contains("get log page 0x2; "), "{finding:#}");
    planted_as("faults", LATE_ADMIN, "feature-changed", "data-changed", &[]);
}

#[test]
fn data_in_the_second_segment_of_an_sgl_is_in_flight() {
    let late = ["--knob", "sgl=1,late=1,late-us=600000"];
    let finding = planted_as("faults", &late, "sgl-unmapped", "unmap-in-flight", &["dma-unmapped"]);
    let text = "uses 0x109000 to 0x1097ff";
    assert!(finding["text"].as_str().unwrap().ends_with(text), "{finding:#}");
}

#[test]
fn a_head_that_is_rung_twice() {
    let finding = planted_as("faults", PLAIN, "cq-double", "cq-head-ahead", &[]);
    assert!(finding["text"].as_str().unwrap().contains("comes to entry 1 of 32"), "{finding:#}");
}

#[test]
fn the_doorbells_before_an_end_count() {
    // Longer than any pause between the doorbells and the end.
    let late = ["--knob", "late=1,late-us=10000000"];
    for (driver, device, fault, how, others) in [
        ("faults", "--nvme", "disable-in-flight", "disabled with 4", &["shutdown-skipped"][..]),
        ("faults", "--nvme", "reset-at-once", "reset with 4", &[]),
        ("faults", "--nvme", "close-in-flight", "closed with 4", &["shutdown-skipped"]),
        ("faults", "--nvme", "exit-in-flight", "closed with 4", &["shutdown-skipped", "maps-left"]),
        ("virtio", "--virtio-blk", "disable-in-flight", "disabled with 3", &[]),
        ("virtio", "--virtio-blk", "reset-at-once", "reset with 3", &[]),
        ("virtio", "--virtio-blk", "close-in-flight", "closed with 3", &[]),
    ] {
        let program = program(driver);
        let program = program.to_str().unwrap();
        let device = [device, "soft:4M"];
        let (_, report) = check(&[device, late].concat(), &[program, fault]);
        let mut expected = [&["reset-in-flight"], others].concat();
        expected.sort_unstable();
        assert_eq!(ids(&report), expected, "{fault}: {report:#}");
        let is_it = |finding: &&Value| finding["id"] == "reset-in-flight";
        let finding = report["findings"].as_array().unwrap().iter().find(is_it).unwrap();
        let text = format!("the device was {how} commands in flight");
        assert!(finding["text"].as_str().unwrap().ends_with(&text), "{finding:#}");
        // The clean twin.
        let options = [&device[..], &["--fail-on", "note"]].concat();
        let (ended, report) = check(&options, &[program, fault, "clean"]);
        assert_eq!((ended.code, ids(&report).len()), (Some(0), 0), "{fault}: {report:#}{ended:#?}");
    }
}

#[test]
fn completions_without_a_place_are_in_flight() {
    let others = ["completion-queue-full", "shutdown-skipped"];
    let finding = planted_as("faults", PLAIN, "full-at-disable", "reset-in-flight", &others);
    let text = finding["text"].as_str().unwrap();
    assert!(text.ends_with("disabled with 3 commands in flight"), "{finding:#}");
}

#[test]
fn a_list_that_changes_in_flight() {
    let finding = planted_as("faults", LATE, "list-changed", "data-changed", &[]);
    assert!(finding["text"].as_str().unwrap().contains("the list that says where"), "{finding:#}");
    planted_as(
        "faults",
        LATE,
        "list-unmapped",
        "unmap-in-flight",
        &["dma-unmapped", "data-changed"],
    );
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_32_bit_caller() {
    planted_in("faults", &[], "foreign-caller", &[]);
}

// The second function: a virtio disk.

const DISK: &[&str] = &["--virtio-blk", "soft:4M", "--knob", "late=0"];
const LATE_DISK: &[&str] = &["--virtio-blk", "soft:4M", "--knob", "late=1,late-us=600000"];

macro_rules! planted_on_a_disk {
    ($($name:ident $id:literal [$device:ident] [$($consequence:literal),*];)*) => {
        const PLANTED_ON_A_DISK: &[&str] = &[$($id),*];

        $(#[test] fn $name() { planted_in("virtio", $device, $id, &[$($consequence),*]); })*
    };
}

planted_on_a_disk! {
    a_disk_accesses_what_is_unmapped "dma-unmapped" [DISK] [];
    a_disk_accesses_what_is_mapped_again "dma-remapped" [LATE_DISK] ["unmap-in-flight", "dma-unmapped"];
    a_request_of_a_disk_is_unmapped "unmap-in-flight" [LATE_DISK] ["dma-unmapped"];
    a_disk_accesses_memory_that_is_gone "memory-gone" [DISK] [];
    a_disk_reads_twice_into_the_same_bytes "overlapping-reads" [LATE_DISK] [];
    data_for_a_disk_that_changes "data-changed" [LATE_DISK] [];
    a_descriptor_that_changes "entry-changed" [LATE_DISK] [];
    a_disk_reads_into_a_map_to_read "dma-direction" [DISK] [];
    a_descriptor_that_is_available_twice "command-id-twice" [LATE_DISK] ["overlapping-reads"];
    a_notification_of_no_queue "doorbell-queue" [DISK] [];
    a_virtqueue_that_is_unmapped "queue-unmapped" [DISK] [];
    a_virtqueue_of_a_wrong_size "queue-limit" [DISK] [];
    a_virtqueue_that_is_enabled_early "queue-order" [DISK] [];
    a_chain_that_leaves_its_table "virtqueue" [DISK] [];
    features_that_are_missing "features" [DISK] [];
    sectors_out_of_range "lba-range" [DISK] [];
    a_part_of_a_sector "command-field" [DISK] [];
    a_request_that_is_not_offered "opcode" [DISK] [];
    a_disk_without_bus_mastering "bus-master-off" [DISK] [];
    a_disk_without_its_eventfd "interrupt-lost" [DISK] [];
    a_disk_that_is_reset_at_work "reset-in-flight" [LATE_DISK] [];
}

#[test]
fn a_driver_in_c_uses_a_disk() {
    let disk = program("virtio");
    let disk = disk.to_str().unwrap();
    for (options, mode) in [
        (&["--virtio-blk", "soft:4M"][..], "plain"),
        (&["--virtio-blk", "soft:4M", "--knob", "scatter=1,spurious=1,late=2,late-us=50"], "plain"),
        (DISK, "pin"),
    ] {
        let options: Vec<&str> = options.iter().copied().chain(["--fail-on", "note"]).collect();
        let (ended, report) = check(&options, &[disk, mode]);
        assert_eq!((ended.code, ids(&report).len()), (Some(0), 0), "{report:#}{ended:#?}");
        assert!(mode != "plain" || report["commands"] == 121, "{report:#}");
        let knobs = report["devices"][0]["knobs"].as_array().unwrap();
        assert_eq!(knobs.len(), 7, "{report:#}");
    }
}

#[test]
fn every_finding_has_a_planted_fault() {
    let page = include_str!("../../../../docs/check.md");
    for kind in pinfold_check::KINDS {
        let id = kind.id;
        let is_planted = PLANTED.contains(&id) || PLANTED_ON_A_DISK.contains(&id);
        // a_32_bit_caller
        assert!(is_planted || id == "foreign-caller", "{id}");
        assert!(page.contains(&format!("| `{id}` | {} |", kind.severity)), "{id}");
    }
}

#[test]
fn memory_that_goes_is_found_at_the_call() {
    let faults = program("faults");
    let faults = faults.to_str().unwrap();
    let watched: &[&str] = &["--watch-memory", "--fail-on", "note"];
    for call in ["munmap", "mremap", "madvise", "fallocate", "ftruncate", "mmap"] {
        let (ended, report) = check(watched, &[faults, call]);
        assert_eq!((ended.code, ids(&report)), (Some(3), vec!["memory-gone".to_owned()]), "{call}");
        let finding = &report["findings"][0];
        assert!(finding["text"].as_str().unwrap().starts_with(call), "{finding:#}");
        // Both calls are named.
        let details = finding["details"].to_string();
        let (goes, maps) = (details.find(&format!("do_{call}+")), details.find("map_at+"));
        assert!(goes.is_some() && goes < maps, "{finding:#}");
        // The clean twin, and without the option.
        for (options, words) in [(watched, &[faults, call, "clean"][..]), (&[], &[faults, call])] {
            let (ended, report) = check(options, words);
            assert_eq!((ended.code, ids(&report).len()), (Some(0), 0), "{call} {report:#}");
        }
    }
    let (ended, report) = check(watched, &[faults, "beside"]);
    assert_eq!((ended.code, ids(&report).len()), (Some(0), 0), "{report:#}");
}

#[test]
fn a_finding_names_the_code_that_made_the_call() {
    let faults = program("faults");
    let (_, report) = check(&[], &[faults.to_str().unwrap(), "unmap-part"]);
    let details = report["findings"][0]["details"].to_string();
    let (unmap, caller) = (details.find("unmap_at+"), details.find(", called by unmap_part+"));
    assert!(unmap.is_some() && unmap < caller, "{report:#}");
}

#[test]
fn code_without_symbols_or_unwind_data_has_its_address() {
    let place = |file: &str, options: &[&str]| {
        let faults = program_as("faults", file, options);
        let (_, report) = check(&[], &[faults.to_str().unwrap(), "unmap-part"]);
        assert_eq!(ids(&report), ["unmap-part"], "{report:#}");
        report["findings"][0]["details"][0].as_str().unwrap().to_owned()
    };
    // It is unwound all the same.
    let stripped = place("stripped", &["-s"]);
    assert_eq!(stripped.matches("stripped+0x").count(), 3, "{stripped}");
    assert_eq!(stripped.matches(", called by ").count(), 2, "{stripped}");
    // Through the system's library, and not further.
    let pc = place("pc", &["-fno-asynchronous-unwind-tables"]);
    assert!(pc.contains("unmap_at+0x") && !pc.contains("called by"), "{pc}");
}

#[test]
fn memory_that_is_gone_leads_to_the_option() {
    for (options, is_said) in [(&[][..], true), (&["--watch-memory"], false)] {
        let finding = planted_as("faults", options, "memory-gone", "memory-gone", &[]);
        assert_eq!(
            finding["details"].to_string().contains("--watch-memory"),
            is_said,
            "{finding:#}"
        );
    }
}

#[test]
fn a_report_that_cannot_be_written_is_refused_before_the_run() {
    let folder = Folder::new();
    let (ran, known, new) = (folder.arg("ran"), folder.arg("known"), folder.arg("new"));
    std::fs::write(&known, "an older one").unwrap();
    let report = |file: &str, program: &[&str]| {
        let ended = pinfold(&[&["check", "--report", file, "--"], program].concat());
        (ended, Path::new(&ran).exists())
    };
    for (file, reason) in [
        (folder.arg("none/report"), "No such file"),
        (folder.arg("."), "Is a directory"),
        (format!("{known}/report"), "Not a directory"),
    ] {
        let (ended, has_run) = report(&file, &["touch", &ran]);
        ended.failed(125, &["cannot write the report to", &file, reason]);
        assert!(!has_run, "{file}");
    }
    // What does not start changes no file, and leaves none.
    for file in [&known, &new] {
        report(file, &["/nonexistent"]).0.failed(125, &["/nonexistent"]);
    }
    assert_eq!(std::fs::read_to_string(&known).unwrap(), "an older one");
    assert!(!Path::new(&new).exists());
    for file in [&known, &new] {
        let (ended, has_run) = report(file, &["touch", &ran]);
        assert_eq!((ended.code, has_run), (Some(0), true), "{ended:#?}");
        assert!(std::fs::read_to_string(file).unwrap().starts_with("check: "));
    }
}

#[test]
fn options_that_say_nothing_are_refused() {
    for (options, words) in [
        (&["--knob", "mqes=1,mqes=2"][..], &["--knob mqes=1", "--knob mqes=2", "once"][..]),
        (&["--knob", "late=3", "--knob", "mqes=2,late=3"], &["--knob late=3"]),
        (&["--hostile", "abc"], &["abc", "--hostile", "from 0 to 18446744073709551615"]),
        (&["--hostile", "18446744073709551616"], &["from 0 to 18446744073709551615"]),
        (&["--knob", "mqes"], &["mqes", "NAME=VALUE"]),
        (&["--knob", "mqes=x"], &["mqes=x", "number"]),
        (&["--time-limit", "abc"], &["abc", "--time-limit"]),
        (&["--iova-bits", "40"], &["40", "39 or 48"]),
        (&["--fail-on", "abc"], &["abc", "error, warning, note"]),
        (&["--nvme", "0000:01:00.0/x=soft:1M"], &["/x", "group", "number"]),
    ] {
        let args = [&["check"], options, &["--", "true"]].concat();
        pinfold(&args).failed(2, words);
    }
}

#[test]
fn suppressed_findings_are_not_reported() {
    let faults = program("faults");
    let faults = faults.to_str().unwrap();
    let folder = Folder::new();
    let file = folder.arg("suppress");
    std::fs::write(&file, "# known\nopcode # an old driver\n\n").unwrap();
    let (ended, report) = check(&["--suppress", &file], &[faults, "opcode"]);
    assert_eq!((ended.code, ids(&report).len()), (Some(0), 0), "{report:#}");
    assert_eq!(report["suppressed"], 1);
    let text = pinfold(&["check", "--suppress", &file, "--", faults, "opcode"]);
    assert!(text.err.contains("; 0 errors, 0 warnings, 0 notes, 1 suppressed\n"), "{text:#?}");
    let (_, report) = check(&[], &[faults, "opcode", "clean"]);
    assert_eq!(report["suppressed"], 0);
    std::fs::write(&file, "opcodes\n").unwrap();
    pinfold(&["check", "--suppress", &file, "--", "true"])
        .failed(125, &["opcodes", "docs/check.md"]);
}

#[test]
fn the_exit_code_is_the_programs() {
    let code = |words: &[&str]| check(&[], words).0.code;
    assert_eq!(code(&["true"]), Some(0));
    assert_eq!(code(&["sh", "-c", "exit 7"]), Some(7));
    assert_eq!(code(&["sh", "-c", "kill -9 $$"]), Some(137));
    pinfold(&["check", "--", "/nonexistent"]).failed(125, &["/nonexistent", "No such file"]);
    let slow = pinfold(&["check", "--time-limit", "1s", "--", "sleep", "1000"]);
    assert_eq!(slow.code, Some(124), "{slow:#?}");
    assert!(slow.err.contains("time limit"), "{slow:#?}");
}

#[test]
fn standard_output_is_the_programs() {
    let ended = pinfold(&["check", "--", "echo", "hello"]);
    assert_eq!(ended.out, "hello\n");
    assert!(ended.err.starts_with("check: 0 commands; 0 errors"), "{ended:#?}");
    assert!(ended.err.contains("no device was used; there is 0000:01:00.0"), "{ended:#?}");
    // An argument before the program that begins with a hyphen is an option.
    let wrong = pinfold(&["check", "--bogus", "--", "true"]);
    assert_eq!(wrong.code, Some(2), "{wrong:#?}");
    pinfold(&["check", "test", "-e", "/"]).ok();
}

#[test]
fn the_severity_that_fails_is_chosen() {
    let faults = program("faults");
    let faults = faults.to_str().unwrap();
    // One is a warning, and one a note.
    for (fault, limit, code) in [
        ("unmap-part", "error", 0),
        ("unmap-part", "warning", 3),
        ("unmap-part", "note", 3),
        ("maps-left", "warning", 0),
        ("maps-left", "note", 3),
        ("opcode", "error", 3),
    ] {
        let (ended, report) = check(&["--fail-on", limit], &[faults, fault]);
        assert_eq!(ended.code, Some(code), "{fault}, {limit}: {report:#}{ended:#?}");
    }
}

// Machines that refuse it.

/// Runs check where a system call fails with an error number, with the words of `before` in front;
/// returns what it prints.
fn refused(before: &[&str], call: &str, errno: i32) -> String {
    let folder = tempfile::tempdir().unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), mode).unwrap();
    let (own, refuse) = (folder.path().join("pinfold"), folder.path().join("refuse"));
    copy_program(env!("CARGO_BIN_EXE_pinfold"), &own);
    copy_program(program("refuse"), &refuse);
    let (first, rest) = before.split_first().unwrap();
    let mut command = Command::new(first);
    command.args(rest).arg(&refuse).args([call, &errno.to_string()]).arg(&own);
    let ended = command.args(["check", "--", "true"]).output().unwrap();
    let err = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(125), "{call}, {errno}: {err}");
    err
}

#[test]
fn a_refusal_is_named() {
    let filter = "cannot install seccomp's notification";
    let namespace =
        if rustix::process::geteuid().is_root() { "a mount namespace" } else { "a user namespace" };
    for (call, errno, messages) in [
        // EINVAL: before Linux 5.19 a flag is not known.
        ("seccomp", 22, [filter, "it needs Linux 5.19"]),
        // EBUSY, EPERM.
        ("seccomp", 16, [filter, "another program already receives"]),
        ("seccomp", 1, [filter, "the container's seccomp profile"]),
        ("unshare", 1, [namespace, "--security-opt seccomp=unconfined"]),
        // ENOSPC, EACCES.
        ("unshare", 28, [namespace, "user.max_user_namespaces"]),
        ("mount", 13, ["devices in /dev and /sys", "a security module"]),
    ] {
        let err = refused(&["env"], call, errno);
        assert!(messages.iter().all(|message| err.contains(message)), "{call}, {errno}: {err}");
    }
}

#[test]
fn a_refused_user_namespace_is_named() {
    if rustix::process::geteuid().is_root() {
        let user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
        let err = refused(&user, "unshare", 1);
        assert!(err.contains("cannot give the program a user namespace: "), "{err}");
    }
}

#[test]
fn check_under_check_says_why_not() {
    let own = env!("CARGO_BIN_EXE_pinfold");
    let (ended, report) = check(&[], &[own, "check", "--", "true"]);
    assert_eq!(report["exit_code"], 125, "{report:#}{ended:#?}");
    assert!(ended.err.contains("another program already receives"), "{ended:#?}");
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let run = |options: &[&str], words: &[&str]| {
        let mut all = vec!["check"];
        all.extend(options);
        all.extend(["--", "true"]);
        pinfold(&all).failed(125, words);
    };
    run(
        &["--nvme", "soft:/nonexistent/a"],
        &["cannot open the image soft:/nonexistent/a", "No such"],
    );
    run(&["--suppress", "/nonexistent/b"], &["cannot read the suppressions in /nonexistent/b"]);
    // The findings are not lost: they are printed instead.
    let ended = pinfold(&["check", "--report", "/dev/full", "--", "true"]);
    assert_eq!(ended.code, Some(125), "{ended:#?}");
    for part in ["check: 0 commands", "cannot write the report to /dev/full"] {
        assert!(ended.err.contains(part), "{part}: {ended:#?}");
    }
}

#[test]
fn buses_have_255_numbers() {
    let devices = |count: usize| {
        let mut all = vec!["check"];
        all.extend(["--nvme", "soft:1M"].repeat(count));
        all.extend(["--nvme", "0001:01:00.0/9999=soft:1M", "--", "true"]);
        pinfold(&all)
    };
    devices(256).failed(2, &["device 256 has no address", "1 to 255"]);
}

#[test]
fn the_help_names_all_exit_codes_and_values() {
    let help = pinfold(&["check", "--help"]).out;
    let flat = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in ["\n  2    the command line", "\n  3    ", "\n  124  ", "\n  125  ", "\n  130  "] {
        assert!(help.contains(words), "{words}: {help}");
    }
    for words in ["39 or 48", "# begins a comment", "--knob <NAME=VALUE>"] {
        assert!(flat.contains(words), "{words}: {help}");
    }
}

// QEMU's own driver (block/nvme.c).

/// The identifiers of what QEMU's driver does wrong: it unmaps the queues of an enabled controller.
const QEMU: [&str; 3] = ["queue-unmapped", "maps-left", "shutdown-skipped"];

#[test]
fn qemu_reads_what_the_medium_has() {
    let folder = Folder::new();
    let (image, copy) = (folder.file("image", &bytes(20 << 20)), folder.arg("copy"));
    let device = format!("soft:{image}");
    let words = ["qemu-img", "convert", "-O", "raw", "nvme://0000:01:00.0/1", &copy];
    let (ended, report) = check(&["--nvme", &device], &words);
    assert!(ids(&report).iter().all(|id| QEMU.contains(&id.as_str())), "{report:#}{ended:#?}");
    assert_eq!(report["exit_code"], 0, "{ended:#?}");
    assert!(std::fs::read(&image).unwrap() == std::fs::read(&copy).unwrap());
}

#[test]
fn qemu_verifies_what_it_wrote() {
    let words = [
        "qemu-io",
        "-f",
        "raw",
        "-c",
        "write -P 0x5a 1M 2M",
        "-c",
        "read -P 0x5a 1M 2M",
        "-c",
        "discard 0 1M",
        "-c",
        "read -P 0 0 1M",
        "-c",
        "flush",
        "nvme://0000:01:00.0/1",
    ];
    let (ended, report) = check(&[], &words);
    assert!(ids(&report).iter().all(|id| QEMU.contains(&id.as_str())), "{report:#}{ended:#?}");
    assert_eq!(report["exit_code"], 0, "{ended:#?}");
    assert!(!ended.out.contains("verification failed"), "{ended:#?}");
}

// This program: its backends and its driver.

fn copies(options: &[&str], depth: &str) {
    let folder = Folder::new();
    let (source, image) =
        (folder.file("source", &bytes(5 << 20)), folder.sparse("image", 16 << 20));
    let device = format!("soft:{image}");
    let mut all = vec!["--nvme", device.as_str(), "--fail-on", "warning"];
    all.extend(options);
    let own = env!("CARGO_BIN_EXE_pinfold");
    let target = "vfio:0000:01:00.0";
    let words = [own, "copy", "--force", "--verify", "--iodepth", depth, &source, target];
    let (ended, report) = check(&all, &words);
    assert_eq!(ended.code, Some(0), "{report:#}{ended:#?}");
    assert!(report["commands"].as_u64().unwrap() > 10, "{report:#}");
    let written = std::fs::read(&image).unwrap();
    assert!(written.starts_with(&std::fs::read(&source).unwrap()));
}

#[test]
fn this_program_copies_through_iommufd() {
    copies(&[], "16");
}

#[test]
fn this_program_copies_through_type_1() {
    copies(&["--type1-only"], "16");
}

/// A device that does not fail, is not removed, and has pages of 4 KiB, whatever the seed decides.
const SURVIVABLE: &str = "cfs=0,remove=0,mpsmin=0";

#[test]
fn this_program_copies_to_hostile_devices() {
    // A queue may have two entries, of which one is used.
    for seed in 0..8 {
        copies(&["--hostile", &seed.to_string(), "--knob", SURVIVABLE], "1");
    }
}

#[test]
fn qemu_ends_in_time_with_hostile_devices() {
    for seed in 0..6 {
        let seed = seed.to_string();
        let words = [
            "qemu-io",
            "-f",
            "raw",
            "-c",
            "write -P 0x5a 1M 1M",
            "-c",
            "read -P 0x5a 1M 1M",
            "nvme://0000:01:00.0/1",
        ];
        let (ended, report) = check(&["--hostile", &seed, "--knob", SURVIVABLE], &words);
        // Right bytes, a clean error, or a finding: QEMU takes a queue of 128 entries whatever
        // CAP.MQES is, and rings the wrong doorbells where CAP.DSTRD is not 0.
        let is_clean = report["exit_code"] == 0 || ended.code == Some(3);
        let is_wrong =
            ended.out.contains("verification failed") && !ended.out.contains("write failed");
        assert!(is_clean && !is_wrong, "{report:#}{ended:#?}");
    }
}

// Hostile devices by name.

/// Copies with this program to a device with `knobs`, and compares; returns the report.
fn copies_with(knobs: &str) -> Value {
    let folder = Folder::new();
    let (source, image) = (folder.file("source", &bytes(1 << 20)), folder.sparse("image", 4 << 20));
    let device = format!("soft:{image}");
    let own = env!("CARGO_BIN_EXE_pinfold");
    let target = "vfio:0000:01:00.0";
    let words = [own, "copy", "--force", "--verify", "--iodepth", "1", &source, target];
    let options = ["--nvme", device.as_str(), "--fail-on", "warning", "--knob", knobs];
    let (ended, report) = check(&options, &words);
    assert_eq!(ended.code, Some(0), "{knobs}: {report:#}{ended:#?}");
    let written = std::fs::read(&image).unwrap();
    assert!(written.starts_with(&std::fs::read(&source).unwrap()), "{knobs}");
    let set = report["devices"][0]["knobs"].as_array().unwrap();
    assert!(knobs.split(',').all(|knob| set.iter().any(|own| own == knob)), "{report:#}");
    report
}

#[test]
fn this_program_copies_whatever_the_knobs() {
    let plain = copies_with("late=0")["commands"].as_u64().unwrap();
    for knobs in ["mqes=1,dstrd=3", "sgl=1", "sgl=2,mdts=0", "queues=3,cache=0,aborts=0,acl=0"] {
        copies_with(knobs);
    }
    let commands = |knobs: &str| copies_with(knobs)["commands"].as_u64().unwrap();
    // Each takes effect: smaller transfers, blocks of 4 KiB, commands that are sent again.
    assert!(commands("mdts=1,late=0") > plain + 200);
    assert!(commands("block=4096,late=0") <= plain);
    assert!(commands("retry=4,crd=1,crdt1=1,late=0,mdts=5") > commands("late=0,mdts=5") + 2);
    copies_with("not-ready-ms=30,crdt1=1");
    copies_with("spurious=1,events=1,aerl=0,scatter=1,reorder=2,late=2,late-us=50");
    copies_with("burst-us=200,late=0");
    let start = std::time::Instant::now();
    copies_with("to=4,ready-ms=1700");
    assert!(start.elapsed().as_millis() >= 1700);
}

/// This program fails on a device with `knobs`, with `messages`, and without a finding: it may leave
/// mapped what a device that is gone may still reach.
fn fails_with(knobs: &str, messages: &[&str]) {
    let folder = Folder::new();
    let source = folder.file("source", &bytes(1 << 20));
    let own = env!("CARGO_BIN_EXE_pinfold");
    let words = [own, "copy", "--force", &source, "vfio:0000:01:00.0"];
    let options = ["--nvme", "soft:4M", "--fail-on", "warning", "--knob", knobs];
    let (ended, report) = check(&options, &words);
    assert_eq!(ended.code, Some(1), "{report:#}{ended:#?}");
    assert!(ids(&report).iter().all(|id| id == "maps-left"), "{report:#}");
    for message in messages {
        assert!(ended.err.contains(message), "{message}: {ended:#?}");
    }
}

#[test]
fn a_driver_sees_the_knobs() {
    let faults = program("faults");
    let faults = faults.to_str().unwrap();
    let plain = "mqes=1023 to=20 dstrd=0 mpsmin=0 mdts=8 crdt1=0 crdt2=0 crdt3=0 acl=3 aerl=3 cache=1 \
                 sgl=0 queues=16 \n";
    for knobs in [
        "",
        "mqes=1,dstrd=3,queues=3",
        "mqes=65535,dstrd=1,queues=255",
        "mpsmin=4,mdts=0,sgl=1",
        "mpsmin=1,mdts=20,sgl=2,cache=0",
        "acl=0,aerl=255,to=255,queues=1",
        "acl=255,aerl=0,crdt1=1,crdt2=65535,crdt3=3",
    ] {
        let options = ["--fail-on", "note", "--knob", knobs];
        let options = if knobs.is_empty() { &options[..2] } else { &options };
        let (ended, report) = check(options, &[faults, "show", "clean"]);
        assert_eq!((ended.code, ids(&report).len()), (Some(0), 0), "{report:#}{ended:#?}");
        let mut expected: Vec<String> = plain.split(' ').map(str::to_owned).collect();
        for knob in knobs.split(',').filter(|knob| !knob.is_empty()) {
            let name = &knob[..=knob.find('=').unwrap()];
            let seen = expected.iter_mut().find(|word| word.starts_with(name)).unwrap();
            knob.clone_into(seen);
        }
        assert_eq!(ended.out.split(' ').collect::<Vec<_>>(), expected, "{knobs}");
    }
}

#[test]
fn a_device_that_fails_ends_this_program() {
    fails_with("mdts=1,cfs=3", &["CSTS.CFS"]);
}

#[test]
fn a_device_that_is_removed_ends_this_program() {
    fails_with("mdts=1,remove=3", &["the controller is gone"]);
}

/// A program is right to end with what is in flight on a device that has failed or is gone.
fn ends_with(mode: &str, knob: &str) {
    let options = ["--knob", knob, "--fail-on", "note"];
    let report = attacked(&options, mode, Some(0));
    assert!(ids(&report).is_empty(), "{report:#}");
}

#[test]
fn a_device_that_has_failed_is_reset_without_a_finding() {
    ends_with("failed", "cfs=1");
}

#[test]
fn a_device_that_is_removed_is_left_without_a_finding() {
    ends_with("removed", "remove=1");
}

#[test]
fn pages_that_this_program_does_not_know() {
    fails_with("mpsmin=1", &["8192 bytes (CAP.MPSMIN)"]);
}

#[test]
fn a_report_says_what_became_of_the_device() {
    let attack = program("attack");
    let attack = attack.to_str().unwrap();
    let device = "check: the device 0000:01:00.0";
    for (mode, knob, line) in [
        ("failed", "cfs=1", format!("{device} failed (cfs=1)\n")),
        ("removed", "remove=1", format!("{device} was removed (remove=1)\n")),
    ] {
        let ended = pinfold(&["check", "--knob", knob, "--", attack, mode]);
        assert_eq!(ended.err.matches(device).count(), 1, "{ended:#?}");
        assert!(ended.err.contains(&line), "{ended:#?}");
        let (_, report) = check(&["--knob", knob], &[attack, mode]);
        let fate = ["failed", "removed"].map(|fate| report["devices"][0][fate].clone());
        assert_eq!(fate, [mode == "failed", mode == "removed"], "{report:#}");
    }
    let faults = program("faults");
    let ended = pinfold(&["check", "--", faults.to_str().unwrap(), "opcode"]);
    assert!(!ended.err.contains(device), "{ended:#?}");
}

#[test]
fn a_report_says_what_it_does_not_print() {
    let faults = program("faults");
    let faults = faults.to_str().unwrap();
    let ended = pinfold(&["check", "--", faults, "repeated"]);
    assert_eq!(ended.err.matches("error dma-unmapped: ").count(), 3, "{ended:#?}");
    assert_eq!(ended.err.matches("found 2 times, this is the first").count(), 1, "{ended:#?}");
    for line in [
        "; 7 errors, 0 warnings, 0 notes\n",
        "check: not printed, as three of the kind are: 2 dma-unmapped\n",
    ] {
        assert!(ended.err.contains(line), "{ended:#?}");
    }
    let ended = pinfold(&["check", "--", faults, "maps-left"]);
    for line in [" with 1 mapping in it\n", "0 errors, 0 warnings, 1 note\n"] {
        assert!(ended.err.contains(line), "{ended:#?}");
    }
    assert!(!ended.err.contains("not printed") && !ended.err.contains("times"), "{ended:#?}");
}

#[test]
fn a_report_says_how_to_make_the_device_again() {
    let seeded = pinfold(&["check", "--hostile", "42", "--knob", "mqes=5,dstrd=1", "--", "true"]);
    for (options, seed) in [(&["--hostile", "42"][..], Value::from(42)), (&[], Value::Null)] {
        assert_eq!(check(options, &["true"]).1["seed"], seed);
    }
    let text = &seeded.err;
    assert!(text.contains("check: --hostile 42 --knob mqes=5 --knob dstrd=1\n"), "{text}");
    assert!(text.contains("0000:01:00.0: mqes=5 dstrd=1 mpsmin="), "{text}");
    // Every word after the address is a knob, and all of them together the same device.
    let line = text.lines().find(|line| line.contains("0000:01:00.0: ")).unwrap();
    let knobs = line.split_once(": ").unwrap().1;
    let named = pinfold(&["check", "--knob", &knobs.replace(' ', ","), "--", "true"]);
    assert!(named.err.lines().any(|own| own == line), "{line}\n{named:#?}");
    let plain = pinfold(&["check", "--", "true"]);
    assert!(!plain.err.contains("mqes"), "{plain:#?}");
    pinfold(&["check", "--knob", "mqe=1", "--", "true"]).failed(2, &["mqe", "mqes, dstrd"]);
    pinfold(&["check", "--knob", "dstrd=4", "--", "true"]).failed(2, &["0 to 3"]);
    pinfold(&["check", "--knob", "block=1024", "--", "true"]).failed(125, &["512 and 4096"]);
}

// The kernel's answers, which contrib/check/kernel records in the virtual machine.

fn answers(options: &[&str], interface: &str, kernel: &str) {
    let calls = program("calls");
    let (ended, report) = check(options, &[calls.to_str().unwrap(), interface]);
    let differing: Vec<_> =
        ended.out.lines().zip(kernel.lines()).filter(|(own, kernel)| own != kernel).collect();
    assert!(differing.is_empty() && ended.out == kernel, "{differing:#?} {report:#}{ended:#?}");
}

#[test]
fn type_1_is_answered_as_by_the_kernel() {
    let kernel = include_str!("../../../../tools/check/tests/kernel/type1.txt");
    answers(&["--type1-only"], "type1", kernel);
}

#[test]
fn messages_are_answered_as_by_the_kernel() {
    let kernel = include_str!("../../../../tools/check/tests/kernel/msi.txt");
    answers(&[], "msi", kernel);
}

#[test]
fn an_iommu_of_48_bits_is_answered_as_by_the_kernel() {
    let kernel = include_str!("../../../../tools/check/tests/kernel/width.txt");
    answers(&["--iova-bits", "48"], "width", kernel);
}

#[test]
fn iommufd_is_answered_as_by_the_kernel() {
    let kernel = include_str!("../../../../tools/check/tests/kernel/iommufd.txt");
    answers(&[], "iommufd", kernel);
}

// Tests of the virtual machine, where the kernel is the reference.

/// Runs a test of `vm/guest/tests` on two model devices: there is no finding.
fn guest(words: &[&str]) {
    let folder = Folder::new();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/check/guest");
    let programs = Path::new(env!("CARGO_BIN_EXE_pinfold")).parent().unwrap();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let path = format!("PATH={path}");
    let files = folder.path("");
    let all = [&["env", &path, script, files.to_str().unwrap()], words].concat();
    // Small transfers, as the second controller of the virtual machine has.
    let devices = ["--nvme", "soft:32M", "--nvme", "soft:32M,block=4k", "--knob", "mdts=3"];
    let (ended, report) = check(&[&devices[..], &["--fail-on", "warning"]].concat(), &all);
    assert_eq!(ended.code, Some(0), "{words:?}: {report:#}{ended:#?}");
    assert!(report["commands"].as_u64().unwrap() > 100, "{report:#}");
}

#[test]
fn guest_copies_to_each_namespace_and_back() {
    guest(&["vfio_copies"]);
}

#[test]
fn guest_verifies_each_namespace() {
    for (target, protect) in [
        ("0000:01:00.0/1", "strict"),
        ("0000:02:00.0/1", "revoke"),
        ("0000:02:00.0/1", "batch"),
        ("0000:01:00.0/1", "static"),
    ] {
        guest(&["vfio_verifies", target, protect, "80"]);
    }
}

#[test]
fn guest_uses_several_queues() {
    guest(&["vfio_several_queues"]);
}

// Programs that attack it.

/// Returns the processes with this command line.
fn running(words: &[&str]) -> Vec<String> {
    let line: String = words.iter().flat_map(|word| [*word, "\0"]).collect();
    let processes = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    // A process may end meanwhile, and one that has ended has no command line.
    let is_it =
        |path: &PathBuf| std::fs::read_to_string(path.join("cmdline")).is_ok_and(|own| own == line);
    processes.filter(is_it).map(|path| path.display().to_string()).collect()
}

/// Runs an attack; returns the report. Nothing of it survives.
fn attacked(options: &[&str], mode: &str, code: Option<i32>) -> Value {
    static RUNS: AtomicU32 = AtomicU32::new(0);
    let attack = program("attack");
    // A word that the program ignores: another test may run the same attack meanwhile.
    let run = format!("run {}", RUNS.fetch_add(1, Ordering::Relaxed));
    let words = [attack.to_str().unwrap(), mode, &run];
    let (ended, report) = check(options, &words);
    assert_eq!(running(&words), [""; 0]);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    for place in ["/dev/vfio", "/dev/iommu", "/sys/bus/pci/devices"] {
        assert!(!mounts.contains(&format!(" {place}")), "{place}: {mounts}");
    }
    match code {
        Some(code) => assert_eq!(ended.code, Some(code), "{report:#}{ended:#?}"),
        None => assert_ne!(ended.code, Some(125), "{ended:#?}"),
    }
    report
}

#[test]
fn forged_pointers_and_lengths() {
    let report = attacked(&[], "forged", None);
    assert_eq!(report["exit_code"], 0, "{report:#}");
}

#[test]
fn all_registers_all_the_time() {
    let report = attacked(&[], "registers", Some(3));
    assert_eq!(report["exit_code"], 0, "{report:#}");
}

#[test]
fn a_disk_all_the_time() {
    for options in
        [&["--virtio-blk", "soft:1M"][..], &["--virtio-blk", "soft:1M", "--hostile", "3"]]
    {
        for mode in ["forged", "disk"] {
            let report = attacked(options, mode, None);
            assert_eq!(report["exit_code"], 0, "{report:#}");
        }
    }
}

#[test]
fn calls_by_which_memory_goes_all_the_time() {
    let report = attacked(&["--watch-memory"], "goes", Some(0));
    assert_eq!(ids(&report), [""; 0], "{report:#}");
}

#[test]
fn descriptors_closed_by_other_threads() {
    attacked(&[], "closed", Some(0));
}

#[test]
fn a_program_that_executes_another() {
    let report = attacked(&[], "executes", Some(0));
    // The accesses of the old program's command reach nothing, and are no fault of its driver.
    assert!(!ids(&report).iter().any(|id| id.starts_with("memory")), "{report:#}");
}

#[test]
fn a_child_that_outlives_its_parent() {
    attacked(&[], "outlives", Some(0));
}

#[test]
fn descriptors_that_are_passed_on() {
    let report = attacked(&["--fail-on", "note"], "passed", Some(0));
    assert_eq!((ids(&report).len(), &report["commands"]), (0, &Value::from(1)), "{report:#}");
}

#[test]
fn a_static_program() {
    // It has no loader, which would load what replaces the calls of a library.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("faults");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/check/tests/c/faults.c");
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-g", "-static", "-Wno-unused-function", "-o"]).arg(&path).arg(source);
    if !cc.output().unwrap().status.success() {
        return crate::common::skipped("there is no static library of C");
    }
    let faults = path.to_str().unwrap();
    assert_eq!(ids(&check(&[], &[faults, "unmap-part"]).1), ["unmap-part"]);
    let (ended, report) = check(&["--fail-on", "note"], &[faults, "unmap-part", "clean"]);
    assert_eq!((ended.code, ids(&report).len()), (Some(0), 0), "{report:#}{ended:#?}");
}

#[test]
fn a_program_in_go() {
    if Command::new("go").arg("version").output().is_err() {
        return crate::common::skipped("there is no Go (Debian's golang-go)");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("driver");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/check/tests/go/driver.go");
    let mut go = Command::new("go");
    // Nothing is fetched, and nothing but this folder is written.
    for (name, value) in
        [("GO111MODULE", "off"), ("GOTOOLCHAIN", "local"), ("GOFLAGS", ""), ("CGO_ENABLED", "0")]
    {
        go.env(name, value);
    }
    go.env("GOCACHE", folder.path().join("cache")).env("GOPATH", folder.path().join("path"));
    let built = go.args(["build", "-o"]).arg(&path).arg(source).output().unwrap();
    assert!(built.status.success(), "{built:#?}");
    let driver = path.to_str().unwrap();
    // Its goroutines make calls from several threads, and it has no library of C.
    let (ended, report) = check(&["--fail-on", "note"], &[driver]);
    assert_eq!((ended.code, ids(&report).len()), (Some(0), 0), "{report:#}{ended:#?}");
    assert_eq!(report["commands"], 400, "{report:#}");
    let (ended, report) = check(&[], &["env", "FAULT=1", driver]);
    assert_eq!((ended.code, ids(&report)), (Some(0), vec!["unmap-part".to_owned()]), "{report:#}");
    assert!(report["findings"][0]["details"].to_string().contains("(driver+0x"), "{report:#}");
}

#[test]
fn calls_of_a_child_of_vfork() {
    attacked(&[], "vforks", Some(0));
}

#[test]
fn signals_while_calls_wait() {
    attacked(&[], "interrupted", Some(0));
}

#[test]
fn children_killed_at_any_time() {
    attacked(&[], "killed", Some(0));
}

#[test]
fn more_maps_than_a_container_takes() {
    if std::env::var_os("PINFOLD_BIG").is_none() {
        return crate::common::skipped("set PINFOLD_BIG=1 to map 65,535 times");
    }
    // 65,535 calls, which take minutes on a machine that is busy enough.
    let report = attacked(&["--time-limit", "900s"], "many", Some(0));
    assert_eq!(ids(&report), ["entry-limit"], "{report:#}");
}

#[test]
fn descriptors_used_as_what_is_below() {
    let report = attacked(&[], "underneath", Some(3));
    assert_eq!(report["exit_code"], 0, "{report:#}");
}

#[test]
fn descriptors_of_one_thread() {
    attacked(&[], "tables", Some(0));
}

#[test]
fn a_descriptor_replaced_while_a_call_looks_at_it() {
    attacked(&[], "swaps", Some(0));
}

#[test]
fn a_process_without_its_first_thread() {
    let report = attacked(&[], "first-ends", Some(0));
    // The place is known, too.
    assert_eq!(ids(&report), ["unmap-nothing"], "{report:#}");
    let details = report["findings"][0]["details"].to_string();
    assert!(details.contains("without_first+"), "{report:#}");
}

#[test]
fn a_pipe_where_a_program_was() {
    let report = attacked(&[], "piped", Some(0));
    assert_eq!(ids(&report), ["unmap-nothing"], "{report:#}");
}

#[test]
fn paths_of_every_kind_to_a_node() {
    if !crate::limits::is_root() {
        return crate::common::skipped("it mounts, and changes its root");
    }
    let report = attacked(&["--fail-on", "note"], "paths", Some(0));
    assert_eq!(ids(&report), [""; 0], "{report:#}");
}

#[test]
fn descriptors_that_are_copied_and_closed_in_ranges() {
    let report = attacked(&["--fail-on", "note"], "copied", Some(0));
    assert_eq!(ids(&report), [""; 0], "{report:#}");
}

#[test]
fn very_many_addresses_that_an_iommufd_chooses() {
    if !crate::limits::is_root() {
        return crate::common::skipped("it locks more memory than a user may");
    }
    let report = attacked(&[], "chosen", Some(0));
    assert_eq!(ids(&report), ["mapped-often"], "{report:#}");
}

#[test]
fn an_iommu_has_39_bits_or_48() {
    attacked(&[], "wide", Some(22));
    attacked(&["--iova-bits", "39"], "wide", Some(22));
    attacked(&["--iova-bits", "48"], "wide", Some(0));
}

#[test]
fn a_full_table_of_descriptors() {
    attacked(&[], "full", Some(0));
}

#[test]
fn a_daemon_ends_with_the_time_limit() {
    let report = attacked(&["--time-limit", "2s"], "daemon", Some(124));
    assert_eq!(report["time_limit"], true);
}

#[test]
fn nothing_survives_a_kill_of_check() {
    // Not those of another run of the tests.
    let time = format!("1789.{}", std::process::id());
    let mut child = crate::common::start(&["check", "--", "sleep", &time]);
    let asleep = || running(&["sleep", &time]).len();
    let wait = |count: usize| {
        let start = std::time::Instant::now();
        while asleep() != count {
            assert!(start.elapsed().as_secs() < 60, "{} instead of {count}", asleep());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    };
    wait(1);
    child.kill().unwrap();
    child.wait().unwrap();
    wait(0);
}

/// Processes that keep every descriptor which check may have are killed with the others.
#[test]
fn a_time_limit_needs_no_descriptor() {
    let crowd = "for child in 1 2 3; do
        (for i in $(seq 64); do { exec {fd}<>/dev/vfio/vfio; } 2>/dev/null || break; done; exec sleep 1785) &
    done; wait";
    let mut command = Command::new("prlimit");
    command.args(["--nofile=64:64", env!("CARGO_BIN_EXE_pinfold"), "check", "--time-limit", "2s"]);
    command.args(["--", "bash", "-c", crowd]);
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    assert_eq!(ended_within_two_minutes(&mut command), Some(124));
}

/// Returns the code of a program, which is killed if it has none by then.
fn ended_within_two_minutes(command: &mut Command) -> Option<i32> {
    let mut child = command.spawn().unwrap();
    let start = std::time::Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if start.elapsed().as_secs() > 120 {
            child.kill().unwrap();
            panic!("it goes on after its time limit");
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

/// The parent waits for the answer of a file system that the program serves itself.
#[test]
fn a_time_limit_ends_what_waits_for_the_program() {
    let attack = program("attack");
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("out");
    // How long the program needs until it waits is not known.
    for limit in ["2s", "10s", "60s"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
        command.args(["check", "--time-limit", limit, "--", attack.to_str().unwrap(), "stalled"]);
        command.arg(folder.path());
        command.stdout(std::fs::File::create(&output).unwrap()).stderr(std::process::Stdio::null());
        let code = ended_within_two_minutes(&mut command);
        let said = std::fs::read_to_string(&output).unwrap();
        if said.contains("no FUSE") {
            return crate::common::skipped("no file system of one's own can be mounted");
        }
        assert_eq!(code, Some(124), "{said}");
        if said == "stalled\n" {
            return;
        }
        assert_eq!(said, "");
    }
    panic!("the program does not wait");
}

#[test]
fn a_signal_ends_all_that_the_program_has_started() {
    // Its parent is check: a child of a session of its own, and the program itself, stay otherwise.
    let time = format!("1787.{}", std::process::id());
    let script = format!("setsid sleep {time} & kill -TERM $PPID; exec sleep {time}");
    let (ended, report) = check(&[], &["sh", "-c", &script]);
    assert_eq!((ended.code, &report["stopped"]), (Some(130), &Value::Bool(true)), "{ended:#?}");
    assert_eq!(running(&["sleep", &time]), [""; 0]);
    // The program may end by itself meanwhile, as by the same signal.
    for _ in 0..10 {
        let (ended, report) = check(&[], &["sh", "-c", "kill -TERM $PPID; exit 7"]);
        assert_eq!((ended.code, &report["stopped"]), (Some(130), &Value::Bool(true)), "{ended:#?}");
    }
    // One that is ignored stays ignored.
    let own = env!("CARGO_BIN_EXE_pinfold");
    let script = format!("trap '' TERM; exec '{own}' check -- sh -c 'kill -TERM $PPID; exit 7'");
    let status = Command::new("sh").args(["-c", &script]).status().unwrap();
    assert_eq!(status.code(), Some(7));
}

/// Returns the processor time of a process so far.
fn processor_time(pid: u32) -> Duration {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let of_one = |thread: std::fs::DirEntry| -> u64 {
        let text = std::fs::read_to_string(thread.path().join("schedstat")).unwrap();
        text.split(' ').next().unwrap().parse().unwrap()
    };
    Duration::from_nanos(threads.map(of_one).sum())
}

#[test]
fn a_device_that_is_not_used_costs_little() {
    let attack = program("attack");
    let words = ["check", "--nvme", "soft:1M", "--", attack.to_str().unwrap(), "idle"];
    let mut child = crate::common::start(&words);
    // The line says that the device is enabled.
    let mut line = [0; 5];
    child.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
    // It is looked at often for a second, and then less and less.
    std::thread::sleep(Duration::from_secs(4));
    let (before, start) = (processor_time(child.id()), Instant::now());
    std::thread::sleep(Duration::from_secs(3));
    let share = (processor_time(child.id()) - before).div_duration_f64(start.elapsed());
    child.kill().unwrap();
    child.wait().unwrap();
    // docs/check.md has the figure; here, what waits without a sleep is found on any machine.
    println!("{:.2} % of a processor", share * 100.0);
    assert!(share < 0.2, "{:.2} % of a processor", share * 100.0);
}

// Devices and users.

#[test]
fn several_devices_are_used_at_a_time() {
    let folder = Folder::new();
    let (first, second) = (folder.sparse("first", 4 << 20), folder.sparse("second", 4 << 20));
    let source = folder.file("source", &bytes(4 << 20));
    let (first, second) = (format!("soft:{first}"), format!("0000:41:00.3/12=soft:{second}"));
    let devices =
        ["--nvme", &first, "--nvme", &second, "--iova-bits", "48", "--fail-on", "warning"];
    let own = env!("CARGO_BIN_EXE_pinfold");
    let copy = |bdf: &str| format!("'{own}' copy --force '{source}' vfio:{bdf}");
    let both = format!("{} & {} && wait $!", copy("0000:01:00.0"), copy("0000:41:00.3"));
    let (ended, report) = check(&devices, &["sh", "-c", &both]);
    assert_eq!(ended.code, Some(0), "{report:#}{ended:#?}");
    crate::common::assert_same(&folder.path("source"), &folder.path("first"));
    crate::common::assert_same(&folder.path("source"), &folder.path("second"));
}

#[test]
fn functions_of_two_kinds_are_used_at_a_time() {
    let folder = Folder::new();
    let image = folder.sparse("image", 4 << 20);
    let source = folder.file("source", &bytes(4 << 20));
    let image = format!("soft:{image}");
    // The disk is the second function, in the group of its own that it is given.
    let disk = "0000:01:00.1/3=soft:4M";
    let own = env!("CARGO_BIN_EXE_pinfold");
    let virtio = program("virtio");
    let both = format!(
        "'{own}' copy --force '{source}' vfio:0000:01:00.0 & \
         '{}' plain clean 0000:01:00.1 /dev/vfio/3 && wait $!",
        virtio.display()
    );
    let options = ["--nvme", &image, "--virtio-blk", disk, "--fail-on", "warning"];
    let (ended, report) = check(&options, &["sh", "-c", &both]);
    assert_eq!(ended.code, Some(0), "{report:#}{ended:#?}");
    crate::common::assert_same(&folder.path("source"), &folder.path("image"));
    let addresses: Vec<_> =
        report["devices"].as_array().unwrap().iter().map(|device| &device["address"]).collect();
    assert_eq!(addresses, ["0000:01:00.0", "0000:01:00.1"]);
}

#[test]
fn two_devices_at_one_address_are_refused() {
    for words in [
        ["--nvme", "0000:02:00.0=soft:1M", "--nvme", "soft:1M"],
        ["--nvme", "0000:09:00.0=soft:1M", "--virtio-blk", "0000:09:00.0=soft:1M"],
    ] {
        let ended = pinfold(&[&["check"], &words[..], &["--", "true"]].concat());
        ended.failed(2, &["two devices are at 0000:0", "BDF=soft:SIZE"]);
    }
    pinfold(&["check", "--virtio-blk", "soft:1M,block=4k", "--", "true"])
        .failed(2, &["blocks of 512 bytes"]);
    let folder = Folder::new();
    let small = format!("soft:{}", folder.sparse("small", 100));
    pinfold(&["check", "--virtio-blk", &small, "--", "true"]).failed(125, &["no sector of 512"]);
}

#[test]
fn other_devices_are_not_changed_by_it() {
    let list = |command: &str| {
        let ended = pinfold(&["check", "--nvme", "soft:1M", "--", "sh", "-c", command]);
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        ended.out
    };
    let own =
        list("echo x >/dev/null && ls /dev/vfio/vfio /sys/bus/pci/devices/0000:01:00.0/vendor");
    assert_eq!(own.lines().count(), 2, "{own}");
    // The links lead to what they say, from the device to its group and back.
    let links = list(
        "realpath -e /sys/bus/pci/devices/0000:01:00.0/iommu_group && \
         realpath -e /sys/kernel/iommu_groups/7/devices/0000:01:00.0",
    );
    let ends = "/sys/kernel/iommu_groups/7\n/sys/bus/pci/devices/0000:01:00.0\n";
    assert_eq!(links, ends);
    // The devices of this machine are there too, as before.
    for entry in std::fs::read_dir("/dev").unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        if ["null", "urandom", "shm", "fd"].contains(&name.as_str()) {
            assert!(list("ls /dev").lines().any(|line| line == name), "{name}");
        }
    }
}

#[test]
fn a_user_needs_no_rights() {
    if !rustix::process::geteuid().is_root() {
        // Then all tests show it.
        return;
    }
    // The program and its folder may be readable by root alone.
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    let copy = folder.path().join("pinfold");
    copy_program(env!("CARGO_BIN_EXE_pinfold"), &copy);
    let run = |name: &str, words: &[&str]| {
        let own = folder.path().join(name);
        copy_program(program(name), &own);
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&copy);
        let ended = command.args(["check", "--type1-only", "--"]).arg(&own).args(words).output();
        let ended = ended.unwrap();
        let texts = [ended.stdout, ended.stderr].map(|text| String::from_utf8(text).unwrap());
        (ended.status.success(), texts)
    };
    let (is_right, [_, err]) = run("faults", &["unmap-part", "clean"]);
    if err.contains("a user namespace") {
        return crate::common::skipped("this machine allows no user namespaces");
    }
    assert!(is_right && err.contains("0 errors, 0 warnings, 0 notes"), "{err}");
    // Its calls cannot be answered, which is said.
    let (is_right, [out, err]) = run("attack", &["hidden"]);
    assert!(is_right && out == "hidden: 0\n", "{out}{err}");
    assert!(err.contains("PR_SET_DUMPABLE, 0") && err.contains("run check as root"), "{err}");
}
