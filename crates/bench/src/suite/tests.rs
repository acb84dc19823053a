//! Quick runs of every suite: the cases are complete, and each record has the promised members.

use super::{Record, Suite};
use crate::harness::{COUNTS_RMW, Options};
use crate::policy::PolicyKind;
use crate::record::Metric;
use std::collections::BTreeSet;

fn run(suite: &str) -> Vec<Record> {
    Suite::named(suite).unwrap().run(Options { runs: 1, quick: true }, &|_| ()).unwrap()
}

/// Expands the names of a listing: `pair-16, -64` is `pair-16` and `pair-64`; `pair-...-nowrite` is
/// any size.
fn names(entries: &'static [super::Entry]) -> Names {
    let mut all = Vec::new();
    for (name, _) in entries {
        let parts: Vec<&str> = name.split(", ").collect();
        let first = parts[0];
        all.push(first.to_owned());
        for part in &parts[1..] {
            match (part.strip_prefix('-'), first.rsplit_once('-')) {
                // `mpt3sas-free, -free-random` replaces the last word as well.
                (Some(_), Some((stem, _))) => all.push(format!("{stem}{part}")),
                (Some(_), None) | (None, _) => all.push((*part).to_owned()),
            }
        }
    }
    Names(all)
}

struct Names(Vec<String>);

impl Names {
    fn contains(&self, name: &str) -> bool {
        self.0.iter().any(|known| match known.split_once("...") {
            Some((start, end)) => name.starts_with(start) && name.ends_with(end),
            None => known == name,
        })
    }
}

/// The documentation shows the listing that the program prints.
#[test]
fn the_documentation_has_the_current_listing() {
    let page =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/benchmarks.md"))
            .unwrap();
    let listing = super::Listing.to_string();
    assert!(
        page.contains(&listing),
        "docs/benchmarks.md is out of date: run scripts/readme --list"
    );
}

fn cases(records: &[Record]) -> BTreeSet<&str> {
    records.iter().map(|record| record.case).collect()
}

fn subjects<'r>(records: &'r [Record], case: &str) -> Vec<&'r str> {
    records.iter().filter(|record| record.case == case).map(|record| record.subject).collect()
}

/// Checks the figures of a case that was measured once.
fn check_figures(line: &str, object: &serde_json::Value) {
    let figure = |name: &str| object[name].as_f64().unwrap();
    assert!(0.0 <= figure("min") && figure("min") <= figure("median"), "{line}");
    assert!(figure("median") <= figure("max"), "{line}");
    // A strict policy leaves nothing reachable, and the walks of a table that never changes round
    // to nothing.
    let may_be_zero = object["metric"] != "time"
        || ["us reachable", "us walking"].iter().any(|unit| object["unit"] == *unit);
    assert!(may_be_zero || figure("min") > 0.0, "{line}");
    assert_eq!(object["runs"], 1);
}

/// Checks that each line is an object with exactly the promised members.
fn lines_are_well_formed(suite: &str, records: &[Record]) {
    let mut seen = BTreeSet::new();
    for record in records {
        let line = record.to_json();
        assert!(!line.contains('\n'));
        let object: serde_json::Value = serde_json::from_str(&line).unwrap();
        let mut members: BTreeSet<&str> =
            object.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(members.remove("note"), record.note.is_some(), "{line}");
        assert_eq!(members.remove("modelled"), record.modelled, "{line}");
        let expected =
            ["suite", "case", "subject", "metric", "unit", "median", "min", "max", "runs"];
        assert_eq!(members, BTreeSet::from(expected), "{line}");
        assert_eq!(object["suite"], suite);
        assert!(
            ["time", "rate", "bytes", "count", "segments"]
                .contains(&object["metric"].as_str().unwrap())
        );
        if record.is_measured() {
            check_figures(&line, &object);
        } else {
            assert!(object["median"].is_null() && object["note"].is_string(), "{line}");
        }
        assert!(seen.insert((record.case, record.subject, record.unit)), "recorded twice: {line}");
        let explained = Suite::named(suite).unwrap();
        assert!(
            names(explained.cases).contains(record.case),
            "case {} is not in the listing",
            record.case
        );
        assert!(
            names(explained.subjects).contains(record.subject),
            "subject {} is not in the listing",
            record.subject
        );
    }
}

