//! fio's options, job files and JSON.

use crate::common::{Folder, bytes, pinfold, skipped, words};
use serde_json::Value;
use std::collections::BTreeSet;
use std::process::Command;

/// The keys of `fio --output-format=json` (3.33, randrw), apart from those of "job options" and
/// "disk_util".
const KEYS: &str = include_str!("fio-3.33.keys");

fn collect_keys(value: &Value, path: &str, keys: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let path = if path.is_empty() { key.clone() } else { format!("{path}/{key}") };
                keys.insert(path.clone());
                if key != "job options" {
                    collect_keys(value, &path, keys);
                }
            }
        }
        Value::Array(list) => {
            list.iter().for_each(|value| collect_keys(value, &format!("{path}[]"), keys))
        }
        _ => {}
    }
}

/// The keys of fio that are absent, because nothing measures them (docs/io-json.md lists them).
const NOT_MEASURED: [&str; 10] = [
    "/ctx",
    "/majf",
    "/minf",
    "/iodepth_submit",
    "/latency_depth",
    "/latency_percentile",
    "/latency_target",
    "/latency_window",
    "/short_ios",
    "/drop_ios",
];

#[test]
fn json_has_fios_keys_and_plausible_figures() {
    let line = "io --name=a --filename=soft:4M --rw=randrw --bs=4k --iodepth=4 --runtime=1100ms --time_based \
                --output-format=json";
    let report = pinfold(&words(line)).json();
    let mut keys = BTreeSet::new();
    collect_keys(&report, "", &mut keys);
    let expected: BTreeSet<_> = KEYS.lines().map(str::to_owned).collect();
    assert_eq!(keys.difference(&expected).collect::<Vec<_>>(), Vec::<&String>::new(), "not fio's");
    // Nothing was trimmed, so there are no samples of it.
    let sampled = |key: &str| key.contains("/trim/bw_") || key.contains("/trim/iops_");
    let absent =
        |key: &&String| !sampled(key) && !NOT_MEASURED.iter().any(|part| key.contains(part));
    assert_eq!(
        expected.difference(&keys).filter(absent).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "missing"
    );
    assert!(
        keys.iter().all(|key| !NOT_MEASURED.iter().any(|part| key.contains(part))),
        "not measured"
    );
    let job = &report["jobs"][0];
    assert_eq!(job["jobname"], "a");
    let count = |direction: &str| job[direction]["total_ios"].as_u64().unwrap();
    assert!(count("read") > 0 && count("write") > 0 && count("trim") == 0);
    let read = &job["read"];
    assert_eq!(read["io_bytes"].as_u64().unwrap(), 4096 * count("read"));
    assert!(
        read["iops"].as_f64().unwrap() > 0.0 && read["bw"].as_u64() <= read["bw_bytes"].as_u64()
    );
    assert!(read["clat_ns"]["percentile"]["99.000000"].as_u64() <= read["clat_ns"]["max"].as_u64());
    for share in ["latency_ns", "latency_us", "latency_ms"] {
        assert!(
            job[share].as_object().unwrap().values().all(|value| value.as_f64().unwrap() >= 0.0)
        );
    }
    let sum = |key: &str| -> f64 {
        job[key].as_object().unwrap().values().map(|value| value.as_f64().unwrap()).sum()
    };
    let latencies = sum("latency_ns") + sum("latency_us") + sum("latency_ms");
    assert!((99.9..100.1).contains(&latencies), "{latencies}");
    assert!((99.9..100.1).contains(&sum("iodepth_level")));
}

