//! The places of `/proc`, `/sys` and `/dev`, and parsers for the small text files in them. Any
//! content gives a result or `None`, never a panic.

use super::errno::Errno;
use std::path::{Path, PathBuf};

/// Returns a whole file; invalid UTF-8 is replaced.
pub(crate) fn all(path: &Path) -> Result<String, Errno> {
    let bytes = std::fs::read(path).map_err(|error| Errno::from(&error))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the lines of a file; invalid UTF-8 is replaced.
pub(crate) fn lines(bytes: &[u8]) -> impl Iterator<Item = String> + '_ {
    bytes.split(|byte| *byte == b'\n').map(|line| String::from_utf8_lossy(line).into_owned())
}

/// Parses `  64 kB` as bytes; `None` beyond 64 bits.
pub(crate) fn kib(value: &str) -> Option<u64> {
    let number = value.trim().strip_suffix("kB").unwrap_or(value).trim();
    number.parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the value of the line `key:   64 kB`, in bytes.
pub(crate) fn field_kib(file: &[u8], key: &str) -> Option<u64> {
    lines(file).find_map(|line| {
        let (have, value) = line.split_once(':')?;
        (have.trim() == key).then(|| kib(value)).flatten()
    })
}

/// Parses the first line of a file as a number.
pub(crate) fn number(path: &Path) -> Option<u64> {
    word(path)?.parse().ok()
}

/// Returns the first line of a file, trimmed; `None` if it is empty.
pub(crate) fn word(path: &Path) -> Option<String> {
    let bytes = std::fs::read(path).ok()?;
    let line = lines(&bytes).next()?.trim().to_owned();
    (!line.is_empty()).then_some(line)
}

/// Returns the word in brackets: `always [madvise] never` is `madvise`.
pub(crate) fn bracketed(line: &str) -> Option<&str> {
    let (_, after) = line.split_once('[')?;
    Some(after.split_once(']')?.0.trim())
}

/// Returns the names in a directory, those with a number in numeric order; none if it is
/// unreadable.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    names.sort_by_cached_key(|name| {
        let digits = name.trim_start_matches(|c: char| !c.is_ascii_digit());
        (digits.parse::<u64>().unwrap_or(u64::MAX), name.clone())
    });
    names
}

/// Parses a list such as `0-2,5`. Malformed parts are skipped, and a range is limited to 4096
/// numbers.
pub(crate) fn list(text: &str) -> Vec<u32> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<u32>(), last.trim().parse::<u32>()) {
            numbers.extend((first..=last).take(4096));
        }
    }
    numbers
}

// Where the kernel's file systems are mounted.

/// The paths of `/proc`, `/sys` and `/dev`. Tests, and an inspection of files copied from another
/// machine, use other places.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Roots {
    /// Usually `/proc`.
    pub proc: PathBuf,
    /// Usually `/sys`.
    pub sys: PathBuf,
    /// Usually `/dev`.
    pub dev: PathBuf,
    /// Usually `/lib/modules`: the installed modules, by the kernel's release.
    pub modules: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self {
            proc: "/proc".into(),
            sys: "/sys".into(),
            dev: "/dev".into(),
            modules: "/lib/modules".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn parses_what_the_kernel_writes() {
        assert_eq!(field_kib(b"VmPin:\t 0 kB\nVmLck:\t      64 kB\n", "VmLck"), Some(65536));
        assert_eq!(field_kib(b"VmLck:\t 64", "VmLck"), Some(65536));
        assert_eq!(field_kib(b"VmLck: 99999999999999999 kB", "VmLck"), None, "more than 64 bits");
        assert_eq!(bracketed("always [madvise] never"), Some("madvise"));
        assert_eq!(bracketed("always [madvise"), None);
        assert_eq!(list("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(list("0-4294967295").len(), 4096);
        assert!(list("x,3-1,").is_empty());
    }

    proptest! {
        #[test]
        fn tolerates_anything(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            field_kib(&bytes, "VmLck");
            for line in lines(&bytes) {
                bracketed(&line);
                list(&line);
                kib(&line);
            }
        }
    }
}
