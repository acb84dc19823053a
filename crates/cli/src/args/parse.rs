//! Value parsers that several commands share.

use super::target::TargetSpec;
use clap::builder::{OsStringValueParser, TypedValueParser};

/// Parses a queue depth. A number beyond 64 bits becomes the largest, so that the target's limit is named for it, too.
pub(super) fn depth(text: &str) -> Result<u64, std::num::ParseIntError> {
    text.parse().or_else(|error: std::num::ParseIntError| match error.kind() {
        std::num::IntErrorKind::PosOverflow => Ok(u64::MAX),
        _ => Err(error),
    })
}

/// Parses a target.
pub(super) fn target() -> impl TypedValueParser<Value = TargetSpec> {
    OsStringValueParser::new().try_map(TargetSpec::from_os_string)
}

/// Parses a target, or the bare address of a controller.
pub(super) fn controller() -> impl TypedValueParser<Value = TargetSpec> {
    OsStringValueParser::new().try_map(TargetSpec::controller)
}

/// Parses fio's switches: alone, or with 0 or 1.
pub(super) fn switch(text: &str) -> Result<bool, &'static str> {
    match text {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err("write 0 or 1"),
    }
}