#[test]
fn fios_options_work_with_hyphens_and_underscores() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(1 << 20));
    for (name, value) in [("--time_based", "--ramp_time"), ("--time-based", "--ramp-time")] {
        let line = format!(
            "io --filename={file} --direct=1 --ioengine=io_uring --rw=randread --bs=4k --iodepth=8 --numjobs=2 \
             --norandommap --group_reporting --runtime=1s {name}=1 {value}=200ms --percentile_list=50:99.9 --json"
        );
        let report = pinfold(&words(&line)).json();
        assert!(report["seconds"].as_f64().unwrap() >= 1.0, "{report}");
        let percentiles = report["read"]["completion"]["percentiles_ns"].as_array().unwrap();
        assert_eq!(
            percentiles.iter().map(|pair| pair[0].as_f64().unwrap()).collect::<Vec<_>>(),
            [50.0, 99.9]
        );
    }
    let report =
        pinfold(&words(&format!("io {file} --offset 64k --size 64k --direct 0 --json"))).json();
    let figures = (&report["offset_bytes"], &report["size_bytes"], &report["read"]["requests"]);
    assert_eq!(figures, (&65_536.into(), &65_536.into(), &16.into()));
    for rw in ["rw", "readwrite"] {
        let report = pinfold(&words(&format!("io soft:1M --rw {rw} --json"))).json();
        assert_eq!((&report["rw"], report["read"].is_object()), (&"rw".into(), true));
    }
    let report = pinfold(&words("io soft:1M --size 64k --rate 256k --json")).json();
    assert!(report["seconds"].as_f64().unwrap() >= 0.2, "{report}");
    for unlimited in ["--rate 0", "--rate_iops 0"] {
        let line = format!("io soft:1M {unlimited} --runtime 60 --json");
        assert_eq!(pinfold(&words(&line)).json()["read"]["requests"], 256, "{unlimited}");
    }
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
    let line = format!("io {file} --rw trim --offset 64k --size 64k --force --output-format json");
    let report = pinfold(&words(&line)).json();
    assert_eq!(report["jobs"][0]["trim"]["total_ios"], 16);
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
fn unsupported_options_are_refused_with_the_alternative() {
    for (line, parts) in [
        ("io soft:1M --ioengine=libaio", &["libaio", "--ioengine pinfold"][..]),
        ("io data --size=1M --ioengine=sync", &["sync", "--ioengine io_uring", "--iodepth 1"]),
        ("io soft:1M --direct=0", &["--direct 0", "page cache", "leave the option out"]),
        ("io soft:1M --buffered=1", &["--buffered 1", "page cache", "leave the option out"]),
        ("io soft:1M --bs=4k,8k", &["4k,8k", "each direction"]),
        ("io soft:1M --sync=1", &["--sync", "--fsync 1"]),
        ("io soft:1M --verify=pattern", &["pattern", "crc32c"]),
        ("io soft:1M --random_distribution=zoned:60/10", &["zoned:60/10", "--offset"]),
        ("io --filename=/dev/sda:/dev/sdb", &["/dev/sda:/dev/sdb", "several files", "file:NAME"]),
        ("io a.bin:b.bin --size 1M", &["a.bin:b.bin", "several files"]),
        ("io --filename=- --size 1M", &["standard input"]),
        (
            "io --filename=$jobname.$jobnum.$filenum --size=1M",
            &["$jobname.$jobnum.$filenum", "file's name"],
        ),
        ("io --filename=/a --directory=/tmp", &["/a", "leave --directory out"]),
        ("io soft:1M --offset_increment=4k", &["--size"]),
        (
            "io soft:1M --size=64k --offset_increment=1M --numjobs=2",
            &["--offset-increment 1048576", "1048576 bytes"],
        ),
        ("io soft:1M --norandommap=0", &["--norandommap 0", "leave the option out"]),
        ("io soft:1M --group_reporting=0", &["job file"]),
        ("io soft:1M --rw trim --verify", &["--rw trim", "randrw"]),
        ("io soft:1M --output-format=terse", &["terse", "normal, json"]),
        ("io soft:1M --percentile_list=1,2", &["1,2", "50:99:99.9"]),
        ("io soft:1M --offset=100", &["--offset 100", "4096"]),
        ("io soft:1M --offset=1M", &["--offset 1048576", "only 1048576"]),
        ("io soft:1M --offset=3M --size=4k", &["--offset 3145728", "only 1048576"]),
        (
            "io soft:1M --offset=512k --size=1M",
            &["--size 1048576", "524288 follow --offset 524288"],
        ),
        ("io soft:1M --size=101%", &["101%", "1 to 100"]),
        ("io none --size=50%", &["--size in per cent", "write bytes"]),
        ("io soft:1M --json --output-format json", &["--json", "--output-format"]),
        ("io soft:1M --filename=soft:2M", &["--filename"]),
        ("io --rw read", &["TARGET"]),
    ] {
        pinfold(&words(line)).failed(2, parts);
    }
}

