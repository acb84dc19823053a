//! The limits of `--bs`, `--iodepth`, `--size` and `--offset`, checked before any memory is
//! allocated for them.

use super::resolve::{Medium, ResolvedTarget};
use crate::args::io::IoTarget;
use crate::args::{IoArgs, TargetSpec};
use crate::targets::target::TargetInfo;
use crate::targets::{file, nvme};
use crate::units::{ByteSize, Share};

/// A number on the command line that the target does not allow.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum LimitError {
    /// `--bs 0`, `--bs 3`.
    #[error(
        "--bs {asked}: a request to {target} is a positive multiple of {block} bytes, its block"
    )]
    Block {
        /// The value.
        asked: u64,
        /// The target's block.
        block: usize,
        /// The target.
        target: String,
    },
    /// `--bs 1T`.
    #[error("--bs {asked}: one request to {target} moves at most {limit} bytes ({})", ByteSize(*.limit))]
    Transfer {
        /// The value.
        asked: u64,
        /// The target's largest request.
        limit: u64,
        /// The target.
        target: String,
    },
    /// `--iodepth 0`.
    #[error("--iodepth 0: at least one request must be in flight")]
    NoDepth,
    /// `--iodepth 1000000000`.
    #[error("--iodepth {asked}: {target} accepts at most {limit} requests in flight")]
    Depth {
        /// The value.
        asked: u64,
        /// The target's limit.
        limit: u64,
        /// The target.
        target: String,
    },
    /// `--size 100`: too small for one request.
    #[error(
        "--size {size}: the requests to {target} have {block} bytes (--bs), so it must be at least that"
    )]
    Region {
        /// The value, in bytes.
        size: u64,
        /// The size of a request.
        block: u64,
        /// The target.
        target: String,
    },
    /// `--bs 2M` on a smaller target.
    #[error(
        "--bs {block}: {target} has {available} bytes{}: lower --bs{}",
        after(*.offset),
        if *.is_bare { "; if it is a job file, give it a name that ends in .fio" } else { "" }
    )]
    LargeBlock {
        /// The value.
        block: u64,
        /// The target.
        target: String,
        /// How many bytes can be used.
        available: u64,
        /// Where they begin.
        offset: u64,
        /// Whether the target is the argument, where a job file's name could be.
        is_bare: bool,
    },
    /// A file without a byte.
    #[error(
        "{0} has 0 bytes, so there is nothing to read or to overwrite: name another file, or remove it and give the size of a \
         scratch file with --size"
    )]
    NoBytes(String),
    /// `--offset` at or beyond the end.
    #[error("--offset {given}: {target} has only {capacity} bytes: choose a lower offset")]
    OffsetBeyond {
        /// The value, in bytes or as a percentage.
        given: String,
        /// The target's capacity.
        capacity: u64,
        /// The target.
        target: String,
    },
    /// `--size` beyond the end that follows an offset.
    #[error(
        "--size {size}: {target} has {capacity} bytes, of which {available} follow {option} {offset}: lower one of both"
    )]
    BeyondOffset {
        /// The value, in bytes.
        size: u64,
        /// The target's capacity.
        capacity: u64,
        /// How many bytes follow the offset.
        available: u64,
        /// The option that the offset is from.
        option: &'static str,
        /// The offset.
        offset: u64,
        /// The target.
        target: String,
    },
    /// `--offset-increment` beyond the end.
    #[error(
        "--offset-increment {increment}: with --numjobs {jobs} the last job begins at byte {start}, and {target} has only \
         {capacity} bytes: lower one of both"
    )]
    IncrementBeyond {
        /// The value, in bytes.
        increment: u64,
        /// How many jobs there are.
        jobs: u64,
        /// Where the last one begins.
        start: u64,
        /// The target's capacity.
        capacity: u64,
        /// The target.
        target: String,
    },
    /// `--io-size 100`.
    #[error(
        "--io-size {size}: the requests to {target} have {block} bytes (--bs), so it must be at least that"
    )]
    IoSize {
        /// The value, in bytes.
        size: u64,
        /// The size of a request.
        block: u64,
        /// The target.
        target: String,
    },
    /// A percentage of a file that is created.
    #[error(
        "--{option} in per cent: {target} is created for the run, so it has no size yet: write bytes"
    )]
    ShareOfNothing {
        /// The option.
        option: &'static str,
        /// The target.
        target: String,
    },
    /// `--numjobs 100 --size 4k`.
    #[error(
        "--numjobs {jobs}: the part of {target} that is used has {blocks} requests, and each job needs at least one: lower \
         --numjobs or --bs"
    )]
    Jobs {
        /// The value.
        jobs: usize,
        /// How many requests fit.
        blocks: u64,
        /// The target.
        target: String,
    },
    /// A size beyond the target's.
    #[error("--size {size}: {target} has only {capacity} bytes")]
    Beyond {
        /// The value.
        size: u64,
        /// Its capacity.
        capacity: u64,
        /// The target.
        target: String,
    },
    /// `io NEW-FILE` or `io FOLDER` without a size.
    #[error(
        "{target} {state}: give the size of a scratch file with --size, or name a file that exists"
    )]
    SizeNeeded {
        /// The target.
        target: String,
        /// What it is.
        state: &'static str,
    },
    /// A source that holds only zeroes.
    #[error("{0} as a source holds only zeroes: name a file or an image")]
    EmptySource(String),
    /// `--offset 1`.
    #[error("--{option} {offset}: {target} is used in blocks of {block} bytes: write a multiple")]
    Offset {
        /// The option.
        option: &'static str,
        /// The value.
        offset: u64,
        /// The size of a block.
        block: u64,
        /// The target.
        target: String,
    },
}

