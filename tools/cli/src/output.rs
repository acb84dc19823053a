//! Standard output and standard error. A reader that closed its end of the pipe is not a failure.

use rustix::fs::{fstat, makedev};
use rustix::io::Errno;
use serde::Serialize;
use std::fmt;
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Why nothing was printed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OutputError {
    /// Standard output cannot be written.
    #[error("standard output could not be written: {}{}", .0, advice_or(.0, ""))]
    Write(#[from] io::Error),
    /// The report cannot be represented as JSON.
    #[error("cannot write the report as JSON: {0}")]
    Json(#[from] serde_json::Error),
}

/// Returns what to do about an output that could not be written, to be appended to the error:
/// `otherwise` where it is not full.
pub(crate) fn advice_or(error: &io::Error, otherwise: &'static str) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ": free some space there",
        io::ErrorKind::FileTooLarge => {
            ": larger than a file may be (`ulimit -f`, or the file system's limit)"
        }
        _ => otherwise,
    }
}

/// Returns what to do where no descriptor is left, to be appended to the error: else `otherwise`.
pub(crate) fn files_or(error: &io::Error, otherwise: &'static str) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => ": raise the limit of open files (`ulimit -n`)",
        _ => otherwise,
    }
}

/// Returns what to do where a limit of the process is what refused, to be appended to an error that
/// knows no commands.
pub(crate) fn limit(error: Option<&io::Error>) -> &'static str {
    error.map_or("", |error| files_or(error, advice_or(error, "")))
}

/// Returns whether a path leads to the standard output: by a name of it, or as the file that it is
/// redirected to.
pub(crate) fn is_stdout(path: &Path) -> bool {
    let names = ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"];
    if names.iter().any(|name| path == Path::new(name)) {
        return true;
    }
    let (Ok(file), Ok(out)) = (path.metadata(), fstat(io::stdout())) else { return false };
    // /dev/null is no file that both could destroy.
    let is_null = file.file_type().is_char_device() && file.rdev() == makedev(1, 3);
    !is_null && (file.dev(), file.ino()) == (out.st_dev, out.st_ino)
}

/// Prints `text`.
pub(crate) fn text(text: &str) -> Result<(), OutputError> {
    bytes(text.as_bytes())
}

/// Prints `value` as one JSON object on one line.
pub(crate) fn json(value: &impl Serialize) -> Result<(), OutputError> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    bytes(&line)
}

/// Prints `bytes`.
pub(crate) fn bytes(bytes: &[u8]) -> Result<(), OutputError> {
    let mut out = io::stdout().lock();
    ignore_broken_pipe(out.write_all(bytes).and_then(|()| out.flush()))
}

/// Prints clap's message: `--help` and `--version` on standard output, errors on standard error.
pub(crate) fn clap(message: &clap::Error) -> Result<(), OutputError> {
    let printed = message.print();
    if message.use_stderr() {
        return Ok(());
    }
    ignore_broken_pipe(printed.and_then(|()| io::stdout().flush()))
}

fn ignore_broken_pipe(result: io::Result<()>) -> Result<(), OutputError> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// Prints a report on standard error: standard output belongs to another program.
pub(crate) fn on_stderr(
    report: &(impl fmt::Display + Serialize),
    json: bool,
) -> Result<(), OutputError> {
    let text = if json { serde_json::to_string(report)? + "\n" } else { report.to_string() };
    ignore_broken_pipe(io::stderr().lock().write_all(text.as_bytes()))
}

/// Prints a report on standard error: standard output is that of another program.
pub(crate) fn report(text: &str) {
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

/// Prints one line on standard error. If that fails too (a full disk), only the exit code remains.
pub(crate) fn error(line: impl fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "pinfold: {line}");
}
