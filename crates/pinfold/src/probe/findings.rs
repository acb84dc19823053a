//! What the facts mean: good, limited or missing, and what mends it.

mod calls;
mod devices;
mod memory;

use super::{Facts, Finding, State};
use crate::sys::Errno;

impl Facts {
    /// One finding a thing, in the order in which memory goes to a device.
    pub fn findings(&self) -> Vec<Finding> {
        let mut all = vec![kernel(self.kernel.as_deref())];
        all.extend(memory::findings(self));
        all.extend(devices::findings(self));
        all.extend(calls::findings(self));
        all
    }

    /// Whether the kernel is at least this one; `None` where its release is not known.
    pub fn kernel_at_least(&self, major: u32, minor: u32) -> Option<bool> {
        Some(release(self.kernel.as_deref()?)? >= (major, minor))
    }
}

/// `6.12.0-1-amd64` is (6, 12).
fn release(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn kernel(text: Option<&str>) -> Finding {
    let what = "kernel";
    let Some(text) = text else {
        return finding(what, State::Limited, "its release is not known: /proc is not readable");
    };
    match release(text) {
        Some(found) if found >= (5, 14) => finding(what, State::Good, text),
        Some(_) => finding(
            what,
            State::Limited,
            format!(
                "{text}: arenas bound to a NUMA node on hugepages need 5.14, sparse io_uring buffers 5.19"
            ),
        ),
        None => finding(what, State::Limited, format!("{text:?} is no release that we understand")),
    }
}

fn finding(what: impl Into<String>, state: State, detail: impl Into<String>) -> Finding {
    Finding { what: what.into(), state, detail: detail.into(), remedy: None }
}

impl Finding {
    fn mended_by(mut self, command: impl Into<String>) -> Self {
        self.remedy = Some(command.into());
        self
    }
}

/// Whether the refusal is one of permission.
fn denied(errno: Errno) -> bool {
    matches!(errno.raw(), libc::EPERM | libc::EACCES)
}

/// A number of bytes as people write it: `512 B`, `8 MiB`, `23.5 GiB`.
fn bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let mut best = format!("{bytes} B");
    for (power, unit) in (1u32..).zip(units) {
        let size = 1u64 << (10 * power);
        if bytes < size {
            break;
        }
        let tenths = u128::from(bytes) * 10 / u128::from(size);
        best = match tenths % 10 {
            0 => format!("{} {unit}", tenths / 10),
            rest => format!("{}.{rest} {unit}", tenths / 10),
        };
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_and_sizes_are_read_and_written() {
        assert_eq!(release("6.12.0-1-amd64"), Some((6, 12)));
        assert_eq!(release("6.18-rc1"), Some((6, 18)));
        assert_eq!(release("6"), None);
        assert_eq!(release("99999999999.1"), None);
        for (number, words) in
            [(0, "0 B"), (1023, "1023 B"), (8 << 20, "8 MiB"), (25_276_510_208, "23.5 GiB")]
        {
            assert_eq!(bytes(number), words);
        }
        assert_eq!(bytes(u64::MAX), "16777215.9 TiB");
    }
}