#[test]
fn a_job_file_runs_its_sections_in_order() {
    let folder = Folder::new();
    let data = folder.arg("scratch");
    let text = format!(
        "; two jobs\n[global]\nsize=256k\nbs=4k\nstonewall\n\n[first]\nfilename={data}\nrw=write\niodepth=4\n\n\
         [second]\nfilename=soft:1M\nrw=randread\nnumjobs=2\ngroup_reporting\n"
    );
    let jobs = folder.file("two.fio", text.as_bytes());
    let report = pinfold(&["io", &jobs, "--output-format=json"]).json();
    let names: Vec<_> =
        report["jobs"].as_array().unwrap().iter().map(|job| &job["jobname"]).collect();
    assert_eq!(names, ["first", "second"]);
    let ios =
        |job: usize, direction: &str| report["jobs"][job][direction]["total_ios"].as_u64().unwrap();
    assert_eq!((ios(0, "write"), ios(1, "read")), (64, 128));
    let lines = pinfold(&["io", &jobs, "--json"]).ok();
    assert_eq!(lines.lines().count(), 2);
    let text = pinfold(&["io", &jobs]).ok();
    assert!(
        text.starts_with("first: ") && text.contains("\nsecond: soft:1M: rw=randread"),
        "{text}"
    );
    pinfold(&["io", &jobs, "--bs=8k"]).failed(2, &["--bs", "[global]"]);
    pinfold(&["io", &folder.arg("none.fio")]).failed(2, &["none.fio", "No such file", "file:"]);
    let bad = folder.file("bad.fio", b"[job]\nfilename=soft:1M\nbogus=1\n");
    pinfold(&["io", &bad]).failed(2, &["[job]", "--bogus"]);
    // With a kind it is a target.
    let line = format!("io file:{} --size 64k", folder.arg("target.fio"));
    pinfold(&words(&line)).ok();
}

/// Returns the report of fio for the same words, unless fio is missing or refuses them.
fn fio(line: &str) -> Option<Value> {
    let out =
        Command::new("fio").args(words(line)).args(["--name=a", "--output-format=json"]).output();
    let out = out
        .ok()
        .filter(|out| out.status.success())
        .map(|out| String::from_utf8(out.stdout).unwrap());
    let report = out.and_then(|text| serde_json::from_str(&text).ok());
    if report.is_none() {
        skipped("fio does not run here");
    }
    report
}

