//! `io`: counts, and what it may overwrite.

use crate::common::{Folder, bytes, pinfold, words};

fn json(line: &str) -> serde_json::Value {
    pinfold(&words(&format!("io {line} --json"))).json()
}

#[test]
fn size_is_moved_once() {
    for (rw, read, write) in
        [("read", 256, 0), ("randread", 256, 0), ("write", 0, 256), ("randwrite", 0, 256)]
    {
        for protect in ["strict", "revoke", "batch", "static"] {
            let result = json(&format!("soft:1M --rw {rw} --iodepth 8 --protect {protect}"));
            let count = |way: &str| result[way]["requests"].as_u64().unwrap_or(0);
            assert_eq!((count("read"), count("write")), (read, write), "{rw} {protect}");
            let way = if read > 0 { &result["read"] } else { &result["write"] };
            assert!(way["iops"].as_f64().unwrap() > 0.0);
            assert_eq!(way["queueing"]["count"], 256);
            assert_eq!(way["completion"]["percentiles_ns"].as_array().unwrap().len(), 17);
        }
    }
    let result = json("soft:1M --rw randrw --rwmixread 100 --size 64k");
    assert_eq!(
        (&result["read"]["requests"], &result["write"]),
        (&16.into(), &serde_json::Value::Null)
    );
    let result = json("soft:4M --rw randrw --rwmixread 70 --iodepth 32");
    let read = result["read"]["requests"].as_u64().unwrap();
    assert!((600..835).contains(&read), "{read} of 1024 are reads");
}

/// One flush for each request, one for those that complete together, or none.
#[test]
fn each_word_of_protect_requests_the_flushes_it_promises() {
    let requests = 16_384;
    let flushes = |protect: &str| {
        let line = format!("soft:64M --rw randread --iodepth 32 --protect {protect}");
        let result = json(&line);
        assert_eq!(result["read"]["requests"], requests, "{protect}");
        result["stack"]["domain"]["waits"].as_u64().unwrap()
    };
    // The queue merges what it is asked for while a flush is in flight.
    let (strict, revoke, batch) = (flushes("strict"), flushes("revoke"), flushes("batch"));
    assert!(revoke > 0 && revoke <= requests, "{revoke}");
    assert!(batch > 0 && batch <= requests / 2, "{batch}");
    assert!(strict > 0 && strict < requests, "{strict}");
    assert_eq!(flushes("static"), 0);
}

/// A limit of 0 makes each batch wait; one that the buffers cannot reach makes none.
#[test]
fn the_held_limit_makes_revocations_wait() {
    for (limit, waits) in [("0", true), ("8k", true), ("1M", false)] {
        let result = json(&format!("soft:1M --rw randread --iodepth 16 --held-limit {limit}"));
        let domain = &result["stack"]["domain"];
        assert_eq!(domain["limited"].as_u64().unwrap() > 0, waits, "{limit}: {domain}");
        assert_eq!(result["read"]["requests"], 256);
    }
    pinfold(&words("io soft:1M --held-limit x")).failed(2, &["--held-limit", "is not a size"]);
}

/// Each unit has its own queue, and the data is the same.
#[test]
fn the_software_iommu_has_as_many_units_as_asked() {
    for units in [1, 2, 255] {
        let result =
            json(&format!("soft:1M --rw randrw --verify --iodepth 16 --iommu-units {units}"));
        let requests = |kind: &str| result[kind]["requests"].as_u64().unwrap();
        assert_eq!(requests("read") + requests("write"), 256, "{units}");
    }
    for (units, why) in
        [("0", "1..=255"), ("256", "1..=255"), ("-1", "1..=255"), ("x", "invalid digit")]
    {
        pinfold(&["io", "soft:1M", "--iommu-units", units])
            .failed(2, &["--iommu-units", units, why]);
    }
}

/// Real controllers are behind the machine's units, whatever a command uses them for; a run without
/// the option gets further.
#[test]
fn the_units_of_real_controllers_are_not_chosen() {
    let folder = Folder::new();
    let (file, real) = (folder.file("a", &bytes(4096)), "vfio:ffff:ff:1f.7");
    for line in [
        format!("io {real} --rw randread"),
        format!("serve {real} --nbd unix:{}", folder.arg("socket")),
        format!("copy {real} {}", folder.arg("b")),
        format!("copy {file} {real} --force"),
        format!("copy {file} {} --via {real} --force", folder.arg("b")),
    ] {
        pinfold(&words(&format!("{line} --iommu-units 2")))
            .failed(2, &["--iommu-units 2", "vfio:ffff:ff:1f.7", "leave the option out"]);
    }
    pinfold(&words(&format!("io {real} --rw randread"))).failed(1, &["ffff:ff:1f.7"]);
}

