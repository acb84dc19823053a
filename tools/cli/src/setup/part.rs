//! The part of a target that `io` uses: `--size`, `--offset` and the options that go with them.

use super::error::LimitError;
use crate::args::{IoArgs, TargetSpec};
use crate::units::Share;

/// The part of a target that `io` uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    /// The start of the first job's part.
    pub(crate) offset: u64,
    /// Whole requests in the part of a job.
    pub(crate) blocks: u64,
    /// Bytes at its end that are less than a request.
    pub(crate) tail: u64,
    /// The distance between the parts of consecutive jobs.
    pub(crate) increment: u64,
}

/// Returns the part of a target of `capacity` bytes that requests of `block` bytes use.
pub(crate) fn part(
    args: &IoArgs,
    target: &str,
    capacity: u64,
    block: usize,
) -> Result<Part, LimitError> {
    let (name, block) = (|| target.to_owned(), block as u64);
    // Percentages are rounded up to a request.
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
        // A share of the whole, limited to the bytes after the offset.
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
                let is_bare = matches!(args.target, TargetSpec::File(_));
                LimitError::LargeBlock { block, target: name(), available, offset, is_bare }
            }
        });
    }
    Ok(Part { offset, blocks, tail: size % block, increment })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::SoftOptions;
    use crate::units::ByteSize;

    const MIB: u64 = 1 << 20;

    fn args(size: &str, offset: &str) -> IoArgs {
        IoArgs {
            size: (!size.is_empty()).then(|| size.parse().unwrap()),
            offset: offset.parse().unwrap(),
            ..IoArgs::new(TargetSpec::SoftMemory(ByteSize(MIB), SoftOptions::default()))
        }
    }

    #[test]
    fn shares_are_of_the_target() {
        for (size, offset, expected) in [
            ("", "0", (0, 256)),
            ("50%", "0", (0, 128)),
            ("50%", "75%", (786_432, 64)),
            ("64k", "33%", (348_160, 16)),
        ] {
            let part = part(&args(size, offset), "x", MIB, 4096).unwrap();
            assert_eq!((part.offset, part.blocks), expected, "{size} {offset}");
        }
        let increment = |text: &str, numjobs| IoArgs {
            offset_increment: Some(text.parse().unwrap()),
            numjobs,
            ..args("25%", "0")
        };
        let quarters = part(&increment("25%", 4), "x", MIB, 4096).unwrap();
        assert_eq!((quarters.increment, quarters.blocks), (262_144, 64));
        let tail = part(&args("", "0"), "x", 10_000, 4096).unwrap();
        assert_eq!((tail.blocks, tail.tail), (2, 1808));
    }

    #[test]
    fn the_option_that_was_given_is_named_with_its_limit() {
        for (size, offset, parts) in [
            ("", "2M", &["--offset 2097152", "only 1048576"][..]),
            ("", "1M", &["--offset 1048576", "only 1048576"]),
            ("", "100%", &["--offset 100%", "1048576 in whole requests of 4096"]),
            ("1M", "512k", &["--size 1048576", "524288 follow --offset 524288"]),
            ("2M", "0", &["--size 2097152", "only 1048576"]),
            ("100", "0", &["--size 100", "4096"]),
            ("", "100", &["--offset 100", "4096"]),
        ] {
            let error = part(&args(size, offset), "x", MIB, 4096).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        let error = part(&args("", "0"), "x", MIB, 2 << 20).unwrap_err().to_string();
        assert!(error.contains("--bs 2097152") && error.contains("has 1048576"), "{error}");
        assert!(
            part(&args("", "0"), "x", 0, 4096).unwrap_err().to_string().contains("has 0 bytes")
        );
        let far =
            IoArgs { offset_increment: Some(Share::Bytes(MIB)), numjobs: 2, ..args("64k", "0") };
        let error = part(&far, "x", MIB, 4096).unwrap_err().to_string();
        assert!(
            error.contains("--offset-increment 1048576") && error.contains("--numjobs 2"),
            "{error}"
        );
    }
}