#[test]
fn pool_has_its_cases_and_subjects() {
    let records = run("pool");
    lines_are_well_formed("pool", &records);
    let mut expected = vec![
        "mpt3sas-alloc",
        "mpt3sas-free",
        "mpt3sas-free-random",
        "mpt3sas-alloc-nowrite",
        "mpt3sas-write",
        "pair-16",
        "pair-16-nowrite",
        "pair-64",
        "pair-64-nowrite",
        "pair-64-2t",
        "pair-256",
        "pair-256-nowrite",
        "pair-1024",
        "pair-1024-nowrite",
        "pair-4096",
        "pair-4096-nowrite",
        "bulk-32",
        "bulk-512",
        "random-4096",
        "out-4096",
        "queue-64",
        "queue-4096",
        "remote-free",
        "owners-64",
    ];
    let scale = [
        "grow-full-1g",
        "grow-full-256g",
        "locals-1024",
        "metadata",
        "free-random-100k",
        "free-random-10m",
        "held-2t-pipe",
        "held-2t-random",
        "held-2t-waves",
    ];
    let timed = expected.clone();
    expected.extend(if COUNTS_RMW { &[][..] } else { &scale });
    assert_eq!(cases(&records), BTreeSet::from_iter(expected));
    if COUNTS_RMW {
        assert!(records.iter().all(|record| record.subject.starts_with("pinfold")));
        counted(&records, ("pair-64", "pinfold", "locks/op"), 0.0);
        counted(&records, ("pair-64", "pinfold", "rmw/op"), 0.0);
        // A raw free claims its block. Each of the pool's own calls takes a lock: one
        // read-modify-write.
        counted(&records, ("pair-64", "pinfold-raw", "rmw/op"), 1.0);
        counted(&records, ("pair-64", "pinfold-shared", "locks/op"), 2.0);
        counted(&records, ("pair-64", "pinfold-shared", "rmw/op"), 3.0);
        return;
    }
    let all = [
        "pinfold",
        "inblock",
        "pinfold-raw",
        "rbtree",
        "pinfold-shared",
        "lifo",
        "malloc",
        "thread-list",
    ];
    for case in ["mpt3sas-alloc", "mpt3sas-free", "mpt3sas-free-random"] {
        assert_eq!(subjects(&records, case), [&all[..], &["linear"]].concat());
    }
    assert_eq!(subjects(&records, "pair-64")[..3], ["pinfold", "pinfold-raw", "pinfold-shared"]);
    for case in timed.iter().chain(&["free-random-100k"]) {
        if ["remote-free", "owners-64"].contains(case) {
            continue;
        }
        assert!(subjects(&records, case).contains(&"thread-list"), "{case} has no floor");
    }
    let figure = |case: &str, unit: &str| {
        let found = records.iter().find(|r| (r.case, r.subject, r.unit) == (case, "pinfold", unit));
        found.map(|r| r.median).unwrap_or_else(|| panic!("no {unit} in {case}"))
    };
    // These do not depend on the machine. A quick run has fewer owners.
    assert_eq!(
        figure("locals-1024", "owners with one"),
        if cfg!(debug_assertions) { 4.0 } else { 64.0 }
    );
    let each = figure("metadata", "bytes/block");
    assert!((4.5..5.5).contains(&each), "{each}");
    for case in ["held-2t-pipe", "held-2t-random", "held-2t-waves"] {
        assert!(figure(case, "(held-const)/live") <= 2.0, "{case}");
        assert!(figure(case, "MiB held") >= figure(case, "MiB live, peak"), "{case}");
    }
}