#[test]
fn the_runtime_ends_the_run() {
    let began = std::time::Instant::now();
    let result = json("soft:1M --rw randread --runtime 1 --time-based --iodepth 4");
    assert!(began.elapsed().as_secs() < 90);
    assert!(result["seconds"].as_f64().unwrap() >= 1.0);
    assert!(result["read"]["requests"].as_u64().unwrap() > 0);
    pinfold(&words("io soft:1M --time-based")).failed(2, &["--runtime"]);
}

#[test]
fn the_report_is_laid_out_as_fios() {
    let out = pinfold(&words("io soft:1M --rw randrw --iodepth 4")).ok();
    for part in [
        "soft:1M: rw=randrw, bs=4096B, iodepth=4",
        "   read: IOPS=",
        "  write: IOPS=",
        // The unit follows the figures: microseconds, where the machine is busy.
        "    slat (",
        "    clat (",
        "     lat (",
        "    clat percentiles (",
        "     |  1.00th=[",
        "99.99th=[",
        "    READ: bw=",
    ] {
        assert!(out.contains(part), "{part:?} is not in\n{out}");
    }
}

#[test]
fn data_is_overwritten_only_with_force() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(65_536));
    for rw in ["write", "randwrite", "randrw"] {
        pinfold(&["io", &file, "--rw", rw]).failed(1, &["holds data", "--force"]);
        let image = format!("soft:{file}");
        pinfold(&["io", &image, "--rw", rw]).failed(1, &["holds data", "--force"]);
    }
    for rw in ["read", "randread"] {
        assert_eq!(json(&format!("{file} --rw {rw}"))["read"]["requests"], 16);
        assert_eq!(json(&format!("soft:{file} --rw {rw}"))["read"]["requests"], 16);
    }
    assert!(std::fs::read(&file).unwrap() == bytes(65_536));
    assert_eq!(json(&format!("{file} --rw write --force"))["write"]["requests"], 16);
    let after = std::fs::read(&file).unwrap();
    assert!(after.len() == 65_536 && after != bytes(65_536));
    assert_eq!(folder.names(), ["data"]);
}

#[test]
fn a_scratch_file_is_reported_as_such_and_removed() {
    let folder = Folder::new();
    let (file, dir) = (folder.arg("scratch"), folder.arg(""));
    pinfold(&["io", &file]).failed(2, &["does not exist", "--size"]);
    pinfold(&["io", &dir]).failed(2, &["is a folder", "--size"]);
    for target in [file.clone(), dir.clone()] {
        for rw in ["read", "write", "randrw"] {
            let line = format!("io {target} --rw {rw} --size 256k --iodepth 4");
            let report = pinfold(&words(&format!("{line} --json"))).json();
            assert_eq!(report["scratch_file"], true, "{line}");
            let text = pinfold(&words(&line)).ok();
            assert!(text.lines().next().unwrap().contains(" (scratch file): rw="), "{text}");
            assert!(folder.names().is_empty());
        }
    }
    pinfold(&words(&format!("io {file}/ --size 1M"))).failed(1, &["is no folder that exists"]);
    pinfold(&words(&format!("io {file} --size 100"))).failed(2, &["--size 100", "4096"]);
    assert!(folder.names().is_empty());
    let report = json(&format!("{} --rw read", folder.file("data", &bytes(4096))));
    assert_eq!(report["scratch_file"], false);
}

