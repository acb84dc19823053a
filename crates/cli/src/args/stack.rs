//! The options of the memory stack, which several commands share.

use super::target::TargetSpec;
use crate::units::{ByteSize, SizeError, TimeSpan};
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

/// How the memory stack is used.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct StackArgs {
    /// When a controller can reach the data buffers
    #[arg(long, value_enum, default_value_t = Protect::Batch)]
    pub(crate) protect: Protect,

    /// The most bytes of buffers that wait for their flush: a completion that exceeds it waits, as
    /// with `--protect strict`, and 0 means that all do [default: no limit]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub(crate) held_limit: Option<ByteSize>,

    /// Over how many units the software IOMMU spreads the model controllers, in turns: each has a
    /// queue of its own, and a flush is complete when all have completed it. Not with vfio:BDF,
    /// which is behind the units of the machine [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..), allow_negative_numbers = true)]
    pub(crate) iommu_units: Option<u8>,

    /// For how long a command is sent again to a controller that permits it (its status has DNR
    /// clear, as of a namespace that is not ready): after the delay that the controller asks for,
    /// otherwise after 1 ms, 2 ms, and so on up to a second
    #[arg(long, value_name = "TIME", default_value = "10s", allow_negative_numbers = true)]
    pub(crate) retry_limit: TimeSpan,

    /// Where the DMA memory comes from
    #[arg(long, alias = "mem", value_enum, default_value_t = Memory::Auto)]
    pub(crate) memory: Memory,
}

impl Default for StackArgs {
    fn default() -> Self {
        let retry_limit = TimeSpan(Duration::from_secs(10));
        Self {
            protect: Protect::Batch,
            held_limit: None,
            iommu_units: None,
            retry_limit,
            memory: Memory::Auto,
        }
    }
}

/// When a controller can reach the data buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Protect {
    /// From submission to completion; the job waits for the flush, up to 50 ms, before it goes on
    /// (requests that complete together share it)
    Strict,
    /// From submission to completion, with one flush for each request (the queue merges those that
    /// it gets while it is busy); the buffer is held until the flush has completed, and the job
    /// goes on
    Revoke,
    /// From submission to completion, with one flush for all requests that complete together; the
    /// buffers are held until the flush has completed, and the job goes on
    Batch,
    /// Always: they are mapped once, and never flushed
    Static,
}

impl Protect {
    /// Returns the name as on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Revoke => "revoke",
            Self::Batch => "batch",
            Self::Static => "static",
        }
    }
}

/// Where the DMA memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, serde::Serialize)]
pub(crate) enum Memory {
    /// The largest pages available
    #[serde(rename = "auto")]
    Auto,
    /// Reserved pages of 1 GiB
    #[serde(rename = "hugetlb-1g")]
    #[value(name = "hugetlb-1g")]
    Hugetlb1g,
    /// Reserved pages of 2 MiB
    #[serde(rename = "hugetlb-2m")]
    #[value(name = "hugetlb-2m")]
    Hugetlb2m,
    /// Transparent hugepages; the size is rounded up to 2 MiB
    #[serde(rename = "thp")]
    Thp,
    /// Pages of 4 KiB
    #[serde(rename = "plain")]
    Plain,
    /// A memory file, which can be shared with another process
    #[serde(rename = "memfd")]
    Memfd,
    /// A memory file on reserved pages of 2 MiB
    #[serde(rename = "memfd-2m")]
    #[value(name = "memfd-2m")]
    Memfd2m,
    /// A memory file on reserved pages of 1 GiB
    #[serde(rename = "memfd-1g")]
    #[value(name = "memfd-1g")]
    Memfd1g,
}

// Value parsers that several commands share.

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
