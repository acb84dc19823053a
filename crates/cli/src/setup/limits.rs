//! The limits of `--bs`, `--iodepth`, `--size` and `--offset`, checked before any memory is allocated for them.

use super::resolve::{Medium, ResolvedTarget};
use crate::targets::target::TargetInfo;
use crate::targets::{file, nvme};
use crate::units::ByteSize;

/// A number on the command line that the target does not allow.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum LimitError {
    /// `--bs 0`, `--bs 3`.
    #[error("--bs {asked}: a request to {target} is a positive multiple of {block} bytes, its block")]
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
    /// A region too small for one request.
    #[error("--size {size}: the requests to {target} have {block} bytes, so it must be at least that")]
    Region {
        /// The value.
        size: u64,
        /// The size of a request.
        block: u64,
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
    /// `io NEW-FILE` without a size.
    #[error(
        "{0} does not exist: give the size of a file for the run with --size, or name a file that exists"
    )]
    SizeNeeded(String),
    /// A source that holds only zeroes.
    #[error("{0} as a source holds only zeroes: name a file or an image")]
    EmptySource(String),
    /// `--offset 1`.
    #[error("--offset {offset}: {target} is used in blocks of {block} bytes: write a multiple")]
    Offset {
        /// The value.
        offset: u64,
        /// The size of a block.
        block: u64,
        /// The target.
        target: String,
    },
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
            return Err(LimitError::Transfer { asked: bs.0, limit: max_transfer, target: target() });
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
