//! The options of `io`, and what it refuses.

use crate::common::{Folder, bytes, pinfold, words};

#[test]
fn options_mean_what_they_say() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(1 << 20));
    let line = format!(
        "io {file} --rw=randread --bs=4k --iodepth=8 --numjobs=2 --runtime=1s --time-based --ramp-time=200ms --json"
    );
    let began = std::time::Instant::now();
    let report = pinfold(&words(&line)).json();
    assert!(report["seconds"].as_f64().unwrap() >= 1.0, "{report}");
    assert!(began.elapsed().as_millis() >= 1200, "{report}");
    let report = pinfold(&words(&format!("io {file} --offset 64k --size 64k --json"))).json();
    let figures = (&report["offset_bytes"], &report["size_bytes"], &report["read"]["requests"]);
    assert_eq!(figures, (&65_536.into(), &65_536.into(), &16.into()));
    let report = pinfold(&words("io soft:1M --size 64k --rate 256k --json")).json();
    assert!(report["seconds"].as_f64().unwrap() >= 0.2, "{report}");
    let report = pinfold(&words("io soft:1M --rate 0 --runtime 60 --json")).json();
    assert_eq!(report["read"]["requests"], 256);
    let report = pinfold(&words("io soft:1M --rw=randrw --rwmixread=0 --json")).json();
    assert_eq!(
        (&report["write"]["requests"], &report["read"]),
        (&256.into(), &serde_json::Value::Null)
    );
}

#[test]
fn offsets_are_where_the_requests_go() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(64 << 10));
    pinfold(&words(&format!("io {file} --rw write --offset 16k --size 16k --numjobs 2 --force")))
        .ok();
    let (before, after) = (bytes(64 << 10), std::fs::read(&file).unwrap());
    assert!(after[..16 << 10] == before[..16 << 10] && after[32 << 10..] == before[32 << 10..]);
    assert!(
        after[16 << 10..32 << 10]
            .chunks(4096)
            .zip(before[16 << 10..].chunks(4096))
            .all(|(a, b)| a != b)
    );
    let line = format!("io {file} --rw randrw --offset 32k --size 16k --verify --force");
    pinfold(&words(&line)).ok();
    assert!(std::fs::read(&file).unwrap()[48 << 10..] == before[48 << 10..]);
}

#[test]
fn trims_deallocate() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(256 << 10));
    pinfold(&words(&format!("io {file} --rw trim"))).failed(1, &["holds data", "--force"]);
    let line = format!("io {file} --rw trim --offset 64k --size 64k --force --json");
    let report = pinfold(&words(&line)).json();
    assert_eq!(report["trim"]["requests"], 16);
    let after = std::fs::read(&file).unwrap();
    assert_eq!(after.len(), 256 << 10);
    assert!(after[64 << 10..128 << 10].iter().all(|&byte| byte == 0));
    assert!(
        after[..64 << 10] == bytes(256 << 10)[..64 << 10]
            && after[128 << 10..] == bytes(256 << 10)[128 << 10..]
    );
    for protect in ["strict", "revoke", "batch", "static"] {
        let line = format!("io soft:1M --rw randtrim --iodepth 8 --protect {protect} --json");
        let report = pinfold(&words(&line)).json();
        assert_eq!(report["trim"]["requests"], 256);
        assert_eq!(report["stack"]["domain"]["maps"], 0, "no buffer is mapped for a trim");
    }
}

#[test]
fn impossible_options_are_refused_with_the_alternative() {
    for (line, parts) in [
        ("io soft:1M --bs=4k,8k", &["4k,8k", "not a size"][..]),
        ("io a:b --size 1M", &["\"a\"", "file:a:b"]),
        ("io soft:1M --offset-increment=4k", &["--size"]),
        (
            "io soft:1M --size=64k --offset-increment=1M --numjobs=2",
            &["--offset-increment 1048576", "1048576 bytes"],
        ),
        ("io soft:1M --rw trim --verify", &["--rw trim", "randrw"]),
        ("io soft:1M --offset=100", &["--offset 100", "4096"]),
        ("io soft:1M --offset=1M", &["--offset 1048576", "only 1048576"]),
        ("io soft:1M --offset=3M --size=4k", &["--offset 3145728", "only 1048576"]),
        (
            "io soft:1M --offset=512k --size=1M",
            &["--size 1048576", "524288 follow --offset 524288"],
        ),
        ("io soft:1M --size=101%", &["101%", "1 to 100"]),
        ("io none --size=50%", &["--size in per cent", "write bytes"]),
        ("io --rw read", &["TARGET"]),
    ] {
        pinfold(&words(line)).failed(2, parts);
    }
}

