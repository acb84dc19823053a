//! What the program prints on standard output, where a reader that went away is no failure, and on standard error, where
//! nothing is.

use crate::failure::Failure;
use serde::Serialize;
use std::fmt;
use std::io::{self, Write};

/// Prints `text`.
pub(crate) fn text(text: &str) -> Result<(), Failure> {
    bytes(text.as_bytes())
}

/// Prints `value` as one JSON object on one line.
pub(crate) fn json(value: &impl Serialize) -> Result<(), Failure> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    bytes(&line)
}

/// Prints `bytes`.
pub(crate) fn bytes(bytes: &[u8]) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    printed(out.write_all(bytes).and_then(|()| out.flush()))
}

/// Prints what clap has to say, `--help` and `--version` on standard output, and returns whether it could be printed.
pub(crate) fn clap(message: &clap::Error) -> Result<(), Failure> {
    let text = message.print();
    if message.use_stderr() {
        return Ok(());
    }
    printed(text.and_then(|()| io::stdout().flush()))
}

fn printed(result: io::Result<()>) -> Result<(), Failure> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(Failure::Output),
    }
}

/// Prints one line on standard error. Where that cannot be written (a full disk) there is nowhere left to say so, and the
/// exit code tells.
pub(crate) fn error(line: impl fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "pinfold: {line}");
}
