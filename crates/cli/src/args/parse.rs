//! Value parsers that several commands share.

use super::target::TargetSpec;
use crate::units::{ByteSize, SizeError};
use clap::builder::{OsStringValueParser, TypedValueParser};
use std::fmt::Display;
use std::str::FromStr;

/// Parses a queue depth. A number beyond 64 bits becomes the largest, so that the target's limit is
/// named for it, too.
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

/// Parses the size of requests: one, or fio's list of a size for each direction if all are the
/// same.
pub(super) fn block_size(text: &str) -> Result<ByteSize, SizeError> {
    let sizes: Vec<ByteSize> = text.split(',').map(str::parse).collect::<Result<_, _>>()?;
    match sizes.split_first() {
        Some((first, rest)) if rest.iter().all(|other| other == first) => Ok(*first),
        _ => Err(SizeError::Directions(text.to_owned())),
    }
}

/// Parses a rate: one, or fio's list of a rate for each direction if all are the same.
pub(super) fn rate<T>(text: &str) -> Result<T, String>
where
    T: FromStr<Err: Display> + PartialEq,
{
    let parse = |rate: &str| rate.parse().map_err(|error: T::Err| error.to_string());
    let (first, rest) =
        text.split_once(',').map_or((text, None), |(first, rest)| (first, Some(rest)));
    let first: T = parse(first)?;
    for other in rest.iter().flat_map(|rest| rest.split(',')) {
        if parse(other)? != first {
            return Err("it has a rate for each direction, and a job has one for all: write one rate, or a section for \
                        each direction in a job file"
                .to_owned());
        }
    }
    Ok(first)
}

/// The methods of fio's `verify` that detect what a comparison of every byte detects.
const METHODS: [&str; 16] = [
    "1",
    "md5",
    "crc64",
    "crc32c",
    "crc32c-intel",
    "crc32",
    "crc16",
    "crc7",
    "xxhash",
    "sha512",
    "sha256",
    "sha1",
    "sha3-224",
    "sha3-256",
    "sha3-384",
    "sha3-512",
];

/// Parses `--verify`: alone, with 0, or with a method of fio's.
pub(super) fn verify(text: &str) -> Result<bool, &'static str> {
    match text {
        "0" | "false" => Ok(false),
        method if METHODS.contains(&method) => Ok(true),
        _ => Err(
            "every byte is compared: write --verify alone, or one of fio's checksums (crc32c, md5, sha256, ...)",
        ),
    }
}
