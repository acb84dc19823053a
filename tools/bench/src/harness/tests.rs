//! The order of the runs, and the records that they give.

use super::*;
use std::cell::RefCell;
use std::convert::Infallible;

#[test]
fn subjects_take_turns_and_round_0_does_not_count() {
    let order = RefCell::new(Vec::new());
    let subject = |name: &'static str, values: &'static [f64]| {
        let mut values = values.iter();
        let order = &order;
        Subject::countable(name, move |out: &mut Samples| -> Result<(), Infallible> {
            order.borrow_mut().push(name);
            out.figure("c", Metric::Count, "n", *values.next().unwrap());
            Ok(())
        })
    };
    let seen = RefCell::new(Vec::new());
    let progress = |at: Progress| seen.borrow_mut().push((at.subject, at.round));
    let harness = Harness::new("s", Options { runs: 4, quick: false }, &[], &progress);
    let records = harness
        .interleave(vec![
            subject("a", &[99.0, 4.0, 1.0, 3.0, 2.0]),
            subject("b", &[99.0, 7.0, 7.0, 7.0, 8.0]),
        ])
        .unwrap();
    assert_eq!(
        order.borrow()[..6],
        ["a", "b", "b", "a", "a", "b"],
        "neither always follows the other"
    );
    assert_eq!(seen.borrow()[..3], [("a", 0), ("b", 0), ("b", 1)]);
    let figures: Vec<_> =
        records.iter().map(|r| (r.subject, r.median, r.min, r.max, r.runs)).collect();
    assert_eq!(figures, [("a", 2.5, 1.0, 4.0, 4), ("b", 7.0, 7.0, 8.0, 4)]);
}

/// Cases are in the order of the subjects, whichever ran first, and figures of two units stay
/// apart.
#[test]
fn records_are_in_the_order_given() {
    let subject = |name, case, unit| {
        Subject::countable(name, move |out: &mut Samples| -> Result<(), Infallible> {
            out.figure(case, Metric::Count, unit, 1.0);
            out.figure(case, Metric::Count, "other", 2.0);
            Ok(())
        })
    };
    let harness = Harness::new("s", Options { runs: 5, quick: false }, &[], &|_| ());
    let subjects = vec![subject("b", "y", "n"), subject("a", "y", "n"), subject("b", "x", "n")];
    let records = harness.interleave(subjects).unwrap();
    let named: Vec<_> = records.iter().map(|r| (r.case, r.unit, r.subject, r.median)).collect();
    let expected = [
        ("y", "n", "b", 1.0),
        ("y", "n", "a", 1.0),
        ("y", "other", "b", 2.0),
        ("y", "other", "a", 2.0),
        ("x", "n", "b", 1.0),
        ("x", "other", "b", 2.0),
    ];
    assert_eq!(named, expected);
    assert!(records.iter().all(|r| r.runs == 5));
}

#[test]
fn once_is_once_and_counts() {
    let harness = Harness::new("s", Options { runs: 4, quick: true }, &[], &|_| ()).once();
    let subject = Subject::countable("a", |out: &mut Samples| -> Result<(), Infallible> {
        out.figure("c", Metric::Bytes, "bytes", 7.0);
        Ok(())
    });
    let records = harness.interleave(vec![subject]).unwrap();
    assert_eq!(records.iter().map(|r| (r.median, r.runs)).collect::<Vec<_>>(), [(7.0, 1)]);
    assert_eq!((harness.scale(7 * Harness::QUICK), harness.scale(5)), (7, 1));
}

#[test]
fn only_wanted_cases_are_measured() {
    let options = Options { runs: 1, quick: true };
    let some = Harness::new("s", options, &["a", "b"], &|_| ());
    assert!(some.wants("a") && !some.wants("c"));
    let none = some.cases(&["c"], || Err(BenchError::Thread)).unwrap();
    assert!(none.is_empty() && some.cases(&["c", "b"], || Err(BenchError::Thread)).is_err());
    assert!(Harness::new("s", options, &[], &|_| ()).wants("c"));
}

#[test]
fn a_record_whose_runs_disagree_is_marked() {
    let sample =
        Sample { case: "c", metric: Metric::Time, unit: "ns/op", value: 0.0, modelled: false };
    for (values, note) in [
        (vec![100.0, 96.0, 105.0], None),
        (vec![100.0, 94.0, 105.0], Some("spread above a tenth: not published")),
    ] {
        let mut record = record("iommu", "revoke", sample, values);
        record.check_spread();
        assert_eq!(record.note.as_deref(), note);
    }
}

#[test]
fn a_record_is_one_line_of_json() {
    let sample =
        Sample { case: "c", metric: Metric::Time, unit: "ns/op", value: 0.0, modelled: false };
    let line = record("pool", "pinfold", sample, vec![2.0, 1.5, 3.0]).to_json();
    assert_eq!(
        line,
        r#"{"suite":"pool","case":"c","subject":"pinfold","metric":"time","unit":"ns/op","median":2.0,"min":1.5,"max":3.0,"runs":3}"#
    );
    let options = Options { runs: 1, quick: true };
    let skipped = Harness::new("buffer", options, &[], &|_| ())
        .skipped("gather-8m", "no memory; fix: ulimit -l 1");
    assert_eq!(
        skipped.to_json(),
        r#"{"suite":"buffer","case":"gather-8m","subject":"pinfold","metric":"time","unit":"","median":null,"min":null,"max":null,"runs":0,"note":"no memory; fix: ulimit -l 1"}"#
    );
    let noted =
        Record { note: Some("plain pages".to_owned()), runs: 3, median: 1.0, ..skipped.clone() };
    let table = crate::Table(&[noted.clone(), noted, skipped]).to_string();
    let notes: Vec<_> = table.lines().skip(3).collect();
    assert_eq!(
        notes,
        ["gather-8m: plain pages", "gather-8m, skipped: no memory; fix: ulimit -l 1"]
    );
}
