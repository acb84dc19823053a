//! fio's job files: `[global]` with the options of all jobs, then one section for each job.

use super::fio::{alternative, is_default};
use super::io::{IoArgs, OutputFormat};
use clap::error::{ContextKind, ContextValue};
use std::path::{Path, PathBuf};

/// The longest job file that is read, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Why a job file cannot be run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum JobFileError {
    /// It cannot be read.
    #[error("{}: {error}: check the path; write a target whose name ends in .fio as file:NAME", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// It is too long, or a device or pipe.
    #[error("{}: a job file is a regular file of at most {MAX_BYTES} bytes", .0.display())]
    NotAJobFile(PathBuf),
    /// It has no section for a job.
    #[error("{} has no job: write a section such as [job1] with its options", .0.display())]
    NoJob(PathBuf),
    /// An option precedes the first section.
    #[error("{}: line {line}: {text:?} is in no section: write [global] or a job's [name] above it", path.display())]
    NoSection {
        /// The file.
        path: PathBuf,
        /// The line's number.
        line: usize,
        /// The line.
        text: String,
    },
    /// An option is unknown or has an impossible value.
    #[error(
        "{}: {}[{section}]: {reason} (`pinfold io --help` lists the options)",
        path.display(),
        .line.map(|line| format!("line {line}: ")).unwrap_or_default()
    )]
    Option {
        /// The file.
        path: PathBuf,
        /// The line's number, if it is one line.
        line: Option<usize>,
        /// The section.
        section: String,
        /// The parser's message.
        reason: String,
    },
    /// Two sections would run at the same time.
    #[error(
        "{}: [{section}] would run at the same time as the section above it, which is not supported: write stonewall \
         in it or in [global], so that they run one after the other, or use numjobs in one section",
        path.display()
    )]
    Concurrent {
        /// The file.
        path: PathBuf,
        /// The section.
        section: String,
    },
    /// An option of the command line that belongs into the file.
    #[error("--{option} beside a job file: write {option} in the file's [global] section")]
    Beside {
        /// The option.
        option: String,
    },
}

/// A section: its name, and its options as on the command line, each with the number of its line.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Section {
    name: String,
    options: Vec<(usize, String)>,
    is_stonewall: bool,
}

/// The options that may accompany a job file on the command line (the last two are groups of
/// options).
const BESIDE: [&str; 7] =
    ["target", "json", "output-format", "force", "verbose", "IoArgs", "StackArgs"];

/// Reads a file whose length is bounded: a device could be endless, and a pipe would block.
fn read_text(path: &Path) -> Result<String, JobFileError> {
    let failed = |error| JobFileError::Read { path: path.to_owned(), error };
    let file = std::fs::metadata(path).map_err(failed)?;
    if !file.is_file() || file.len() > MAX_BYTES {
        return Err(JobFileError::NotAJobFile(path.to_owned()));
    }
    std::fs::read_to_string(path).map_err(failed)
}

/// Reads the jobs of a file. Of `args` only how the reports are printed, and `--force`, apply to
/// them; `given` are the options on the command line.
pub(crate) fn read(
    path: &Path,
    args: &IoArgs,
    given: &[String],
) -> Result<Vec<IoArgs>, JobFileError> {
    if let Some(option) = given.iter().find(|option| !BESIDE.contains(&option.as_str())) {
        return Err(JobFileError::Beside { option: option.clone() });
    }
    let text = read_text(path)?;
    let (global, sections) = parse(path, &text)?;
    let mut jobs = Vec::new();
    for (at, section) in sections.into_iter().enumerate() {
        if at > 0 && !section.is_stonewall && !global.is_stonewall {
            return Err(JobFileError::Concurrent { path: path.to_owned(), section: section.name });
        }
        let own = |name: &str| {
            let key = format!("--{name}=");
            section
                .options
                .iter()
                .chain(&global.options)
                .any(|(_, option)| option.starts_with(&key))
        };
        let refused = |line, reason| {
            let section = section.name.clone();
            JobFileError::Option { path: path.to_owned(), line, section, reason }
        };
        if !own("filename") && !own("directory") {
            let reason = "no filename, which names the target, and no directory for a scratch file";
            return Err(refused(None, reason.to_owned()));
        }
        let mut options = Vec::new();
        if !own("name") {
            options.push(format!("--name={}", section.name));
        }
        // The section's value replaces the global one.
        let key = |option: &String| option.split('=').next().unwrap_or_default().replace('_', "-");
        let overridden =
            |option: &String| section.options.iter().any(|(_, other)| key(other) == key(option));
        let inherited = global.options.iter().filter(|(_, option)| !overridden(option));
        let given: Vec<_> = inherited.chain(&section.options).cloned().collect();
        options.extend(given.iter().map(|(_, option)| option.clone()));
        let mut job = IoArgs::of_section(&options)
            .map_err(|error| refused(line_of(&error, &given), first_line(&error)))?;
        job.force |= args.force;
        job.json |= args.json;
        if args.output_format == OutputFormat::Json {
            job.output_format = OutputFormat::Json;
        }
        jobs.push(job);
    }
    if jobs.is_empty() { Err(JobFileError::NoJob(path.to_owned())) } else { Ok(jobs) }
}

