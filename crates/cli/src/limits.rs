//! What `--bs` and `--iodepth` may be, looked at before any memory is taken for them.

use crate::failure::LimitError;
use crate::open::{Medium, Place};
use crate::targets::{Info, file, nvme};
use crate::units::ByteSize;

/// The most requests that a model controller's queue takes: its 1024 entries less one.
const SOFT_MAX_DEPTH: u64 = 1023;

/// The most requests at a time, and the bytes of the largest.
fn limits(place: &Place) -> (u64, u64) {
    match place.medium {
        Medium::File(_) => (file::MAX_DEPTH as u64, file::MAX_TRANSFER as u64),
        Medium::Controller(_) => (SOFT_MAX_DEPTH, nvme::MAX_TRANSFER as u64),
    }
}

/// Checks `bs` and `iodepth` against what every one of `places` takes, and gives both as they are used.
pub(crate) fn check(bs: ByteSize, iodepth: u64, places: &[&Place]) -> Result<(usize, usize), LimitError> {
    if iodepth == 0 {
        return Err(LimitError::NoDepth);
    }
    // The narrowest limit is the one to be named.
    let mut places: Vec<_> = places.iter().map(|place| (limits(place), place)).collect();
    places.sort_by_key(|(limits, _)| *limits);
    for ((max_depth, max_transfer), place) in places {
        let target = || place.name.clone();
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
    // Both are below limits that are `usize` themselves.
    Ok((usize::try_from(bs.0).unwrap_or(usize::MAX), usize::try_from(iodepth).unwrap_or(usize::MAX)))
}

/// Checks them against what a target says itself, now that it is open.
pub(crate) fn check_opened(block: usize, depth: usize, info: &Info) -> Result<(), LimitError> {
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

/// As many buffers as there are requests of `block` bytes in `total`, `depth` at most and 1 at least.
pub(crate) fn slots(total: u64, block: usize, depth: usize) -> usize {
    let requests = total.div_ceil(block as u64).max(1);
    usize::try_from(requests).unwrap_or(usize::MAX).min(depth)
}
