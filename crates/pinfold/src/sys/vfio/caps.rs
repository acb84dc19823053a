//! The chain of capabilities behind an INFO structure, parsed without trusting its contents.

/// Returns the body of the capability with this number in `info`. `first` is the offset of the
/// chain's head.
pub(crate) fn find(info: &[u8], first: u32, wanted: u16) -> Option<&[u8]> {
    let mut at = usize::try_from(first).ok()?;
    // Existing kernels only link forwards; the bound on the length covers loops.
    for _ in 0..64 {
        if at == 0 {
            return None;
        }
        let header = info.get(at..)?;
        let id = u16::from_ne_bytes(bytes(header, 0)?);
        let next = u32::from_ne_bytes(bytes(header, 4)?);
        if id == wanted {
            return header.get(8..);
        }
        at = usize::try_from(next).ok()?;
    }
    None
}

/// Parses a list of pairs of 64 bits behind a count of 32 bits and four bytes of padding: ranges of
/// addresses (first and last), parts of a region (offset and size). A truncated pair ends the list.
pub(crate) fn pairs(cap: &[u8]) -> Vec<(u64, u64)> {
    let Some(count) = bytes(cap, 0).map(u32::from_ne_bytes) else { return Vec::new() };
    let list = cap.get(8..).unwrap_or_default();
    let pair = |chunk: &[u8]| {
        Some((u64::from_ne_bytes(bytes(chunk, 0)?), u64::from_ne_bytes(bytes(chunk, 8)?)))
    };
    list.chunks_exact(16)
        .take(usize::try_from(count).unwrap_or(usize::MAX))
        .filter_map(pair)
        .collect()
}

/// Parses 32 bits at the start.
pub(crate) fn number(cap: &[u8]) -> Option<u32> {
    bytes(cap, 0).map(u32::from_ne_bytes)
}

fn bytes<const N: usize>(from: &[u8], at: usize) -> Option<[u8; N]> {
    from.get(at..)?.get(..N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A header of 24 bytes, then capability 3 (one number), then 1 (two ranges).
    fn info() -> Vec<u8> {
        let mut info = vec![0; 24];
        let mut cap = |id: u16, next: u32, body: &[u8]| {
            info.extend(id.to_ne_bytes());
            info.extend(1u16.to_ne_bytes());
            info.extend(next.to_ne_bytes());
            info.extend(body);
        };
        cap(3, 40, &[7, 0, 0, 0, 0, 0, 0, 0]);
        let mut ranges: Vec<u8> = [2u32, 0].iter().flat_map(|n| n.to_ne_bytes()).collect();
        ranges.extend(
            [0u64, 0xfedf_ffff, 0xfef0_0000, 0x7f_ffff_ffff].iter().flat_map(|n| n.to_ne_bytes()),
        );
        cap(1, 0, &ranges);
        info
    }

    #[test]
    fn finds_each_capability() {
        let info = info();
        assert_eq!(find(&info, 24, 3).and_then(number), Some(7));
        let ranges = find(&info, 24, 1).map(pairs).unwrap();
        assert_eq!(ranges, [(0, 0xfedf_ffff), (0xfef0_0000, 0x7f_ffff_ffff)]);
        assert_eq!(find(&info, 24, 2), None);
        assert_eq!(find(&info, 0, 3), None, "no chain");
    }

    #[test]
    fn a_circular_capability_chain_terminates() {
        let mut info = info();
        info[44..48].copy_from_slice(&24u32.to_ne_bytes());
        assert_eq!(find(&info, 24, 9), None);
    }

    proptest! {
        #[test]
        fn tolerates_anything(info in proptest::collection::vec(any::<u8>(), 0..200), first: u32, wanted: u16) {
            let first = first % 256;
            if let Some(cap) = find(&info, first, wanted) {
                number(cap);
                prop_assert!(pairs(cap).len() * 16 <= info.len());
            }
        }
    }
}