#[test]
fn no_file_is_created_among_devices() {
    let folder = Folder::new();
    let (source, link) = (folder.file("in", b"x"), folder.arg("link"));
    std::os::unix::fs::symlink("/dev", &link).unwrap();
    let device = format!("/dev/pinfold-none-{}", std::process::id());
    let through = device.replacen("/dev", &link, 1);
    for line in [
        format!("io {device}"),
        format!("io {device} --size 16M"),
        format!("io {device} --size 16M --rw write --force --json"),
        format!("io {through} --size 16M"),
        "io /dev --size 16M".to_owned(),
        format!("copy {source} {device}"),
        format!("copy {source} {through} --force"),
        format!("copy {source} {} --via file:{device}", folder.arg("out")),
    ] {
        pinfold(&words(&line)).failed(1, &["no file is created under /dev", "lsblk"]);
        assert!(!std::path::Path::new(&device).exists(), "{line}");
    }
    std::os::unix::fs::symlink("nowhere", folder.path("dangling")).unwrap();
    pinfold(&words(&format!("io {} --size 1M", folder.arg("dangling"))))
        .failed(1, &["symbolic link"]);
    pinfold(&words(&format!("io {source}/x --size 1M"))).failed(1, &["Not a directory"]);
    assert_eq!(folder.names(), ["dangling", "in", "link"]);
}

#[test]
fn a_tail_that_is_less_than_a_request_is_reported() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(10_000));
    for (options, note) in [
        ("", "the 1,808 bytes from byte 8192 were not used"),
        ("--size 5000", "the 904 bytes from byte 4096 were not used"),
        ("--offset 4k", "the 1,808 bytes from byte 8192 were not used"),
    ] {
        let text = pinfold(&words(&format!("io {file} {options}"))).ok();
        assert!(text.contains(note), "{note:?} is not in {text}");
    }
    assert!(!pinfold(&words(&format!("io {file} --size 8k"))).ok().contains("not used"));
}

#[test]
fn sizes_beyond_the_target_are_reported() {
    pinfold(&words("io soft:1M --size 2M")).failed(2, &["--size 2097152", "only 1048576"]);
    pinfold(&words("io soft:1M --bs 2M")).failed(2, &["--bs 2097152", "has 1048576 bytes"]);
    pinfold(&words("io soft:1M --bs 3")).failed(2, &["--bs 3", "multiple of 512"]);
    pinfold(&words("io soft:1M --iodepth 1000000000")).failed(2, &["at most 1023"]);
    pinfold(&words("io soft:1M --rwmixread 101")).failed(2, &["101"]);
    pinfold(&words("io soft:1M --runtime 0")).failed(2, &["0"]);
}

/// Runs the program with a terminal of so many columns as its standard error, of which the variable
/// says something else, and returns the lines that were drawn.
fn drawn(columns: &str, line: &str) -> Option<Vec<String>> {
    let command = format!("stty cols {columns} && {} {line}", env!("CARGO_BIN_EXE_pinfold"));
    let mut script = std::process::Command::new("script");
    script
        .args(["-qec", &command, "/dev/null"])
        .env("COLUMNS", "70")
        .stdin(std::process::Stdio::null());
    let out = script.output().ok().filter(|out| out.status.success());
    let Some(out) = out else {
        crate::common::skipped("script(1) does not run here");
        return None;
    };
    let text = String::from_utf8_lossy(&out.stdout).replace("\u{1b}[2K", "\r");
    let lines = text.split(['\r', '\n']).filter(|line| line.contains("ETA"));
    // Without what moves the cursor.
    Some(
        lines
            .map(|line| line.split('\u{1b}').next().unwrap_or_default().trim_end().to_owned())
            .collect(),
    )
}

#[test]
fn the_live_line_has_rates_and_eta_and_fits_the_terminal() {
    let folder = Folder::new();
    let file = folder.file("in", &bytes(64 << 20));
    for (line, parts) in [
        (
            "io soft:1M --rw randread --rate 8M --runtime 1500ms --time-based".to_owned(),
            &["running", "IOPS", "iB/s", "%"][..],
        ),
        (
            format!("copy {file} {} --bs 4k --iodepth 1 --force", folder.arg("out")),
            &["copying", "iB/s", "%"],
        ),
    ] {
        // A terminal that does not know its size has none.
        for (columns, most) in [("200", 79), ("60", 59), ("0", 69)] {
            let Some(lines) = drawn(columns, &line) else { return };
            assert!(!lines.is_empty(), "{columns}: nothing is drawn");
            for drawn in &lines {
                assert!(drawn.chars().count() <= most, "{columns}: {drawn:?}");
                assert!(parts.iter().all(|part| drawn.contains(part)), "{columns}: {drawn:?}");
            }
        }
    }
}

// `io` with several jobs, with interrupts or polling, and its durations.

