//! fio's options, job files and JSON.

use crate::common::{Folder, bytes, pinfold, words};
use serde_json::Value;
use std::collections::BTreeSet;

/// The keys of `fio --output-format=json` (3.33, randrw), apart from those of "job options" and "disk_util".
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
        Value::Array(list) => list.iter().for_each(|value| collect_keys(value, &format!("{path}[]"), keys)),
        _ => {}
    }
}

#[test]
fn json_has_fios_keys_and_plausible_figures() {
    let line = "io --name=a --filename=soft:4M --rw=randrw --bs=4k --iodepth=4 --output-format=json";
    let report = pinfold(&words(line)).json();
    let mut keys = BTreeSet::new();
    collect_keys(&report, "", &mut keys);
    let expected: BTreeSet<_> = KEYS.lines().map(str::to_owned).collect();
    assert_eq!(keys.difference(&expected).collect::<Vec<_>>(), Vec::<&String>::new(), "not fio's");
    assert_eq!(expected.difference(&keys).collect::<Vec<_>>(), Vec::<&String>::new(), "missing");
    let job = &report["jobs"][0];
    assert_eq!(job["jobname"], "a");
    let count = |direction: &str| job[direction]["total_ios"].as_u64().unwrap();
    assert_eq!((count("read") + count("write"), count("trim")), (1024, 0));
    let read = &job["read"];
    assert_eq!(read["io_bytes"].as_u64().unwrap(), 4096 * count("read"));
    assert!(read["iops"].as_f64().unwrap() > 0.0 && read["bw"].as_u64() <= read["bw_bytes"].as_u64());
    assert!(read["clat_ns"]["percentile"]["99.000000"].as_u64() <= read["clat_ns"]["max"].as_u64());
    for share in ["latency_ns", "latency_us", "latency_ms"] {
        assert!(job[share].as_object().unwrap().values().all(|value| value.as_f64().unwrap() >= 0.0));
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
    let report = pinfold(&words(&format!("io {file} --offset 64k --size 64k --direct 0 --json"))).json();
    let figures = (&report["offset_bytes"], &report["size_bytes"], &report["read"]["requests"]);
    assert_eq!(figures, (&65_536.into(), &65_536.into(), &16.into()));
    for rw in ["rw", "readwrite"] {
        let report = pinfold(&words(&format!("io soft:1M --rw {rw} --json"))).json();
        assert_eq!((&report["rw"], report["read"].is_object()), (&"rw".into(), true));
    }
    let report = pinfold(&words("io soft:1M --size 64k --rate 256k --json")).json();
    assert!(report["seconds"].as_f64().unwrap() >= 0.2, "{report}");
}

#[test]
fn offsets_are_where_the_requests_go() {
    let folder = Folder::new();
    let file = folder.file("data", &bytes(64 << 10));
    pinfold(&words(&format!("io {file} --rw write --offset 16k --size 16k --numjobs 2 --force"))).ok();
    let (before, after) = (bytes(64 << 10), std::fs::read(&file).unwrap());
    assert!(after[..16 << 10] == before[..16 << 10] && after[32 << 10..] == before[32 << 10..]);
    assert!(after[16 << 10..32 << 10].chunks(4096).zip(before[16 << 10..].chunks(4096)).all(|(a, b)| a != b));
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
    for protect in ["static", "revoke", "strict"] {
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
        ("io data --size=1M --ioengine=sync", &["sync", "--ioengine io_uring"]),
        ("io soft:1M --direct=0", &["page cache", "leave the option out"]),
        ("io soft:1M --norandommap=0", &["--norandommap 0", "leave the option out"]),
        ("io soft:1M --group_reporting=0", &["job file"]),
        ("io soft:1M --rw trim --verify", &["--rw trim", "randrw"]),
        ("io soft:1M --output-format=terse", &["terse", "normal, json"]),
        ("io soft:1M --percentile_list=1,2", &["1,2", "50:99:99.9"]),
        ("io soft:1M --offset=100", &["--offset 100", "4096"]),
        ("io soft:1M --offset=1M", &["--size 0", "4096"]),
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
    let names: Vec<_> = report["jobs"].as_array().unwrap().iter().map(|job| &job["jobname"]).collect();
    assert_eq!(names, ["first", "second"]);
    let ios = |job: usize, direction: &str| report["jobs"][job][direction]["total_ios"].as_u64().unwrap();
    assert_eq!((ios(0, "write"), ios(1, "read")), (64, 64));
    let lines = pinfold(&["io", &jobs, "--json"]).ok();
    assert_eq!(lines.lines().count(), 2);
    let text = pinfold(&["io", &jobs]).ok();
    assert!(text.starts_with("first: ") && text.contains("\nsecond: soft:1M: rw=randread"), "{text}");
    pinfold(&["io", &jobs, "--bs=8k"]).failed(2, &["--bs", "[global]"]);
    pinfold(&["io", &folder.arg("none.fio")]).failed(2, &["none.fio", "No such file", "file:"]);
    let bad = folder.file("bad.fio", b"[job]\nfilename=soft:1M\nbogus=1\n");
    pinfold(&["io", &bad]).failed(2, &["[job]", "--bogus"]);
    // With a kind it is a target.
    let line = format!("io file:{} --size 64k", folder.arg("target.fio"));
    pinfold(&words(&line)).ok();
}