/// Users who write fio's options are told the equivalent.
#[test]
fn fios_options_and_job_files_are_refused_with_what_to_use() {
    let engine = "libpinfold-fio.so";
    for (line, part) in [
        ("io --filename=soft:1M --rw=read", "without an option"),
        ("io soft:1M --rw=read --runtime=1 --time_based", "use --time-based"),
        ("io soft:1M --rw=read --output-format=json", "use --json"),
        ("io soft:1M --ioengine=libaio", "leave it out"),
        ("io soft:1M --random_distribution=zipf:1.2", engine),
        ("io soft:1M --loops=2", engine),
        ("io soft:1M --verify=crc32c", engine),
    ] {
        pinfold(&words(line)).failed(2, &[part, engine]);
    }
    let folder = Folder::new();
    let job = folder.file("a.fio", b"[a]\nrw=read\n");
    pinfold(&["io", &job, "--size", "4k", "--rw", "write", "--force"])
        .failed(2, &["a.fio", engine, "file:"]);
    assert_eq!(std::fs::read(&job).unwrap(), b"[a]\nrw=read\n");
    let other = folder.file("a.job", b"[a]\nrw=read\n");
    pinfold(&["io", &other]).failed(2, &["lower --bs", "job file", engine]);
    // With a kind it is a target.
    pinfold(&words(&format!("io file:{} --size 64k", folder.arg("target.fio")))).ok();
}

#[test]
fn rates_are_sampled_every_half_second_or_absent() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(1 << 20));
    for target in [&*file, "soft:1M"] {
        let line = format!(
            "io {target} --rw=randread --runtime=1600ms --time-based --numjobs=2 --rate=8M"
        );
        let report = pinfold(&words(&format!("{line} --json"))).json();
        let read = &report["read"];
        for kind in ["iops", "bytes_per_second"] {
            let rate = read[kind].as_f64().unwrap();
            let figure = |key: &str| read["samples"][kind][key].as_f64().unwrap();
            let [min, max, mean] = ["min", "max", "mean"].map(figure);
            // At most three intervals; on a busy machine one may be longer.
            assert!((1.0..=3.0).contains(&figure("samples")), "{read}");
            assert!(0.0 < min && min <= mean + 1.0 && mean <= max + 1.0, "{read}");
            assert!((rate / 5.0..rate * 5.0).contains(&mean), "{read}");
            assert!(figure("deviation") >= 0.0, "{read}");
        }
        let text = pinfold(&words(&line)).ok();
        assert!(
            text.contains("   iops        : min=") && text.contains("   bw (  KiB/s): min="),
            "{text}"
        );
    }
    let short = pinfold(&words("io soft:1M --size=64k --json")).json();
    assert!(short["read"]["samples"].is_null(), "{short}");
}

#[test]
fn jobs_move_their_size_each() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(1 << 20));
    for (options, ios) in [
        ("--size=256k --numjobs=4", 256),
        ("--size=25% --numjobs=4 --offset-increment=25%", 256),
        ("--offset=50% --size=50%", 128),
        ("--offset=33%", 171),
    ] {
        let report =
            pinfold(&words(&format!("io {file} --rw=read --bs=4k {options} --json"))).json();
        assert_eq!(report["read"]["requests"], ios, "{options}");
    }
}

#[test]
fn the_time_of_a_request_is_stated_if_there_are_enough() {
    for (target, is_stated) in [("soft:1M", false), ("soft:4M", true)] {
        let text = pinfold(&words(&format!("io {target}"))).ok();
        assert_eq!(text.contains("usec per request"), is_stated, "{text}");
    }
}

#[test]
fn flushes_are_issued_and_counted() {
    let folder = Folder::new();
    let file = folder.arg("scratch");
    for target in [&*file, "soft:1M"] {
        let line = format!("io {target} --size=64k --rw=write --fsync=4");
        let report = pinfold(&words(&format!("{line} --json"))).json();
        let flush = &report["flush"];
        assert_eq!(
            (&report["write"]["requests"], &flush["requests"], &flush["total"]["count"]),
            (&16.into(), &4.into(), &4.into()),
            "{target}"
        );
        assert!(pinfold(&words(&line)).ok().contains("   sync: 4 flushes"));
    }
    let report = pinfold(&words("io soft:1M --size=64k --rw=write --json")).json();
    assert!(report["flush"].is_null(), "{report}");
}
