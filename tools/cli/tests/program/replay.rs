//! `replay`: its report, its pictures, and what it refuses.

use crate::common::{Ended, Folder, finish, finish_with, pinfold, start};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn sample() -> String {
    format!("{}/../replay/samples/linux-6.12-nvme-ahci-e1000e.txt", env!("CARGO_MANIFEST_DIR"))
}

fn objects(ended: Ended) -> Vec<serde_json::Value> {
    assert_eq!(ended.err, "", "no progress without a terminal");
    ended.ok().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn json_has_a_line_for_the_trace_each_device_and_each_policy() {
    let all = objects(pinfold(&["replay", &sample(), "--json"]));
    assert_eq!(all.len(), 1 + 3 * (1 + 10), "nine policies, and what was recorded");
    let trace = &all[0];
    assert_eq!(
        (&trace["devices"], &trace["damaged"], &trace["timing"]),
        (&3.into(), &0.into(), &"fast".into())
    );
    for device in ["0000:00:02.0", "0000:00:1f.2", "0000:00:03.0"] {
        let of = |policy: &str| {
            all.iter().find(|row| row["device"] == device && row["policy"] == policy).unwrap()
        };
        let counts =
            all.iter().find(|row| row["device"] == device && row["maps"].is_u64()).unwrap();
        for policy in ["tree-2015", "identity", "strict", "none"] {
            let row = of(policy);
            assert_eq!(row["map"]["count"], counts["maps"], "{row}");
            assert!(row["extents_at_peak"].as_u64() > Some(0) && row["modelled"] == true, "{row}");
        }
        assert_eq!(of("strict")["reachable_ns"], 0);
        assert!(of("none")["reachable_ns"].is_null());
        let recorded = of("recorded");
        assert!(
            recorded["map"].is_null() && recorded["span_bytes"].as_u64() > Some(0),
            "{recorded}"
        );
    }
}

#[test]
fn text_has_the_recorded_row_and_pictures_are_written() {
    let folder = Folder::new();
    let args = ["replay", &sample(), "--policy", "batch,lazy", "--svg", &folder.arg("a/b")];
    let out = pinfold(&args).ok();
    for part in [
        "780 lines",
        "0000:00:1f.2: 16 maps (10 scatter lists)",
        "recorded",
        "reachable",
        "extents",
    ] {
        assert!(out.contains(part), "{part}: {out}");
    }
    assert!(!out.contains("tree-2015") && out.find("lazy") < out.find("batch"), "{out}");
    let names = std::fs::read_dir(folder.path("a/b")).unwrap();
    let mut names: Vec<String> =
        names.map(|name| name.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names.len(), 9);
    assert_eq!(names[..2], ["0000_00_02.0-batch.svg", "0000_00_02.0-lazy.svg"]);
    for name in names {
        let picture = std::fs::read_to_string(folder.path("a/b").join(name)).unwrap();
        assert!(
            picture.starts_with("<svg ")
                && picture.ends_with("</svg>\n")
                && picture.contains("fill-opacity")
        );
    }
}

#[test]
fn remaining_mappings_are_listed_where_a_table_can_be_read() {
    let args = ["replay", &sample(), "--mapped", "--policy", "lazy,strict"];
    let all = objects(pinfold(&[&args[..], &["--json"]].concat()));
    let mut runs = 0;
    for row in all.iter().filter(|row| row["policy"] == "strict") {
        let counts =
            all.iter().find(|of| of["device"] == row["device"] && of["maps"].is_u64()).unwrap();
        let mapped = row["mapped"].as_array().unwrap();
        assert_eq!(mapped.is_empty(), counts["never_unmapped"] == 0, "{row}");
        assert!(
            mapped.iter().all(|run| run["bytes"].as_u64() >= run["page_bytes"].as_u64()),
            "{row}"
        );
        runs += mapped.len();
    }
    assert!(runs > 0, "the sample leaves some");
    assert!(all.iter().all(|row| row["policy"] == "strict" || row["mapped"].is_null()));
    let out = pinfold(&args).ok();
    assert!(out.contains("still mapped by strict: ") && out.contains("read-write"), "{out}");
    assert!(!out.contains("still mapped by lazy"), "{out}");
    assert!(!pinfold(&["replay", &sample(), "--policy", "strict"]).ok().contains("still mapped"));
}

#[test]
fn a_trace_is_read_from_standard_input() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pinfold"));
    command.args(["replay", "-", "--policy", "none", "--json", "--limit", "100"]);
    command.stdin(File::open(sample()).unwrap()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let all = objects(finish_with(command));
    assert_eq!((&all[0]["trace"], &all[0]["limited"]), (&"-".into(), &true.into()));
}

/// From a program that goes on, and at the times of the trace.
#[test]
fn a_signal_ends_with_the_report_of_what_was_replayed() {
    let folder = Folder::new();
    let fifo = folder.arg("fifo");
    crate::wire::run(&format!("mkfifo {fifo}"));
    let interrupted = |child: crate::common::Running, threads: usize| {
        // Its handlers are installed when it has a thread for them, and it replays when each device
        // has one.
        let tasks = format!("/proc/{}/task", child.id());
        let end = Instant::now() + Duration::from_secs(60);
        let has_handlers = |task: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(task.unwrap().path().join("comm"))
                .is_ok_and(|name| name == "signals\n")
        };
        while !std::fs::read_dir(&tasks).unwrap().any(has_handlers)
            || std::fs::read_dir(&tasks).unwrap().count() < threads
        {
            assert!(Instant::now() < end, "no handlers, or no replay");
            std::thread::sleep(Duration::from_millis(5));
        }
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        let ended = finish(child);
        assert_eq!((ended.code, ended.err.lines().count()), (Some(130), 1), "{ended:#?}");
        assert!(!ended.err.contains("without cleaning"), "{ended:#?}");
        ended.out
    };
    let child = start(&["replay", &fifo, "--policy", "none"]);
    // Opened for both, which does not wait for the program.
    let mut writer = std::fs::OpenOptions::new().read(true).write(true).open(&fifo).unwrap();
    // More than the pipe and the program buffer: the program has read the first part, and waits for
    // more.
    let text = [std::fs::read(sample()).unwrap(), b"# a comment\n".repeat(30_000)].concat();
    let writing = std::thread::spawn(move || {
        writer.write_all(&text).unwrap();
        writer
    });
    let end = Instant::now() + Duration::from_secs(60);
    while !writing.is_finished() {
        assert!(Instant::now() < end, "the program does not read");
        std::thread::sleep(Duration::from_millis(5));
    }
    let out = interrupted(child, 2);
    assert!(out.contains("recorded"), "{out}");
    drop(writing.join());
    // The sample takes 20 seconds at its own times.
    let line = ["replay", &sample(), "--policy", "none", "--timing", "original"];
    let out = interrupted(start(&line), 3);
    assert!(out.contains("recorded") && out.contains("ended early"), "{out}");
    let out = interrupted(start(&[&line[..], &["--json"]].concat()), 3);
    let first: serde_json::Value = serde_json::from_str(out.lines().next().unwrap()).unwrap();
    assert_eq!(first["failure"], "interrupted");
}