fn after(offset: u64) -> String {
    if offset > 0 { format!(" after --offset {offset}") } else { String::new() }
}

/// The part of a target that `io` uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    /// Where the first job's begins.
    pub(crate) offset: u64,
    /// Whole requests in the part of a job.
    pub(crate) blocks: u64,
    /// Bytes at its end that are less than a request.
    pub(crate) tail: u64,
    /// How much further on the part of the next job begins.
    pub(crate) increment: u64,
    /// How many requests a job moves, unless something else ends it before.
    pub(crate) requests: u64,
}

/// Returns the part of a target of `capacity` bytes that requests of `block` bytes use, with `args`
/// as fio reads them.
pub(crate) fn part(
    args: &IoArgs,
    target: &str,
    capacity: u64,
    block: usize,
) -> Result<Part, LimitError> {
    let (name, block) = (|| target.to_owned(), block as u64);
    // In per cent they are rounded up to a request.
    let aligned = |share: Share, option| {
        let bytes = share.of(capacity);
        match share {
            Share::Percent(_) => Ok(bytes.div_ceil(block).saturating_mul(block)),
            Share::Bytes(_) if bytes.is_multiple_of(block) => Ok(bytes),
            Share::Bytes(_) => {
                Err(LimitError::Offset { option, offset: bytes, block, target: name() })
            }
        }
    };
    if args.size == Some(Share::Bytes(0)) {
        return Err(LimitError::Region { size: 0, block, target: name() });
    }
    if capacity == 0 {
        return Err(LimitError::NoBytes(name()));
    }
    let offset = aligned(args.offset, "offset")?;
    if offset >= capacity {
        let given = match args.offset {
            Share::Bytes(bytes) => bytes.to_string(),
            Share::Percent(percent) => {
                format!("{percent}%, which is {offset} in whole requests of {block} bytes")
            }
        };
        return Err(LimitError::OffsetBeyond { given, capacity, target: name() });
    }
    let increment =
        args.offset_increment.map_or(Ok(0), |share| aligned(share, "offset-increment"))?;
    let jobs = u64::from(args.numjobs);
    let last = offset.saturating_add(increment.saturating_mul(jobs.saturating_sub(1)));
    if last > offset && last >= capacity {
        return Err(LimitError::IncrementBeyond {
            increment,
            jobs,
            start: last,
            capacity,
            target: name(),
        });
    }
    let available = capacity.saturating_sub(last);
    let size = match args.size {
        Some(Share::Bytes(size)) => size,
        // Of the whole, as far as that follows the offset.
        Some(share) => share.of(capacity).min(available),
        None => available,
    };
    if size > available {
        let (option, offset) =
            if last > offset { ("the last job's offset", last) } else { ("--offset", offset) };
        return Err(match offset {
            0 => LimitError::Beyond { size, capacity, target: name() },
            _ => LimitError::BeyondOffset {
                size,
                capacity,
                available,
                option,
                offset,
                target: name(),
            },
        });
    }
    let blocks = size / block;
    if blocks == 0 {
        return Err(match args.size {
            Some(_) => LimitError::Region { size, block, target: name() },
            None => {
                let is_bare = matches!(args.target, Some(IoTarget::Target(TargetSpec::File(_))));
                LimitError::LargeBlock { block, target: name(), available, offset, is_bare }
            }
        });
    }
    let bytes = args.io_size.map_or(size, |share| share.of(size));
    let requests = bytes / block;
    if requests == 0 {
        return Err(LimitError::IoSize { size: bytes, block, target: name() });
    }
    // As in fio: what --io-size has beyond --size is moved once, and --number-ios counts for each
    // pass.
    let loops = u64::from(args.loops.unwrap_or(1));
    let requests = requests.min(blocks).saturating_mul(loops).max(requests);
    let requests = args.number_ios.map_or(requests, |ios| requests.min(ios.saturating_mul(loops)));
    Ok(Part { offset, blocks, tail: size % block, increment, requests })
}