/// Splits the text into `[global]` and the other sections.
fn parse(path: &Path, text: &str) -> Result<(Section, Vec<Section>), JobFileError> {
    let section =
        |name: &str| Section { name: name.to_owned(), options: Vec::new(), is_stonewall: false };
    let mut global = section("global");
    let mut sections: Vec<Section> = Vec::new();
    let mut current: Option<bool> = None;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with([';', '#']) {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            current = Some(name == "global");
            if name != "global" {
                sections.push(section(name));
            }
            continue;
        }
        let target = match current {
            Some(true) => Some(&mut global),
            Some(false) => sections.last_mut(),
            None => None,
        };
        let Some(target) = target else {
            let (path, text) = (path.to_owned(), line.to_owned());
            return Err(JobFileError::NoSection { path, line: number, text });
        };
        let (key, value) = match line.split_once('=') {
            Some((key, value)) => (key.trim(), Some(value.trim())),
            None => (line, None),
        };
        if matches!(key, "stonewall" | "wait_for_previous") {
            target.is_stonewall = value != Some("0");
            continue;
        }
        if value.is_some_and(|value| is_default(key, value)) {
            continue;
        }
        let refused = |reason| JobFileError::Option {
            path: path.to_owned(),
            line: Some(number),
            section: if current == Some(true) { "global" } else { &target.name }.to_owned(),
            reason,
        };
        let option = match value {
            Some(value) => format!("--{key}={}", expanded(value).map_err(refused)?),
            // On the command line its value may be a word of its own.
            None if key == "direct" => "--direct=1".to_owned(),
            None => format!("--{key}"),
        };
        target.options.push((number, option));
    }
    Ok((global, sections))
}

/// Replaces each `${NAME}` by the environment variable. One that is not set is refused: a name
/// without it could be another file's.
fn expanded(value: &str) -> Result<String, String> {
    let (mut text, mut rest) = (String::new(), value);
    while let Some((before, after)) = rest.split_once("${") {
        let (name, after) =
            after.split_once('}').ok_or_else(|| format!("{value:?}: no }} ends the variable"))?;
        let variable = std::env::var(name).map_err(|_| {
            format!("{value:?}: the environment variable {name:?} is not set to a text: set it")
        })?;
        text.push_str(before);
        text.push_str(&variable);
        rest = after;
    }
    text.push_str(rest);
    Ok(text)
}

/// Returns the line of the option that `error` refuses: by its name, or by its value if the file
/// has another name for it.
fn line_of(error: &clap::Error, given: &[(usize, String)]) -> Option<usize> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let name = text(ContextKind::InvalidArg)?.split([' ', '=', '[']).next()?.replace('_', "-");
    let value = text(ContextKind::InvalidValue).map(|value| format!("={value}"));
    let by_name =
        |option: &str| option.split('=').next().is_some_and(|key| key.replace('_', "-") == name);
    let by_value = |option: &str| value.as_ref().is_some_and(|value| option.ends_with(value));
    let find = |is_it: &dyn Fn(&str) -> bool| given.iter().rev().find(|(_, option)| is_it(option));
    find(&by_name).or_else(|| find(&by_value)).map(|(line, _)| *line)
}

