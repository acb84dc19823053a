//! The picture is well-formed SVG with the expected marks.

use super::*;

fn record(case: &'static str, subject: &'static str, median: f64) -> Record {
    Record::of_runs("s", case, subject, Metric::Time, median)
}

/// Checks that all elements are closed in order, and returns the number of each.
fn elements(svg: &str) -> std::collections::BTreeMap<String, usize> {
    let (mut open, mut seen) = (Vec::new(), std::collections::BTreeMap::new());
    let mut rest = svg;
    while let Some(at) = rest.find('<') {
        let (text, tag) = rest.split_at(at);
        assert!(!text.contains('>'), "{text:?}");
        let (tag, after) = tag[1..].split_once('>').unwrap();
        let name: String = tag.chars().take_while(|c| c.is_alphanumeric()).collect();
        if let Some(closed) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(closed));
        } else {
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            *seen.entry(name.clone()).or_default() += 1;
            if !tag.ends_with('/') {
                open.push(name);
            }
        }
        rest = after;
    }
    assert_eq!((open.len(), rest.trim()), (0, ""));
    seen
}

fn count(svg: &str, word: &str) -> usize {
    svg.matches(word).count()
}

#[test]
fn a_log_axis_is_labelled_and_has_marks_and_ticks() {
    let records =
        [record("a", "pinfold", 1.0), record("a", "inblock", 10.0), record("b", "pinfold", 100.0)];
    let svg = Plot { title: "s", records: &records }.to_string();
    let seen = elements(&svg);
    // The legend has two marks more; each mark has a title, as has the whole.
    assert_eq!(
        (seen["svg"], seen["rect"], seen["circle"], seen["title"]),
        (1, 1, 2 + records.len(), 4)
    );
    assert_eq!(count(&svg, "ns/op, log axis"), 2, "one for each panel");
    for tick in ["0.1", "1", "10", "100", "1000"] {
        assert_eq!(count(&svg, &format!(r#"text-anchor="middle">{tick}</text>"#)), 2, "{tick}");
    }
}

#[test]
fn an_axis_from_0_has_bars_and_does_not_say_log() {
    let records = [record("a", "pinfold", 10.0), record("a", "inblock", 20.0)];
    let svg = Plot { title: "s", records: &records }.to_string();
    assert_eq!((elements(&svg)["rect"], count(&svg, "log")), (1 + records.len(), 0));
    let bars: Vec<f64> = svg
        .split("<rect x=")
        .skip(1)
        .map(|rect| rect.split('"').nth(5).unwrap().parse().unwrap())
        .collect();
    assert!((bars[1] - 2.0 * bars[0]).abs() < 0.2, "twice as much is twice as long: {bars:?}");
    assert!(svg.contains(r#"text-anchor="middle">0</text>"#));
}

/// Two figures of one case in two units are two panels, each with its own axis.
#[test]
fn each_panel_is_a_case_and_a_unit() {
    let ms = Record { unit: "ms", ..record("a", "pinfold", 5.0) };
    let svg = Plot { title: "s", records: &[record("a", "pinfold", 10.0), ms] }.to_string();
    assert_eq!((count(&svg, ">ns/op</text>"), count(&svg, ">ms</text>")), (1, 1));
    assert!(svg.contains("a, pinfold: 10.0 (5.00 to 20.0, 3 runs) ns/op"), "{svg}");
}

#[test]
fn odd_figures_and_words_leave_it_whole() {
    let records = [
        record("a<b&c", "\"x\"", 0.0),
        record("a<b&c", "y", f64::NAN),
        record("c", "z", f64::INFINITY),
    ];
    let svg = Plot { title: "<&>", records: &records }.to_string();
    elements(&svg);
    assert!(svg.contains("a&lt;b&amp;c") && svg.contains("&quot;x&quot;"));
    elements(&Plot { title: "none", records: &[] }.to_string());
}

#[test]
fn a_skipped_case_has_no_panel() {
    let skipped = Record { runs: 0, ..record("b", "pinfold", f64::NAN) };
    let svg = Plot { title: "s", records: &[record("a", "pinfold", 1.0), skipped] }.to_string();
    let alone = Plot { title: "s", records: &[record("a", "pinfold", 1.0)] }.to_string();
    assert_eq!(svg, alone);
}
