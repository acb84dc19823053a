//! `bench`: its output, its plots, and what it refuses. The measurements are tested with the suites.

use crate::common::{Folder, pinfold};

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
    let out = pinfold(&["bench", "page-pool", "--quick", "--runs", "1", "--plot", &folder.arg("a/b")]).ok();
    assert!(out.starts_with("page-pool: ") && out.contains("rx-512") && out.contains("3771046"), "{out}");
    let picture = std::fs::read_to_string(folder.path("a/b/page-pool.svg")).unwrap();
    assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n") && picture.contains("rx-512"));
}

#[test]
fn impossible_requests_are_refused_before_the_measurement() {
    pinfold(&["bench", "pools"]).failed(2, &["pools", "pool", "frame"]);
    pinfold(&["bench", "--runs", "0"]).failed(2, &["0", "--runs"]);
    let folder = Folder::new();
    let file = folder.file("file", b"");
    pinfold(&["bench", "--plot", &file]).failed(1, &[&file, "--plot"]);
}