#[test]
fn each_job_has_a_queue_and_moves_the_whole_size() {
    for rest in ["", " --poll"] {
        let result = json(&format!("soft:4M --rw randread --iodepth 8 --numjobs 3{rest}"));
        assert_eq!((&result["read"]["requests"], &result["numjobs"]), (&3072.into(), &3.into()));
        assert_eq!(result["read"]["total"]["count"], 3072);
        let device = &result["stack"]["devices"][0];
        assert_eq!((&device["queues"], &device["requests"]), (&3.into(), &3072.into()));
        assert!(device["sleeps"] == 0 || rest.is_empty(), "{device}");
        assert_eq!(device["by_interrupt"], rest.is_empty(), "{device}");
    }
    let result = json(
        "soft:4M --rw randrw --bsrange 512-64k --iodepth 16 --numjobs 4 --verify-requests 2000 --verify",
    );
    let verified = &result["verified"];
    assert_eq!(
        (&verified["requests"], &verified["sha256"]),
        (&2000.into(), &serde_json::Value::Null)
    );
    assert_eq!(verified["parts"].as_array().unwrap().len(), 4);
    let text = pinfold(&words("io soft:4M --rw read --numjobs 2")).ok();
    assert!(text.contains("iodepth=1, numjobs=2, size="), "{text}");
    assert!(text.contains("2 queues, "), "{text}");
}

#[test]
fn a_file_is_written_by_all_jobs() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(1 << 20));
    let parts = "--size 25% --offset-increment 25%";
    let result = json(&format!("{file} --rw write --force --numjobs 4 --iodepth 4 {parts}"));
    assert_eq!(result["write"]["requests"], 256);
    let after = std::fs::read(&file).unwrap();
    assert!(
        after.chunks(4096).zip(bytes(1 << 20).chunks(4096)).all(|(new, old)| new != old),
        "all of it"
    );
    json(&format!(
        "{file} --rw randrw --bsrange 512-32k --numjobs 2 --iodepth 8 --verify-requests 500 --verify --force"
    ));
}

#[test]
fn interrupts_and_polling_transfer_the_same_bytes() {
    // With few requests on a busy machine each may be complete whenever the program looks, so that
    // it does not sleep.
    let mut slept = 0;
    for protect in ["strict", "revoke", "batch", "static"] {
        for rest in ["--iodepth 1", "--iodepth 64", "--iodepth 1 --poll", "--iodepth 64 --poll"] {
            let line = "soft:4M --rw randrw --bsrange 512-128k --verify-requests 200 --verify";
            let result = json(&format!("{line} --protect {protect} {rest}"));
            assert_eq!(result["verified"]["requests"], 200, "{protect} {rest}");
            let device = &result["stack"]["devices"][0];
            let (sleeps, interrupts) =
                (device["sleeps"].as_u64().unwrap(), device["interrupts"].as_u64().unwrap());
            if rest.ends_with("--poll") {
                assert_eq!((sleeps, interrupts), (0, 0), "{protect} {rest}: {device}");
            }
            slept += sleeps.min(interrupts);
        }
    }
    assert!(slept > 0, "no run by interrupt slept");
    let folder = Folder::new();
    let file = folder.file("a", &bytes(3 << 20));
    for rest in ["", " --poll"] {
        let to = folder.arg("b");
        pinfold(&words(&format!("copy {file} {to} --via soft:4M --verify --force{rest}"))).ok();
    }
}

#[test]
fn durations_have_units() {
    for (time, least, most) in [("300ms", 0.3, 0.9), ("1s", 1.0, 1.9)] {
        let result = json(&format!(
            "soft:1M --rw randread --runtime {time} --time-based --numjobs 2 --iodepth 2"
        ));
        let seconds = result["seconds"].as_f64().unwrap();
        assert!((least..most + 10.0).contains(&seconds), "{seconds}");
    }
    pinfold(&words("io soft:1M --runtime 1y")).failed(2, &["1y", "ms, s, m, h or d"]);
    pinfold(&words("io soft:1M --runtime 2d")).failed(2, &["2d", "1ms and 1d"]);
    pinfold(&words("io soft:1M --numjobs 0")).failed(2, &["0"]);
    pinfold(&words("io soft:1M --numjobs 257")).failed(2, &["257"]);
    pinfold(&words("io soft:64k --bs 16k --numjobs 5 --verify"))
        .failed(2, &["--numjobs 5", "4 requests"]);
}
