//! Parses `/proc/self/smaps`: the pages that a mapping really has.

use super::text;

/// One mapping in `/proc/self/smaps`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Vma {
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// Bytes backed by pages of memory, without those of `hugetlb`.
    pub(crate) resident: u64,
    /// Those on transparent hugepages.
    pub(crate) transparent: u64,
    /// Bytes on pages of the hugetlb pool.
    pub(crate) hugetlb: u64,
    /// `KernelPageSize`.
    pub(crate) page_bytes: u64,
    /// The mapped file, or the kernel's name for it; empty for anonymous memory.
    pub(crate) name: String,
    flags: String,
}

impl Vma {
    /// Returns whether `VmFlags` has the two letters: `dc` not copied on fork, `lo` locked, `hg`
    /// hugepages requested, `rd` readable, `wr` writable, `io` and `pf` of a device.
    pub(crate) fn has_flag(&self, flag: &str) -> bool {
        self.flags.split_whitespace().any(|have| have == flag)
    }
}

/// Returns the mapping that contains all of the `len` bytes from `addr`. O(mappings of the
/// process).
pub(crate) fn of_range(addr: usize, len: usize) -> Option<Vma> {
    let end = addr.checked_add(len)?;
    all().into_iter().find(|vma| vma.start <= addr && end <= vma.end)
}

/// Returns all mappings of the process, in order; none if the file cannot be read.
pub(crate) fn all() -> Vec<Vma> {
    std::fs::read("/proc/self/smaps").map(|smaps| parse(&smaps)).unwrap_or_default()
}

/// Parses the file; malformed lines are skipped.
fn parse(smaps: &[u8]) -> Vec<Vma> {
    let mut all: Vec<Vma> = Vec::new();
    for line in text::lines(smaps) {
        if let Some((start, end)) = header(&line) {
            // `start-end rights offset device inode name`
            let name = line.split_whitespace().skip(5).collect::<Vec<_>>().join(" ");
            all.push(Vma { start, end, name, ..Vma::default() });
            continue;
        }
        let (Some(vma), Some((key, value))) = (all.last_mut(), line.split_once(':')) else {
            continue;
        };
        match key {
            "Rss" => vma.resident = text::kib(value).unwrap_or(0),
            "AnonHugePages" | "ShmemPmdMapped" | "FilePmdMapped" => {
                vma.transparent = vma.transparent.saturating_add(text::kib(value).unwrap_or(0));
            }
            "Shared_Hugetlb" | "Private_Hugetlb" => {
                vma.hugetlb = vma.hugetlb.saturating_add(text::kib(value).unwrap_or(0));
            }
            "KernelPageSize" => vma.page_bytes = text::kib(value).unwrap_or(0),
            "VmFlags" => value.clone_into(&mut vma.flags),
            _ => {}
        }
    }
    all
}

/// `7f00-7f01 rw-p ...`
fn header(line: &str) -> Option<(usize, usize)> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SAMPLE: &[u8] =
        b"7f0000000000-7f0000400000 rw-p 00000000 00:00 0 \nSize:               4096 kB\n\
        Rss:                2052 kB\nAnonHugePages:      2048 kB\nShmemPmdMapped:        0 kB\n\
        Private_Hugetlb:       0 kB\nVmFlags: rd wr mr mw me dc ac lo hg \n";

    #[test]
    fn parses_the_fields_it_needs() {
        let all = parse(SAMPLE);
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].resident, all[0].transparent, all[0].hugetlb), (2052 << 10, 2 << 20, 0));
        assert!(all[0].has_flag("dc") && all[0].has_flag("lo") && !all[0].has_flag("io"));
    }

    proptest! {
        #[test]
        fn tolerates_truncated_and_malformed_input(cut in 0usize..300, at in 0usize..300, byte in any::<u8>()) {
            let mut bytes = SAMPLE[..cut.min(SAMPLE.len())].to_vec();
            if let Some(changed) = bytes.get_mut(at) {
                *changed = byte;
            }
            prop_assert!(parse(&bytes).len() <= 2);
        }

        #[test]
        fn tolerates_anything(bytes in proptest::collection::vec(any::<u8>(), 0..500)) {
            parse(&bytes);
        }
    }
}
