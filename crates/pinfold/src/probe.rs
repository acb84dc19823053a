//! What this machine offers to DMA from user space, what is missing, and the command that mends it.
//!
//! [`Facts`] are what was read and asked; [`Facts::findings`] judges them, one line a thing, for `pinfold doctor`.
//! Nothing here prints. Files that are missing, cut short or spoilt give `None` or an empty list.

mod devices;
mod facts;
mod findings;
mod live;
#[cfg(test)]
mod tests;

pub use crate::sys::hugepages;
pub use crate::sys::hugepages::{HugetlbPool, Thp};
pub use crate::sys::roots::Roots;
pub use devices::{Access, Bound, Device, IommuGroup, Node, Vfio};
pub use facts::{Facts, NumaNode};
pub use live::{Answer, IoUring, Live};

/// How it stands with one thing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum State {
    /// It can be used.
    Good,
    /// It can be used in part, or not by this user.
    Limited,
    /// It can not be used.
    Missing,
}

impl State {
    /// `good`, `limited` or `missing`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Limited => "limited",
            Self::Missing => "missing",
        }
    }
}

/// What was found about one thing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Which thing, in a word or two: `kernel`, `hugepages 2 MiB`, `io_uring` ...
    pub what: String,
    /// How it stands with it.
    pub state: State,
    /// What was found, in one line.
    pub detail: String,
    /// The command that mends it, where one does. `sudo` stands in it where it needs root.
    pub remedy: Option<String>,
}
