//! `bench`: its output, its plots, and what it refuses. The measurements are tested with the
//! suites.

use crate::common::{Folder, finish_with, pinfold, skipped};
use std::process::Stdio;

#[test]
fn json_is_one_object_per_line_and_a_repeated_suite_runs_once() {
    let ended = pinfold(&["bench", "page-pool", "page-pool", "--quick", "--json", "--runs", "1"]);
    // Nothing but the objects, and no progress without a terminal.
    assert_eq!(ended.err, "");
    let out = ended.ok();
    let records: Vec<serde_json::Value> =
        out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |case: &str, subject: &str| {
        records
            .iter()
            .filter(|r| r["case"] == case && r["subject"] == subject && r["suite"] == "page-pool")
            .count()
    };
    assert_eq!((of("local", "pinfold"), of("rx-512", "array"), of("rx-512", "single")), (1, 1, 1));
    assert!(records.iter().all(|record| record["median"].is_f64() && record["runs"] == 1));
}

#[test]
fn a_table_ends_with_the_published_figures_and_plots_are_written() {
    let folder = Folder::new();
    let out =
        pinfold(&["bench", "page-pool", "--quick", "--runs", "1", "--plot", &folder.arg("a/b")])
            .ok();
    assert!(
        out.starts_with("page-pool: ") && out.contains("rx-512") && out.contains("3771046"),
        "{out}"
    );
    let picture = std::fs::read_to_string(folder.path("a/b/page-pool.svg")).unwrap();
    assert!(
        picture.starts_with("<svg ") && picture.ends_with("</svg>\n") && picture.contains("rx-512")
    );
}

#[test]
fn servers_are_measured_beside_each_other_or_the_packages_are_named() {
    let mut bare = std::process::Command::new(env!("CARGO_BIN_EXE_pinfold"));
    bare.args(["bench", "serve", "--json"])
        .env("PATH", "")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let packages = "sudo apt-get install fio libnbd-bin nbdkit qemu-utils";
    finish_with(bare).failed(1, &["fio, nbdcopy, nbdkit, qemu-nbd missing", packages]);

    let ended = pinfold(&["bench", "serve", "--quick", "--json", "--runs", "1"]);
    if ended.code == Some(1) && ended.err.contains("apt-get install") {
        return skipped(&ended.err);
    }
    let out = ended.ok();
    let records: Vec<serde_json::Value> =
        out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let figures = |case: &str, unit: &str| {
        let of = records.iter().filter(|r| r["case"] == case && r["unit"] == unit);
        of.map(|r| (r["subject"].as_str().unwrap(), r["median"].as_f64().unwrap() > 0.0))
            .collect::<Vec<_>>()
    };
    let all =
        ["pinfold", "nbdkit-file", "qemu-nbd", "qemu-nbd-uring", "nbdkit-memory", "pinfold-soft"]
            .map(|name| (name, true));
    for case in ["read-4k-16", "write-4k-16"] {
        assert_eq!(figures(case, "requests/s"), all, "{case}");
        assert_eq!(figures(case, "us p99"), all, "{case}");
        assert_eq!(figures(case, "us CPU/request").len(), all.len(), "{case}");
    }
    for case in ["read-1m-16", "write-1m-16", "nbdcopy-read", "nbdcopy-write"] {
        assert_eq!(figures(case, "MiB/s"), all, "{case}");
    }
    let pages = ["single", "list", "array", "pinfold-arena"].map(|name| (name, true));
    assert_eq!(figures("rpc-259", "ns/page refilled"), pages);
    assert!(
        records.iter().all(|r| r["modelled"].is_boolean() == (r["subject"] == "pinfold-soft")),
        "{out}"
    );
}

#[test]
fn impossible_requests_are_refused_before_the_measurement() {
    pinfold(&["bench", "pools"]).failed(2, &["pools", "pool", "frame"]);
    pinfold(&["bench", "--runs", "0"]).failed(2, &["0", "--runs"]);
    let folder = Folder::new();
    let file = folder.file("file", b"");
    pinfold(&["bench", "--plot", &file]).failed(1, &[&file, "--plot"]);
}
