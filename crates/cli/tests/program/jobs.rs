//! `io` with several jobs, with interrupts or polling, and its durations.

use crate::common::{Folder, bytes, pinfold, words};

fn json(line: &str) -> serde_json::Value {
    pinfold(&words(&format!("io {line} --json"))).json()
}

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
fn durations_are_written_as_in_fio() {
    for (time, least, most) in [("300ms", 0.3, 0.9), ("1s", 1.0, 1.9)] {
        let result = json(&format!(
            "soft:1M --rw randread --runtime {time} --time_based --numjobs 2 --iodepth 2"
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