#[test]
fn rates_are_sampled_every_half_second_or_absent() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(1 << 20));
    for target in [&*file, "soft:1M"] {
        let line = format!(
            "io --filename={target} --rw=randread --runtime=1600ms --time_based --numjobs=2"
        );
        let report = pinfold(&words(&format!("{line} --output-format=json"))).json();
        let read = &report["jobs"][0]["read"];
        let figure = |key: &str| read[key].as_f64().unwrap_or_else(|| panic!("{key}: {read}"));
        for (kind, rate) in [("iops", figure("iops")), ("bw", figure("bw"))] {
            let [min, max, mean] =
                ["min", "max", "mean"].map(|part| figure(&format!("{kind}_{part}")));
            // At most three intervals; on a busy machine one may be longer.
            assert!((1.0..=3.0).contains(&figure(&format!("{kind}_samples"))), "{read}");
            assert!(0.0 < min && min <= mean + 1.0 && mean <= max + 1.0, "{read}");
            assert!((rate / 5.0..rate * 5.0).contains(&mean), "{read}");
        }
        assert!(figure("bw_agg") > 0.0 && figure("bw_agg") <= 100.0, "{read}");
        assert!(figure("iops_stddev") >= 0.0 && figure("bw_dev") >= 0.0);
        let seconds = report["jobs"][0]["job_runtime"].as_f64().unwrap() / 1e3;
        assert!(seconds >= 3.2, "the sum of two jobs, as in fio: {seconds}");
        let text = pinfold(&words(&line)).ok();
        let samples = &pinfold(&words(&format!("{line} --json"))).json()["read"]["samples"];
        assert!(samples["iops"]["mean"].as_f64().unwrap() > 0.0, "{samples}");
        assert!(
            text.contains("   iops        : min=") && text.contains("   bw (  KiB/s): min="),
            "{text}"
        );
    }
    let short = pinfold(&words("io soft:1M --size=64k --output-format=json")).json();
    let read = &short["jobs"][0]["read"];
    assert_eq!((&read["iops_samples"], &read["bw_samples"]), (&0.into(), &0.into()));
    assert!(read.get("iops_mean").is_none() && read.get("bw_min").is_none(), "{read}");
}

/// Cached data is read by the call that submits: slat has nearly all of the time, as in fio.
#[test]
fn slat_includes_the_call_that_submits() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(1 << 20));
    let line = format!(
        "--filename={file} --rw=randread --bs=64k --iodepth=1 --ioengine=io_uring --direct=0 --size=1M --runtime=500ms --time_based"
    );
    let figure =
        |report: &Value, key: &str, of: &str| report["jobs"][0]["read"][key][of].as_f64().unwrap();
    let report = pinfold(&words(&format!("io {line} --output-format=json"))).json();
    // The least of each: a thread that gets no processor in between adds to any other.
    let [slat, clat] = ["slat_ns", "clat_ns"].map(|key| figure(&report, key, "min"));
    assert!(slat > clat, "slat {slat} ns, clat {clat} ns");
    let Some(fio) = fio(&format!("{line} --invalidate=0")) else { return };
    let [slat, of_fio] = [&report, &fio].map(|report| figure(report, "slat_ns", "min"));
    // Not the speed of either: without the call it is a hundredth.
    assert!(slat > of_fio / 20.0, "slat {slat} ns, fio's {of_fio} ns");
}

#[test]
fn jobs_move_what_fio_moves() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(1 << 20));
    for (options, ios) in [
        ("--size=256k --numjobs=4", 256),
        ("--size=25% --numjobs=4 --offset_increment=25%", 256),
        ("--size=256k --io_size=50%", 32),
        ("--size=64k --io_size=256k", 64),
        ("--size=64k --loops=3", 48),
        ("--size=64k --number_ios=5 --numjobs=2", 10),
        ("--size=64k --number_ios=50", 16),
        ("--size=64k --number_ios=5 --loops=3", 15),
        ("--size=64k --number_ios=12 --loops=2", 24),
        ("--size=64k --number_ios=20 --loops=2", 32),
        ("--size=64k --io_size=32k --loops=2", 16),
        ("--size=32k --io_size=64k --loops=2", 16),
        ("--size=32k --io_size=64k --loops=3", 24),
        ("--size=32k --io_size=64k --number_ios=10 --loops=3", 24),
        ("--offset=50% --size=50%", 128),
        ("--offset=33%", 171),
    ] {
        let line = format!("--filename={file} --rw=read --bs=4k --group_reporting {options}");
        let total = |report: &Value| report["jobs"][0]["read"]["total_ios"].as_u64().unwrap();
        let report = pinfold(&words(&format!("io {line} --output-format=json"))).json();
        assert_eq!(total(&report), ios, "{options}");
        if let Some(report) = fio(&line) {
            assert_eq!(total(&report), ios, "fio {options}");
        }
    }
}

