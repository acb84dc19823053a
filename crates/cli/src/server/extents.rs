//! Which parts of a file are allocated.

use super::payload::PAGE;
use pinfold_nbd::protocol::ExtentFlags;
use rustix::fs::{SeekFrom, seek};
use std::fs::File;

/// The most extents in a reply, which fits into a page: a header, the number of the context, and 8
/// bytes for each.
const MOST: usize = (PAGE - 24) / 8;

/// Returns the extents of a range, its offset counted from `base`, in order: one at least, one
/// alone if `one` is set, and possibly not up to the end. Without a file, or where the file system
/// cannot tell, everything is allocated.
pub(crate) fn extents(
    file: Option<&File>,
    base: u64,
    (offset, length): (u64, u32),
    one: bool,
) -> Vec<(u32, ExtentFlags)> {
    let offset = base + offset;
    let end = offset + u64::from(length);
    let mut extents = Vec::new();
    let mut at = offset;
    while at < end && extents.len() < if one { 1 } else { MOST } {
        let (until, flags) =
            file.and_then(|file| extent(file, at)).unwrap_or((end, ExtentFlags::empty()));
        let until = until.clamp(at + 1, end);
        // Both are inside of `length`.
        extents.push((u32::try_from(until - at).unwrap_or(length), flags));
        at = until;
    }
    extents
}

/// Returns the end of the extent that contains `at`, and its state.
fn extent(file: &File, at: u64) -> Option<(u64, ExtentFlags)> {
    let hole = ExtentFlags::HOLE | ExtentFlags::ZERO;
    match seek(file, SeekFrom::Data(at)) {
        // Nothing but a hole follows.
        Err(rustix::io::Errno::NXIO) => Some((u64::MAX, hole)),
        Err(_) => None,
        Ok(data) if data > at => Some((data, hole)),
        Ok(_) => Some((seek(file, SeekFrom::Hole(at)).ok()?, ExtentFlags::empty())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn holes_and_data_alternate() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(dir.path().join("f"))
            .unwrap();
        file.set_len(4 << 20).unwrap();
        file.write_all_at(&[1; 65_536], 1 << 20).unwrap();
        let (hole, data) = (ExtentFlags::HOLE | ExtentFlags::ZERO, ExtentFlags::empty());
        let found = extents(Some(&file), 0, (0, 4 << 20), false);
        assert_eq!(found, [(1 << 20, hole), (65_536, data), ((3 << 20) - 65_536, hole)]);
        assert_eq!(extents(Some(&file), 0, (0, 4 << 20), true), [(1 << 20, hole)]);
        assert_eq!(extents(Some(&file), 1 << 20, (4096, 4096), false), [(4096, data)]);
        assert_eq!(extents(None, 0, (5, 100), false), [(100, data)]);
    }
}
