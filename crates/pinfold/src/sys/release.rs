//! The running kernel's release, and the behavior that depends on it.

/// Parses `6.12.0-1-amd64` as (6, 12).
pub(crate) fn parse_release(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Returns the kernel's release: `uname`, which needs no `/proc`.
pub(crate) fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Returns whether the running kernel is at least this one; true if its release cannot be parsed.
pub(crate) fn at_least(version: (u32, u32)) -> bool {
    parse_release(&release()).is_none_or(|release| release >= version)
}

/// Returns whether a kernel charges the memory of rings to `RLIMIT_MEMLOCK`: before Linux 5.12, and
/// again since 6.14. Between them it is charged to the control group.
pub(super) fn charges_rings(release: &str) -> bool {
    parse_release(release).is_some_and(|release| !((5, 12)..(6, 14)).contains(&release))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_parse() {
        assert_eq!(parse_release("6.12.0-1-amd64"), Some((6, 12)));
        assert_eq!(parse_release("6.18-rc1"), Some((6, 18)));
        assert_eq!(parse_release("6"), None);
        assert_eq!(parse_release("linux"), None);
    }
}
