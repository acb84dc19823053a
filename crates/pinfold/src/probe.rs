//! Reports the support of this machine for DMA from user space: each facility, what is missing, and
//! the command that fixes it.
//!
//! [`Facts`] are what was read and queried; [`Facts::findings`] judges them, one line each, for
//! `pinfold doctor`. Nothing here prints. Files that are missing, truncated or malformed give
//! `None` or an empty list.
//!
//! ```
//! use pinfold::probe::{Facts, State};
//!
//! for finding in Facts::here().findings() {
//!     if finding.state != State::Good {
//!         // limited  MEMLOCK  soft 8 MiB, hard 8 MiB, 0 B used by this process: sudo prlimit ...
//!         println!("{finding}");
//!     }
//! }
//! ```

mod devices;
mod facts;
mod findings;
#[cfg(test)]
mod tests;

pub use crate::sys::files::Roots;
pub use crate::sys::hugepages::{HugetlbPool, Thp};
pub use crate::sys::kernel::{RingRefusal, RingRefusalCause};
pub use crate::sys::limits::{
    FileLimit, MapLimit, MapSetting, MemlockRefusal, OpenFiles, SystemMemory,
};
pub use crate::sys::process::{Privileges, placed, share_one_heap, shell_word};
pub use crate::sys::threads::ThreadLimit;
pub use crate::sys::{control_group, hugepages, threads};
pub use devices::{Access, Bound, Device, IommuGroup, Node, Unreadable, Vfio};
pub use facts::{Answer, Facts, IoUring, Live, NumaNode};
pub use findings::{Finding, State, bytes};
