//! fio's job files: `[global]` with the options of all jobs, then one section for each job.

use super::fio::alternative;
use super::io::{IoArgs, OutputFormat};
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
    #[error("{}: [{section}]: {reason} (`pinfold io --help` lists the options)", path.display())]
    Option {
        /// The file.
        path: PathBuf,
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

/// A section: its name, and its options as on the command line.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Section {
    name: String,
    options: Vec<String>,
    is_stonewall: bool,
}

/// The options that may accompany a job file on the command line (the last two are groups of options).
const BESIDE: [&str; 7] = ["target", "json", "output-format", "force", "verbose", "IoArgs", "StackArgs"];

/// Reads a file whose length is bounded: a device could be endless, and a pipe would block.
fn read_text(path: &Path) -> Result<String, JobFileError> {
    let failed = |error| JobFileError::Read { path: path.to_owned(), error };
    let file = std::fs::metadata(path).map_err(failed)?;
    if !file.is_file() || file.len() > MAX_BYTES {
        return Err(JobFileError::NotAJobFile(path.to_owned()));
    }
    std::fs::read_to_string(path).map_err(failed)
}

/// Reads the jobs of a file. Of `args` only how the reports are printed, and `--force`, apply to them; `given` are the
/// options on the command line.
pub(crate) fn read(path: &Path, args: &IoArgs, given: &[String]) -> Result<Vec<IoArgs>, JobFileError> {
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
            section.options.iter().chain(&global.options).any(|option| option.starts_with(&key))
        };
        let refused =
            |reason| JobFileError::Option { path: path.to_owned(), section: section.name.clone(), reason };
        if !own("filename") {
            return Err(refused("no filename, which names the target".to_owned()));
        }
        let mut options = Vec::new();
        if !own("name") {
            options.push(format!("--name={}", section.name));
        }
        // The section's value replaces the global one.
        let key = |option: &String| option.split('=').next().unwrap_or_default().replace('_', "-");
        let overridden = |option: &&String| section.options.iter().any(|other| key(other) == key(option));
        options.extend(global.options.iter().filter(|option| !overridden(option)).cloned());
        options.extend(section.options.iter().cloned());
        let mut job = IoArgs::of_section(&options).map_err(|error| refused(first_line(&error)))?;
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
    let section = |name: &str| Section { name: name.to_owned(), options: Vec::new(), is_stonewall: false };
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
        target.options.push(match value {
            Some(value) => format!("--{key}={value}"),
            None => format!("--{key}"),
        });
    }
    Ok((global, sections))
}

/// Returns the first line of the message, and the alternative to an option of fio.
fn first_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    let line = line.strip_prefix("error: ").unwrap_or(line);
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
        let figures: Vec<_> = jobs.iter().map(|job| (&*job.name, job.rw, job.bs, job.time_based)).collect();
        assert_eq!(
            figures,
            [("first", Rw::Randread, ByteSize(8192), true), ("second", Rw::Write, ByteSize(4096), false)]
        );
        assert_eq!((jobs[0].iodepth, jobs[1].iodepth), (4, 1));
        assert_eq!(jobs[1].spec().unwrap().to_string(), "soft:1M");
    }

    #[test]
    fn an_invalid_section_is_refused_with_its_name_and_the_alternative() {
        for (text, parts) in [
            ("[a]\nfilename=soft:1M\nioscheduler=none\n", &["[a]", "ioscheduler"][..]),
            ("[a]\nfilename=soft:1M\nthread\n", &["[a]", "--thread", "leave it out"]),
            ("[a]\nfilename=soft:1M\nrw=sideways\n", &["[a]", "sideways"]),
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
