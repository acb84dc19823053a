//! Where the kernel's file systems are mounted.

use std::path::PathBuf;

/// Where `/proc`, `/sys` and `/dev` are. Tests, and a look at files copied from another machine,
/// use other places.
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