/// Checks a count, which does not depend on the machine.
fn counted(records: &[Record], (case, subject, unit): (&str, &str, &str), expected: f64) {
    let record = records.iter().find(|r| (r.case, r.subject, r.unit) == (case, subject, unit));
    assert_eq!(record.map(|r| r.median), Some(expected), "{case} {subject} {unit}");
}

#[test]
fn frame_has_its_cases_and_subjects() {
    let records = run("frame");
    lines_are_well_formed("frame", &records);
    let mut expected = BTreeSet::from([
        "pair-4k",
        "pair-4k-nowrite",
        "pair-4k-2t",
        "owners-64",
        "pair-2m",
        "pair-2m-nowrite",
        "fill-64",
        "fill-512",
        "alloc-2m",
        "random-4096",
        "free-all",
        "random-free",
        "random-free-all",
        "rpc-259",
    ]);
    if COUNTS_RMW {
        assert!(records.iter().all(|record| ["rmw/op", "locks/op"].contains(&record.unit)));
    } else {
        expected.extend(["churn-70", "zone-1t", "refused-1t"]);
        assert_eq!(subjects(&records, "rpc-259")[..3], ["single", "list", "array"]);
    }
    assert_eq!(cases(&records), expected);
}

/// Machines with a device run it in the tests of the virtual machine.
#[test]
fn vfio_is_measured_or_reports_why_not() {
    let suite = Suite::named("vfio").unwrap();
    let ran = suite.run(Options { runs: 1, quick: true }, &|_| ());
    match (suite.unable(), ran) {
        (None, Ok(records)) => lines_are_well_formed("vfio", &records),
        (Some(why), Err(error)) => assert_eq!(error.to_string(), why),
        (unable, ran) => panic!("{unable:?}, {ran:?}"),
    }
}

/// The program's own tests run it: without the program there is nothing to serve with.
#[test]
fn serve_reports_what_is_missing() {
    let suite = Suite::named("serve").unwrap();
    let ran = suite.run(Options { runs: 1, quick: true }, &|_| ());
    match ran {
        Ok(records) => assert!(COUNTS_RMW && records.is_empty()),
        Err(error) => assert_eq!(Some(error.to_string()), suite.unable()),
    }
}

#[test]
fn page_pool_has_its_cases_and_subjects() {
    let records = run("page-pool");
    lines_are_well_formed("page-pool", &records);
    let expected = BTreeSet::from(["local", "local-nowrite", "local-64", "ring", "slow", "rx-512"]);
    if COUNTS_RMW {
        assert!(records.iter().all(|record| ["rmw/op", "locks/op"].contains(&record.unit)));
    } else {
        assert_eq!(
            subjects(&records, "rx-512"),
            ["pinfold", "pinfold-bulk", "single", "list", "array"]
        );
        assert_eq!(
            subjects(&records, "local"),
            ["pinfold", "pinfold-raw", "single", "lifo", "thread-list"]
        );
    }
    assert_eq!(cases(&records), expected);
}