/// Returns the first line of the message, and the possible values or the alternative to an option
/// of fio.
fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    let line = line.strip_prefix("error: ").unwrap_or(line);
    if let Some(ContextValue::Strings(values)) = error.get(ContextKind::ValidValue)
        && !values.is_empty()
    {
        return format!("{line}: write one of {}", values.join(", "));
    }
    match alternative(error) {
        Some(alternative) => format!("{line}: {alternative}"),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Rw, TargetSpec};
    use crate::units::ByteSize;

    fn jobs(text: &str) -> Result<Vec<IoArgs>, JobFileError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.fio");
        std::fs::write(&path, text).unwrap();
        read(&path, &IoArgs::new(TargetSpec::File(path.clone())), &[])
    }

    #[test]
    fn endless_and_huge_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (endless, huge) = (folder.path().join("zero.fio"), folder.path().join("huge.fio"));
        std::os::unix::fs::symlink("/dev/zero", &endless).unwrap();
        std::fs::File::create(&huge).unwrap().set_len(MAX_BYTES + 1).unwrap();
        for path in [endless, huge] {
            let refused = read(&path, &IoArgs::new(TargetSpec::File(path.clone())), &[]);
            assert!(matches!(refused, Err(JobFileError::NotAJobFile(_))));
        }
    }

    #[test]
    fn sections_inherit_global_options_and_replace_them() {
        let text = "; a comment\n[global]\nfilename=soft:1M\nbs=8k\nruntime = 10\ntime_based\nstonewall\n\n\
                    [first]\nrw=randread\niodepth=4\n# another\n[second]\nrw=write\nbs=4k\ntime_based=0\n";
        let jobs = jobs(text).unwrap();
        let figures: Vec<_> =
            jobs.iter().map(|job| (&*job.name, job.rw, job.bs, job.time_based)).collect();
        assert_eq!(
            figures,
            [
                ("first", Rw::Randread, ByteSize(8192), true),
                ("second", Rw::Write, ByteSize(4096), false)
            ]
        );
        assert_eq!((jobs[0].iodepth, jobs[1].iodepth), (4, 1));
        assert_eq!(jobs[1].spec().unwrap().to_string(), "soft:1M");
    }

    #[test]
    fn names_are_read_as_by_fio() {
        let home = std::env::var("PATH").unwrap();
        for (lines, target) in [
            (r"filename=a\:b", "a:b"),
            ("filename=file:a:b", "a:b"),
            ("directory=/tmp\nfilename=a", "/tmp/a"),
            ("directory=/tmp", "/tmp/"),
            ("filename=file:${PATH}", &*home),
        ] {
            let jobs = jobs(&format!(
                "[a]\n{lines}\nsize=1M\nthread\nrandrepeat=0\ndirect\nhipri=1\nsync=0\nunlink=0\n"
            ))
            .unwrap();
            assert_eq!(jobs[0].spec().unwrap().to_string(), target, "{lines}");
        }
        let jobs = jobs("[a]\ndirectory=/tmp\nfilename=/a\n").unwrap();
        assert!(jobs[0].spec().unwrap_err().to_string().contains("leave --directory out"));
    }

    #[test]
    fn an_invalid_section_is_refused_with_the_alternative() {
        for (text, parts) in [
            ("[a]\nfilename=soft:1M\nioscheduler=none\n", &["[a]", "ioscheduler"][..]),
            ("[a]\nfilename=soft:1M\ninvalidate=0\n", &["[a]", "--invalidate", "leave it out"]),
            ("[a]\nfilename=/dev/sda:/dev/sdb\n", &["[a]", "/dev/sda:/dev/sdb", "several files"]),
            ("[a]\nfilename=$jobname.$filenum\n", &["[a]", "$jobname", "file's name"]),
            ("[a]\nfilename=${PINFOLD_NO_SUCH}/a\n", &["[a]", "PINFOLD_NO_SUCH", "not set"]),
            ("[a]\nfilename=a${b\n", &["[a]", "no } ends"]),
            ("[a]\nfilename=soft:1M\nbs=4k,8k\n", &["[a]", "4k,8k", "each direction"]),
            ("[a]\nfilename=soft:1M\nnrfiles=2\n", &["[a]", "one target"]),
            (
                "[a]\nfilename=soft:1M\nrw=sideways\n",
                &["line 3: [a]", "sideways", "read, write, trim, randread"],
            ),
            ("[a]\nfilename=soft:1M\nreadwrite=sideways\n", &["line 3: [a]", "sideways"]),
            ("[global]\nio_depth=4\n[a]\nfilename=soft:1M\n", &["line 2: [a]", "io_depth"]),
            ("[a]\nrw=read\n", &["[a]", "filename"]),
            ("bs=4k\n[a]\n", &["line 1", "[global]"]),
            ("[global]\nbs=4k\n", &["no job"]),
            ("[a]\nfilename=soft:1M\n[b]\nfilename=soft:1M\n", &["[b]", "stonewall", "numjobs"]),
        ] {
            let error = jobs(text).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}