#[test]
fn a_policy_that_fails_does_not_lose_those_before() {
    let args =
        ["replay", &sample(), "--policy", "tree-2015,strict", "--table-bytes", "16k", "--json"];
    let ended = pinfold(&args);
    assert_eq!(ended.code, Some(1), "{ended:#?}");
    let rows: Vec<serde_json::Value> =
        ended.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(rows.iter().any(|row| row["policy"] == "recorded"), "{ended:#?}");
    assert!(rows[0]["failure"].as_str().unwrap().contains("--table-bytes"), "{ended:#?}");
}

#[test]
fn memory_beyond_the_limit_is_refused_before_it_is_taken() {
    pinfold(&["replay", &sample(), "--policy", "none", "--memory", "64k"])
        .failed(1, &["line ", "maps and unmaps", "--limit ", "--memory"]);
    pinfold(&["replay", &sample(), "--policy", "none", "--memory", "1M"]).ok();
}

#[test]
fn damage_is_reported_and_does_not_stop_the_replay() {
    let folder = Folder::new();
    let text = std::fs::read_to_string(sample()).unwrap();
    let damaged = text.replace(
        "\n          <idle>-0       [001] ..s1.    11.901072",
        "\nCPU:1 [LOST 7 EVENTS]\nx",
    );
    let path = folder.file("trace", damaged.as_bytes());
    let out = pinfold(&["replay", &path, "--policy", "none"]).ok();
    for part in
        ["1 damaged line,", "line 21: not a line of a trace", "events were lost 1 time (7 in all"]
    {
        assert!(out.contains(part), "{part}: {out}");
    }
}

#[test]
fn how_explains_recording_and_needs_no_trace() {
    let how = pinfold(&["replay", "--how"]).ok();
    for part in ["trace-cmd record", "buffer_size_kb", "events/dma/enable", "pinfold replay"] {
        assert!(how.contains(part), "{part}");
    }
    assert!(how.lines().all(|line| line.chars().count() <= 128));
}

#[test]
fn an_unreplayable_trace_is_refused_with_advice() {
    pinfold(&["replay"]).failed(2, &["<TRACE>"]);
    pinfold(&["replay", "x", "--policy", "magazines"]).failed(2, &["magazines", "linux-strict"]);
    pinfold(&["replay", "x", "--limit", "0"]).failed(2, &["--limit", "0"]);
    let folder = Folder::new();
    let missing = folder.arg("missing");
    pinfold(&["replay", &missing])
        .failed(1, &[&missing, "cannot read the trace", "check the path"]);
    let empty = folder.file("empty", b"# tracer: nop\n");
    pinfold(&["replay", &empty]).failed(1, &[&empty, "pinfold replay --how"]);
    let binary = folder.file("trace.dat", b"\x17\x08\x44tracing6\0");
    pinfold(&["replay", &binary]).failed(1, &["trace-cmd report FILE | pinfold replay -"]);
    pinfold(&["replay", &sample(), "--svg", &empty]).failed(1, &[&empty, "--svg"]);
    pinfold(&["replay", &sample(), "--policy", "lazy", "--table-bytes", "4k"])
        .failed(1, &["lazy", "operation 1:", "--table-bytes"]);
}