#[test]
fn buffer_has_its_cases_and_subjects() {
    let records = run("buffer");
    if COUNTS_RMW {
        assert!(records.is_empty());
        return;
    }
    lines_are_well_formed("buffer", &records);
    let own = ["register-1g", "gather-8m", "gather-8m-prp"];
    let mut expected = BTreeSet::from(own);
    expected.extend(["register-1g-model", "locate", "locate-1"]);
    for case in ["copy-64", "copy-512", "copy-4k", "copy-64k", "copy-1m", "copy-8m"] {
        assert_eq!(subjects(&records, case), ["pinfold", "memcpy"]);
        expected.insert(case);
    }
    let all = cases(&records);
    if all.contains("io-submit") {
        expected.extend(["io-submit", "io-submit-1"]);
        let four = ["pinfold", "unregistered", "pages-4k", "pages-4k-unregistered"];
        assert_eq!(subjects(&records, "io-submit"), four);
    }
    assert_eq!(all, expected);
    let figure = |case: &str, subject: &str, metric| {
        records
            .iter()
            .find(|r| (r.case, r.subject, r.metric) == (case, subject, metric))
            .unwrap()
            .median
    };
    // These do not depend on the machine.
    let table = |case, subject| figure(case, subject, Metric::Bytes);
    assert!(
        table("register-1g-model", "pages-4k") / table("register-1g-model", "pinfold") >= 500.0
    );
    for record in records.iter().filter(|record| own.contains(&record.case)) {
        let note = record.note.as_deref().unwrap();
        assert!(!record.is_measured() || note.starts_with("1 GiB, "), "{note}");
    }
    if records.iter().any(|record| own.contains(&record.case) && !record.is_measured()) {
        return;
    }
    assert_eq!(table("register-1g", "pages-4k"), 16.0 * 262_144.0);
    assert_eq!(figure("gather-8m", "pages-4k", Metric::Segments), 2048.0);
    assert!((1.0..=2048.0).contains(&figure("gather-8m", "pinfold", Metric::Segments)));
    for subject in ["pinfold", "pages-4k"] {
        assert_eq!(figure("gather-8m-prp", subject, Metric::Segments), 2048.0);
    }
}

#[test]
fn iommu_has_its_cases_and_subjects() {
    let records = run("iommu");
    lines_are_well_formed("iommu", &records);
    let timed = ["iova-pair", "iova-128", "map-4k", "clear-4k", "map-1m", "clear-1m"];
    let mut expected = BTreeSet::from(timed);
    expected.extend(["domain-4k", "domain-4k-batch", "domain-1m"]);
    let bounced = ["bounce-64", "bounce-256", "bounce-1k", "bounce-4k", "bounce-8k", "bounce-16k"];
    expected.extend(bounced);
    if COUNTS_RMW {
        assert_eq!(cases(&records), expected);
        assert!(records.iter().all(|record| ["rmw/op", "locks/op"].contains(&record.unit)));
        return;
    }
    expected.extend(["rr-1", "rr-2", "rr-16", "rr-200"]);
    expected.extend(["iova-worst", "static-50k", "tables-16t", "live-1k", "live-1m", "flush-64p"]);
    expected.insert("revoke-many-1m");
    assert_eq!(cases(&records), expected);
    let ladder: Vec<&str> = PolicyKind::ALL.into_iter().map(PolicyKind::name).collect();
    let figure = |case: &str, subject: &str, unit: &str| {
        let record = records.iter().find(|r| (r.case, r.subject, r.unit) == (case, subject, unit));
        record.map(|r| r.median).unwrap_or_else(|| panic!("no {unit} of {subject} in {case}"))
    };
    for case in ["rr-1", "rr-2", "rr-16", "rr-200"] {
        let rates = |unit: &str| {
            let rates =
                records.iter().filter(|r| (r.case, r.metric, r.unit) == (case, Metric::Rate, unit));
            rates.map(|r| r.subject).collect::<Vec<_>>()
        };
        let expected: Vec<&str> = ladder.iter().copied().chain(["copies"]).collect();
        assert_eq!(rates("transactions/s"), expected, "{case}");
        let awaited = if case == "rr-200" { &ladder[..] } else { &[] };
        assert_eq!(rates("per s, walks awaited"), awaited, "{case}");
        assert!(
            records
                .iter()
                .filter(|r| r.case == case)
                .all(|r| { r.modelled == (r.subject != "copies") && r.unit != "ns/op" })
        );
        let note = |r: &Record| r.note.as_deref().is_some_and(|note| note.starts_with("buffers: "));
        assert!(
            records.iter().all(|r| note(r) == r.case.starts_with("rr-")),
            "which pages the buffers have"
        );
        for policy in &ladder {
            let (reads, us) =
                (figure(case, policy, "walk reads/op"), figure(case, policy, "us walking"));
            assert!(
                (us - reads * 0.197).abs() <= 1e-6 * us,
                "{case}, {policy}: {reads} reads, {us} us"
            );
        }
        for strict in ["magazines-strict", "identity", "pinfold-strict"] {
            assert_eq!(
                (figure(case, strict, "us reachable"), figure(case, strict, "bytes held")),
                (0.0, 0.0)
            );
        }
    }
    for case in bounced {
        let of = |subject| {
            let record = records.iter().find(|r| (r.case, r.subject) == (case, subject)).unwrap();
            (record.modelled, record.median > 0.0)
        };
        assert_eq!(["bounced", "pinfold"].map(of), [(false, true); 2], "{case}");
        assert_eq!(["pinfold-strict", "pinfold-batch"].map(of), [(true, true); 2], "{case}");
        // Two flushes of 1 us, each awaited.
        assert!(figure(case, "pinfold-strict", "ns/op") >= 2000.0, "{case}");
    }
    assert!(figure("revoke-many-1m", "pinfold", "us, longest call") > 0.0);
    assert!(
        figure("revoke-many-1m", "pinfold", "us, longest once")
            >= figure("revoke-many-1m", "pinfold", "us, longest call")
    );
    for subject in
        ["pinfold-revoke", "pinfold-ahead", "magazines", "magazines-ahead", "handles-only"]
    {
        assert!(
            ["live-1k", "live-1m"].iter().all(|case| figure(case, subject, "ns/op") > 0.0),
            "{subject}"
        );
    }
    assert!(
        figure("live-1m", "pinfold-revoke", "us, longest once")
            >= figure("live-1m", "pinfold-revoke", "us, longest call")
    );
    assert!(
        figure("rr-200", "pinfold-batch", "per s, no packets") > 0.0
            && figure("rr-200", "none", "per s, no packets") > 0.0
    );
    assert!(figure("revoke-many-1m", "pinfold", "calls meanwhile") >= 2.0);
    // These do not depend on the machine.
    assert_eq!(figure("static-50k", "tree-2015", "entries"), 50_000.0);
    assert!(figure("static-50k", "tree-merged", "entries") <= 10.0);
    assert!(figure("static-50k", "pinfold-shared", "entries") <= 10.0);
    assert_eq!(figure("flush-64p", "pinfold", "invalidations"), 1.0);
    assert_eq!(figure("flush-64p", "magazines-strict", "invalidations"), 64.0);
    assert!(figure("tables-16t", "pinfold", "bytes left") <= 1_048_576.0);
}