/// The most requests in a model controller's queue: its 1024 entries less one.
const SOFT_MAX_DEPTH: u64 = 1023;

/// Returns the most requests in flight, and the most bytes of one.
fn limits(target: &ResolvedTarget) -> (u64, u64) {
    match target.medium {
        Medium::File(_) => (file::MAX_DEPTH as u64, file::MAX_TRANSFER as u64),
        Medium::Controller(_) => (SOFT_MAX_DEPTH, nvme::MAX_TRANSFER as u64),
    }
}

/// The size and number of requests, checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RequestLimits {
    /// Bytes of one request.
    pub(crate) block: usize,
    /// The most in flight.
    pub(crate) depth: usize,
}

/// Checks `bs` and `iodepth` against the limits of all `targets`.
pub(crate) fn check(
    bs: ByteSize,
    iodepth: u64,
    targets: &[&ResolvedTarget],
) -> Result<RequestLimits, LimitError> {
    if iodepth == 0 {
        return Err(LimitError::NoDepth);
    }
    // The narrowest limit is reported.
    let mut targets: Vec<_> = targets.iter().map(|target| (limits(target), target)).collect();
    targets.sort_by_key(|(limits, _)| *limits);
    for ((max_depth, max_transfer), target) in targets {
        let target = || target.name.clone();
        if bs.0 == 0 || !bs.0.is_multiple_of(file::BLOCK as u64) {
            return Err(LimitError::Block { asked: bs.0, block: file::BLOCK, target: target() });
        }
        if bs.0 > max_transfer {
            return Err(LimitError::Transfer {
                asked: bs.0,
                limit: max_transfer,
                target: target(),
            });
        }
        if iodepth > max_depth {
            return Err(LimitError::Depth { asked: iodepth, limit: max_depth, target: target() });
        }
    }
    // Both are below limits of type `usize`.
    let block = usize::try_from(bs.0).unwrap_or(usize::MAX);
    Ok(RequestLimits { block, depth: usize::try_from(iodepth).unwrap_or(usize::MAX) })
}

