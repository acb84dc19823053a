//! The output of a case: counts, messages that the library returned, and promises with whether they
//! held.

use crate::cases::Case;
use std::fmt;

/// Columns of the text.
const WIDTH: usize = 96;

/// The report of one case.
pub(crate) struct Report {
    case: &'static Case,
    lines: Vec<Line>,
}

enum Line {
    /// A heading of the lines below it.
    Section(&'static str),
    /// A number that was counted.
    Figure { name: &'static str, value: u64, unit: &'static str },
    /// A message of the library.
    Said { name: &'static str, text: String },
    /// A promise, and whether it held.
    Promise { text: &'static str, held: bool },
    /// A facility that this machine lacks, and the part that was skipped for that reason.
    Note(String),
}

impl Report {
    pub(crate) fn new(case: &'static Case) -> Self {
        Self { case, lines: Vec::new() }
    }

    /// Begins a group of lines.
    pub(crate) fn section(&mut self, heading: &'static str) {
        self.lines.push(Line::Section(heading));
    }

    /// Adds a number that was counted.
    pub(crate) fn figure(
        &mut self,
        name: &'static str,
        value: impl TryInto<u64>,
        unit: &'static str,
    ) {
        let value = value.try_into().unwrap_or(u64::MAX);
        self.lines.push(Line::Figure { name, value, unit });
    }

    /// Adds a message of the library.
    pub(crate) fn said(&mut self, name: &'static str, message: impl fmt::Display) {
        self.lines.push(Line::Said { name, text: message.to_string() });
    }

    /// Adds a promise, and whether it held.
    pub(crate) fn promise(&mut self, text: &'static str, held: bool) {
        self.lines.push(Line::Promise { text, held });
    }

    /// Adds what this machine lacks, and what was left out for that.
    pub(crate) fn note(&mut self, text: impl fmt::Display) {
        self.lines.push(Line::Note(text.to_string()));
    }

    /// Returns whether there are promises, and all of them held.
    pub(crate) fn held(&self) -> bool {
        let promises = || self.lines.iter().filter(|line| matches!(line, Line::Promise { .. }));
        promises().count() > 0
            && promises().all(|line| matches!(line, Line::Promise { held: true, .. }))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { name, title, issues, .. } = self.case;
        writeln!(f, "{name}: {title}")?;
        issues.iter().try_for_each(|issue| writeln!(f, "published: {issue}"))?;
        for line in &self.lines {
            match line {
                Line::Section(heading) => writeln!(f, "{heading}:")?,
                Line::Figure { name, value, unit } => {
                    let value = grouped(*value);
                    writeln!(f, "  {}", format!("{name:<60} {value:>18} {unit}").trim_end())?;
                }
                Line::Said { name, text } => wrapped(f, &format!("{name}: {text}"))?,
                Line::Promise { text, held } => {
                    writeln!(f, "  {:<6} {text}", if *held { "held" } else { "BROKEN" })?;
                }
                Line::Note(text) => writeln!(f, "  note: {text}")?,
            }
        }
        Ok(())
    }
}

/// Returns the number with commas between groups of three digits.
fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(",")
}

/// Writes the text in lines of at most [`WIDTH`] columns, where its words permit.
fn wrapped(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    let mut line = String::from(" ");
    for word in text.split_whitespace() {
        if line.len() + 1 + word.len() > WIDTH && !line.trim().is_empty() {
            writeln!(f, "{line}")?;
            line = String::from("   ");
        }
        line.push(' ');
        line.push_str(word);
    }
    writeln!(f, "{line}")
}