/// As root; elsewhere each case says why it is skipped.
#[test]
fn receive_has_its_cases_and_subjects() {
    let records = run("receive");
    if COUNTS_RMW {
        assert!(records.is_empty());
        return;
    }
    lines_are_well_formed("receive", &records);
    let sockets = ["rx-64", "rx-1500", "rx-64-2t", "rx-1500-2t", "turns-64", "turns-1500"];
    let expected: BTreeSet<&str> = sockets.into_iter().chain(["pool-calls"]).collect();
    assert_eq!(cases(&records), expected);
    for case in sockets {
        let of = |unit: &str| {
            let same =
                records.iter().filter(|r| r.case == case && r.unit == unit && r.median > 0.0);
            same.map(|r| r.subject).collect::<Vec<_>>()
        };
        let skipped = records.iter().find(|r| r.case == case && !r.is_measured());
        match skipped.map(|r| r.note.as_deref()) {
            Some(note) => eprintln!("SKIPPED: {case}: {}", note.unwrap()),
            None => {
                let five = ["page-pool", "single", "list", "array", "static-umem"];
                assert_eq!(of("ns CPU/packet"), five, "{case}");
                if case.starts_with("turns") {
                    continue;
                }
                assert_eq!(of("packets/s"), five, "{case}");
                let dropped =
                    records.iter().filter(|r| r.case == case && r.unit == "packets dropped");
                assert_eq!(dropped.filter(|r| r.min >= 0.0).count(), five.len(), "{case}");
            }
        }
    }
}
