//! What the program prints on standard output. A reader that went away is no failure.

use crate::failure::Failure;
use serde::Serialize;
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
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(Failure::Output),
    }
}