#[test]
fn a_run_by_time_ignores_number_ios() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(1 << 20));
    let line =
        format!("--filename={file} --rw=read --bs=4k --number_ios=10 --time_based --runtime=1");
    let runtime = |report: &Value| report["jobs"][0]["read"]["runtime"].as_u64().unwrap();
    let report = pinfold(&words(&format!("io {line} --output-format=json"))).json();
    assert!(runtime(&report) >= 1000, "{report}");
    if let Some(report) = fio(&line) {
        assert!(runtime(&report) >= 1000, "fio {report}");
    }
}

#[test]
fn notes_are_in_fios_json_and_on_standard_error() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(10_000));
    let line = format!("io --filename={file} --ioengine=libaio --output-format=json");
    let ended = pinfold(&words(&line));
    for part in ["not by libaio", "1,808 bytes from byte 8192 were not used"] {
        assert!(ended.err.contains(part), "{ended:#?}");
        let report: Value = serde_json::from_str(&ended.out).unwrap();
        assert!(report["jobs"][0]["desc"].as_str().unwrap().contains(part), "{report}");
    }
}

#[test]
fn the_time_of_a_request_is_stated_if_there_are_enough() {
    for (loops, is_stated) in [(1, false), (4, true)] {
        let text = pinfold(&words(&format!("io soft:1M --loops={loops}"))).ok();
        assert_eq!(text.contains("usec per request"), is_stated, "{text}");
    }
}

#[test]
fn a_small_file_may_be_a_job_file_of_another_name() {
    let folder = Folder::new();
    let job = folder.file("j.job", b"[a]\nrw=read\n");
    pinfold(&["io", &job]).failed(2, &["lower --bs", "job file", ".fio"]);
}

#[test]
fn flushes_are_issued_and_counted() {
    let folder = Folder::new();
    let file = folder.arg("scratch");
    for target in [&*file, "soft:1M"] {
        let line = format!("io --filename={target} --size=64k --rw=write --fsync=4 --end_fsync=1");
        let report = pinfold(&words(&format!("{line} --output-format=json"))).json();
        let job = &report["jobs"][0];
        assert_eq!(
            (&job["write"]["total_ios"], &job["sync"]["total_ios"]),
            (&16.into(), &4.into()),
            "{target}"
        );
        assert_eq!(job["sync"]["lat_ns"]["N"], 4);
        assert!(pinfold(&words(&line)).ok().contains("   sync: 4 flushes"));
    }
}

#[test]
fn options_that_change_nothing_and_common_ones_are_accepted() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(1 << 20));
    let common = "--thread --stonewall --randrepeat=0 --allrandrepeat=1 --fixedbufs --ioengine=libaio --buffered=0 \
                  --refill_buffers --end_fsync=1 --thinktime=10 --thinktime_blocks=4 --random_distribution=zipf:1.2 \
                  --bs=4k,4k --randseed=7 --fallocate=none --exitall --description=why";
    let line = format!("io --filename={file} --size=64k --rw=randread {common} --json");
    let report = pinfold(&words(&line)).json();
    assert_eq!(report["read"]["requests"], 16);
    assert_eq!(report["description"], "why");
    let notes = report["notes"].to_string();
    assert!(notes.contains("io_uring, not by libaio"), "{notes}");
    for method in ["", "=crc32c", "=md5"] {
        let report =
            pinfold(&words(&format!("io soft:1M --rw=randrw --verify{method} --json"))).json();
        assert!(report["verified"]["sha256"].is_string(), "{report}");
    }
    let report =
        pinfold(&words("io soft:1M --rw=randrw --rwmixwrite=100 --rate_iops=10000 --json")).json();
    assert_eq!((&report["write"]["requests"], &report["read"]), (&256.into(), &Value::Null));
}
