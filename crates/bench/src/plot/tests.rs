//! A picture that no viewer opens shows nothing.

use super::*;

fn record(case: &'static str, subject: &'static str, median: f64) -> Record {
    let (min, max, metric) = (median / 2.0, median * 2.0, Metric::Time);
    Record { suite: "s", case, subject, metric, unit: "ns/op", median, min, max, runs: 3, modelled: false }
}

/// Whether all elements are closed in the order in which they were opened; returns how many there are of each name.
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

fn widths(svg: &str) -> Vec<f64> {
    svg.split("<rect x=").skip(1).map(|rect| rect.split('"').nth(5).unwrap().parse().unwrap()).collect()
}

#[test]
fn each_record_has_a_bar_and_tenfold_is_equally_longer() {
    let records = [record("a", "pinfold", 1.0), record("a", "inblock", 10.0), record("b", "pinfold", 100.0)];
    let svg = Plot { title: "s", records: &records }.to_string();
    let seen = elements(&svg);
    assert_eq!((seen["svg"], seen["rect"], seen["title"]), (1, 1 + records.len(), 1));
    let [one, ten, hundred] = widths(&svg)[..] else { panic!("{svg}") };
    assert!(one > 0.0 && ((hundred - ten) - (ten - one)).abs() < 0.3, "{one} {ten} {hundred}");
}

#[test]
fn odd_figures_and_words_leave_it_whole() {
    let records =
        [record("a<b&c", "\"x\"", 0.0), record("a<b&c", "y", f64::NAN), record("c", "z", f64::INFINITY)];
    let svg = Plot { title: "<&>", records: &records }.to_string();
    elements(&svg);
    assert!(svg.contains("a&lt;b&amp;c") && svg.contains("&quot;x&quot;"));
    assert!(widths(&svg).iter().all(|width| (0.0..=RIGHT).contains(width)), "{svg}");
    elements(&Plot { title: "none", records: &[] }.to_string());
}
