//! The selection of cases, and the explanations of the listing.

use super::*;
use crate::record::Metric;
use std::collections::BTreeSet;

fn selected(names: &[&str]) -> Vec<(&'static str, Vec<&'static str>)> {
    let selection: Vec<_> = names.iter().map(|name| Selection::parse(name).unwrap()).collect();
    Selection::suites(&selection).map(|(suite, cases)| (suite.name, cases)).collect()
}

#[test]
fn suites_and_cases_are_selected_once() {
    assert_eq!(selected(&[]).len(), SUITES.len());
    assert_eq!(
        selected(&["iommu/rr-1", "pool", "iommu/rr-2"]),
        [("pool", vec![]), ("iommu", vec!["rr-1", "rr-2"])]
    );
    assert_eq!(selected(&["pool/pair-64", "pool"]), [("pool", vec![])]);
}

#[test]
fn unknown_names_are_refused_with_those_that_exist() {
    assert!(Selection::parse("pools").unwrap_err().contains("pool, frame"));
    assert!(Selection::parse("pool/pair").unwrap_err().contains("pair-64, pair-64-2t"));
}

/// Runs a suite once and checks that its records have the cases and subjects of the listing.
fn complete(name: &str, skippable: bool) -> Vec<Record> {
    let suite = SUITES.iter().find(|suite| suite.name == name).unwrap();
    let records = suite.run(Options { runs: 1, quick: true }, &[], &|_| ()).unwrap();
    if crate::harness::COUNTS_RMW {
        return records;
    }
    let names = |entries: &[Entry]| entries.iter().map(|(name, _)| *name).collect::<BTreeSet<_>>();
    let cases: BTreeSet<_> = records.iter().map(|record| record.case).collect();
    assert_eq!(cases, names(suite.cases));
    let measured = records.iter().all(Record::is_measured);
    assert!(measured || skippable, "{records:#?}");
    let subjects: BTreeSet<_> = records.iter().map(|record| record.subject).collect();
    if measured {
        assert_eq!(subjects, names(suite.subjects));
    }
    for record in records.iter().filter(|record| record.is_measured()) {
        let ordered = 0.0 <= record.min && record.min <= record.median;
        assert!(ordered && record.median <= record.max, "{record:?}");
        // A policy that does not wait or that leaves nothing reachable has a time of 0.
        let may_be_zero = record.metric != Metric::Time || record.modelled;
        assert!(may_be_zero || record.min > 0.0, "{record:?}");
    }
    records
}

#[test]
fn the_suites_of_allocators_are_complete() {
    let _: Vec<_> = ["pool", "frame", "page-pool"].map(|name| complete(name, false)).to_vec();
}

/// Registering memory may exceed what may be pinned; without O_DIRECT nothing is submitted.
#[test]
fn a_buffer_needs_a_few_segments_where_pages_need_thousands() {
    let suite = SUITES.iter().find(|suite| suite.name == "buffer").unwrap();
    let records = suite.run(Options { runs: 1, quick: true }, &[], &|_| ()).unwrap();
    let segments = |subject| {
        let found = records.iter().find(|record| {
            (record.case, record.subject, record.unit) == ("gather-8m", subject, "segments")
        });
        found.map(|record| record.median)
    };
    if let Some(each) = segments("pages-4k") {
        assert!(each == 2048.0 && segments("pinfold").unwrap() <= each, "{records:#?}");
    }
}

#[test]
fn protection_is_measured_with_its_accounts_apart() {
    let records = complete("iommu", false);
    let figure = |subject, unit| {
        let of = |r: &&Record| (r.case, r.subject, r.unit) == ("rr-1", subject, unit);
        records.iter().find(of).unwrap_or_else(|| panic!("{subject}, {unit}")).median
    };
    // A wait for each of two unmaps, at most one for sixteen, none. On a busy machine a short run of
    // one subject may end before its first transaction, and has no wait then.
    let strict = ["strict", "linux-strict"].map(|subject| figure(subject, "waits/op"));
    assert!(strict.iter().all(|&waits| waits > 1.5 || waits == 0.0), "{strict:?}");
    let most = strict.into_iter().fold(0.0, f64::max);
    // A short run may end before the first flush of those that gather, or before any wait.
    let batch = figure("batch", "waits/op");
    assert!(batch < most || most == 0.0 && batch <= 1.0, "{batch} of {most}");
    assert_eq!((figure("static", "waits/op"), figure("none", "waits/op")), (0.0, 0.0));
    // A flush may complete before a thread that is interrupted looks: a wait may take no time.
    let waited = ["static", "none"].map(|subject| figure(subject, "ns waited/op"));
    assert_eq!(waited, [0.0; 2]);
    let device = |subject| figure(subject, "ns device CPU/op") > 0.0;
    assert!(["none", "static", "batch", "strict"].into_iter().any(device));
}

/// Without root or virtual interfaces its cases are skipped.
#[test]
fn reception_is_complete_or_says_what_it_needs() {
    complete("receive", true);
}

#[test]
fn a_suite_that_cannot_run_says_why() {
    for name in ["serve", "protect", "io", "testpmd", "vfio"] {
        let suite = SUITES.iter().find(|suite| suite.name == name).unwrap();
        let Some(why) = suite.unable() else { continue };
        let ran = suite.run(Options { runs: 1, quick: true }, &[], &|_| ());
        match ran {
            Err(error) => assert_eq!(error.to_string(), why),
            Ok(records) => assert!(records.is_empty(), "{name}: {why}"),
        }
    }
}
