//! Reads the summaries of the counted paths from standard input (JSON, one a line) and compares
//! them with the record.
//!
//! `compare FILE COMPILER` compares, `compare --record FILE COMPILER` writes the record.

use pinfold_instructions::{OPERATIONS, PATHS};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::ExitCode;

/// The increase over the recorded count that fails: this share, and at least [`LEAST`]
/// instructions.
const SHARE: f64 = 0.1;
/// One instruction may move with an unrelated change of the code around the loop.
const LEAST: f64 = 1.0;

/// Instructions per operation, by path.
type Counts = BTreeMap<String, f64>;

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let record = arguments.first().is_some_and(|first| first == "--record");
    arguments.drain(..usize::from(record));
    let outcome = match arguments.as_slice() {
        [file, compiler] if record => write_record(file, compiler),
        [file, compiler] => compare_with(file, compiler),
        _ => Err("usage: compare [--record] FILE COMPILER".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("instructions: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn write_record(file: &str, compiler: &str) -> Result<(), String> {
    let text = Record { compiler: compiler.into(), counts: counted()? }.to_text()?;
    print!("{text}");
    std::fs::write(file, text).map_err(|error| format!("{file}: {error}"))
}

fn compare_with(file: &str, compiler: &str) -> Result<(), String> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
    let (record, counts) = (Record::parse(&text)?, counted()?);
    let (table, findings) = compare(&record.counts, &counts);
    print!("{table}");
    if record.compiler != compiler {
        println!(
            "NOT compared: recorded with {}, this is {compiler}. Record again with: scripts/instructions --record",
            record.compiler
        );
        return Ok(());
    }
    if findings.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{}\nMake the path as short as it was, or record it with the reason in the commit: scripts/instructions --record",
        findings.join("\n")
    ))
}

/// Reads the instructions per operation of all paths from standard input.
fn counted() -> Result<Counts, String> {
    let input = std::io::read_to_string(std::io::stdin()).map_err(|error| error.to_string())?;
    let counts: Counts = input.lines().map(summary).collect::<Result<_, _>>()?;
    match PATHS.iter().find(|(path, _)| !counts.contains_key(*path)) {
        Some((path, _)) => Err(format!("{path} was not counted")),
        None => Ok(counts),
    }
}

/// Reads one summary: the name of the path, and its instructions per operation.
fn summary(line: &str) -> Result<(String, f64), String> {
    let value: Value =
        serde_json::from_str(line).map_err(|error| format!("not a summary: {line}: {error}"))?;
    let name = value["function_name"]
        .as_str()
        .ok_or_else(|| format!("a summary without a name: {line}"))?;
    let metrics =
        &value["profiles"][0]["summaries"]["total"]["summary"]["Callgrind"]["Ir"]["metrics"];
    // Left is the new count alone, Both has the new one and that of an earlier run.
    let new =
        [&metrics["Left"]["Int"], &metrics["Both"][0]["Int"]].into_iter().find_map(Value::as_f64);
    let new =
        new.ok_or_else(|| format!("{name}: a summary without a count of instructions: {metrics}"))?;
    Ok((name.into(), new / OPERATIONS as f64))
}

/// The committed counts.
#[derive(PartialEq, Debug)]
struct Record {
    compiler: String,
    counts: Counts,
}

impl Record {
    fn to_text(&self) -> Result<String, String> {
        let mut text = format!("compiler: {}\n\n", self.compiler);
        text += "path                 instructions  operation\n";
        for (path, operation) in PATHS {
            let count = self.counts.get(path).ok_or_else(|| format!("{path} was not counted"))?;
            let _ = writeln!(text, "{path:<20} {count:>12.1}  {operation}");
        }
        Ok(text)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut lines = text.lines();
        let compiler = lines.next().and_then(|line| line.strip_prefix("compiler: "));
        let compiler = compiler.ok_or("the record does not begin with `compiler: `")?.to_owned();
        let counts = lines.skip(2).map(|line| {
            let mut words = line.split_whitespace();
            let count = words.next().zip(words.next().and_then(|count| count.parse().ok()));
            count
                .map(|(path, count)| (path.to_owned(), count))
                .ok_or_else(|| format!("not a count: {line}"))
        });
        Ok(Self { compiler, counts: counts.collect::<Result<_, _>>()? })
    }
}

/// Returns the table of all paths, and what is wrong.
fn compare(recorded: &Counts, counted: &Counts) -> (String, Vec<String>) {
    let (mut table, mut findings) =
        (String::from("path                 instructions  recorded\n"), Vec::new());
    let names = PATHS.iter().map(|(path, _)| *path);
    let unknown = counted
        .keys()
        .map(String::as_str)
        .filter(|path| PATHS.iter().all(|(name, _)| name != path));
    for path in names.chain(unknown) {
        let (Some(&now), Some(&before)) = (counted.get(path), recorded.get(path)) else {
            findings.push(format!("{path}: {}", missing(counted.contains_key(path))));
            continue;
        };
        let (more, least) = (now - before, LEAST.max(before * SHARE));
        let verdict = match more {
            _ if more > least => "  MORE",
            _ if more < -least => "  fewer: record them with scripts/instructions --record",
            _ => "",
        };
        let _ = writeln!(table, "{path:<20} {now:>12.1} {before:>9.1}{verdict}");
        if more > least {
            let percent = 100.0 * more / before;
            findings.push(format!(
                "{path}: {now:.1} instructions per operation, {more:.1} ({percent:.1} %) more than recorded ({before:.1}); \
                 {least:.1} more are allowed"
            ));
        }
    }
    (table, findings)
}

fn missing(counted: bool) -> &'static str {
    if counted { "counted and not recorded" } else { "recorded and not counted" }
}

#[cfg(test)]
mod tests {
    use super::{Counts, PATHS, Record, compare, summary};

    fn all(count: f64) -> Counts {
        PATHS.iter().map(|(path, _)| (path.to_string(), count)).collect()
    }

    fn findings(recorded: f64, counted: f64) -> usize {
        compare(&all(recorded), &all(counted)).1.len()
    }

    #[test]
    fn more_than_a_tenth_and_one_instruction_fails() {
        assert_eq!((findings(100.0, 110.0), findings(100.0, 110.1)), (0, PATHS.len()));
        assert_eq!((findings(5.0, 6.0), findings(5.0, 6.1)), (0, PATHS.len()));
    }

    #[test]
    fn fewer_do_not_fail_and_ask_for_a_record() {
        let (table, findings) = compare(&all(100.0), &all(80.0));
        assert!(findings.is_empty() && table.contains("record them"), "{table}");
    }

    #[test]
    fn a_path_that_only_one_side_has_fails() {
        assert_eq!(compare(&all(1.0), &Counts::new()).1.len(), PATHS.len());
        assert_eq!(compare(&Counts::new(), &all(1.0)).1.len(), PATHS.len());
        let unknown = [("new".to_owned(), 1.0)].into_iter().chain(all(1.0)).collect();
        assert_eq!(compare(&all(1.0), &unknown).1, ["new: counted and not recorded"]);
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let record = Record { compiler: "rustc 1".into(), counts: all(12.5) };
        assert_eq!(Record::parse(&record.to_text().unwrap()), Ok(record));
        assert!(Record::parse("").is_err());
        assert!(Record { compiler: "rustc 1".into(), counts: Counts::new() }.to_text().is_err());
    }

    #[test]
    fn a_summary_without_a_count_is_an_error() {
        assert!(summary(r#"{"function_name":"pool_pair","profiles":[]}"#).is_err());
        assert!(summary("Running").is_err());
    }
}