/// Checks the size and number of requests against the limits of an open target.
pub(crate) fn check_opened(
    RequestLimits { block, depth }: RequestLimits,
    info: &TargetInfo,
) -> Result<(), LimitError> {
    let target = || info.name.clone();
    if !block.is_multiple_of(info.block) {
        return Err(LimitError::Block { asked: block as u64, block: info.block, target: target() });
    }
    if block > info.max_transfer {
        let limit = info.max_transfer as u64;
        return Err(LimitError::Transfer { asked: block as u64, limit, target: target() });
    }
    if depth > info.max_depth {
        return Err(LimitError::Depth {
            asked: depth as u64,
            limit: info.max_depth as u64,
            target: target(),
        });
    }
    Ok(())
}

/// Returns how many requests to keep in flight for `total` bytes: at least 1.
pub(crate) fn depth_for(total: u64, RequestLimits { block, depth }: RequestLimits) -> usize {
    let requests = total.div_ceil(block as u64).max(1);
    usize::try_from(requests).unwrap_or(usize::MAX).min(depth)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{SoftOptions, TargetSpec};

    const MIB: u64 = 1 << 20;

    fn args(size: &str, offset: &str, io_size: Option<&str>) -> IoArgs {
        IoArgs {
            size: (!size.is_empty()).then(|| size.parse().unwrap()),
            offset: offset.parse().unwrap(),
            io_size: io_size.map(|share| share.parse().unwrap()),
            ..IoArgs::new(TargetSpec::SoftMemory(ByteSize(MIB), SoftOptions::default()))
        }
    }

    #[test]
    fn shares_are_those_of_fio() {
        for (size, offset, io_size, expected) in [
            ("", "0", None, (0, 256, 256)),
            ("50%", "0", None, (0, 128, 128)),
            ("50%", "75%", None, (786_432, 64, 64)),
            ("64k", "33%", None, (348_160, 16, 16)),
            ("64k", "0", Some("50%"), (0, 16, 8)),
            ("64k", "0", Some("128k"), (0, 16, 32)),
        ] {
            let part = part(&args(size, offset, io_size), "x", MIB, 4096).unwrap();
            assert_eq!(
                (part.offset, part.blocks, part.requests),
                expected,
                "{size} {offset} {io_size:?}"
            );
        }
        let increment = |text: &str, numjobs| IoArgs {
            offset_increment: Some(text.parse().unwrap()),
            numjobs,
            ..args("25%", "0", None)
        };
        let quarters = part(&increment("25%", 4), "x", MIB, 4096).unwrap();
        assert_eq!((quarters.increment, quarters.blocks), (262_144, 64));
        let tail = part(&args("", "0", None), "x", 10_000, 4096).unwrap();
        assert_eq!((tail.blocks, tail.tail), (2, 1808));
    }

    #[test]
    fn the_option_that_was_given_is_named_with_its_limit() {
        for (size, offset, io_size, parts) in [
            ("", "2M", None, &["--offset 2097152", "only 1048576"][..]),
            ("", "1M", None, &["--offset 1048576", "only 1048576"]),
            ("", "100%", None, &["--offset 100%", "1048576 in whole requests of 4096"]),
            ("1M", "512k", None, &["--size 1048576", "524288 follow --offset 524288"]),
            ("2M", "0", None, &["--size 2097152", "only 1048576"]),
            ("100", "0", None, &["--size 100", "4096"]),
            ("", "100", None, &["--offset 100", "4096"]),
            ("", "0", Some("1k"), &["--io-size 1024", "4096"]),
        ] {
            let error = part(&args(size, offset, io_size), "x", MIB, 4096).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        let error = part(&args("", "0", None), "x", MIB, 2 << 20).unwrap_err().to_string();
        assert!(error.contains("--bs 2097152") && error.contains("has 1048576"), "{error}");
        assert!(
            part(&args("", "0", None), "x", 0, 4096)
                .unwrap_err()
                .to_string()
                .contains("has 0 bytes")
        );
        let far = IoArgs {
            offset_increment: Some(Share::Bytes(MIB)),
            numjobs: 2,
            ..args("64k", "0", None)
        };
        let error = part(&far, "x", MIB, 4096).unwrap_err().to_string();
        assert!(
            error.contains("--offset-increment 1048576") && error.contains("--numjobs 2"),
            "{error}"
        );
    }
}
