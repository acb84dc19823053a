//! What uses a device.

use crate::sys::Errno;
use std::fmt;

/// A use of a device: a reason not to take it away from its driver.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum InUse {
    /// A file system on it is mounted.
    Mounted {
        /// The block device.
        disk: String,
        /// The mount point.
        at: String,
    },
    /// The system swaps to it.
    Swap {
        /// The block device.
        disk: String,
    },
    /// The device mapper, RAID or a loop device holds it.
    Held {
        /// The block device.
        disk: String,
        /// The first holder.
        by: String,
    },
    /// It is claimed exclusively: by a file system (in another mount namespace, or under an
    /// anonymous number), swap, RAID, the device mapper, or a program.
    Claimed {
        /// The block device.
        disk: String,
        /// The programs that have it open and are visible to this process.
        by: Vec<String>,
    },
    /// Programs have it open without a claim.
    Open {
        /// The block device.
        disk: String,
        /// The programs.
        by: Vec<String>,
    },
    /// It could not be checked.
    Unchecked {
        /// The block device, or the folder that lists them.
        disk: String,
        /// Why its node could not be opened, or the folder listed.
        errno: Errno,
    },
    /// A network interface is up.
    Interface {
        /// Its name.
        name: String,
    },
}

impl fmt::Display for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mounted { disk, at } => write!(f, "{disk} is mounted on {at}"),
            Self::Swap { disk } => write!(f, "{disk} is swap space"),
            Self::Held { disk, by } => write!(f, "{disk} is part of {by}"),
            Self::Claimed { disk, by } if by.is_empty() => {
                write!(
                    f,
                    "{disk} is claimed exclusively (a file system, swap, RAID, the device mapper)"
                )
            }
            Self::Claimed { disk, by } => {
                write!(f, "{disk} is claimed exclusively, open in {}", by.join(", "))
            }
            Self::Open { disk, by } => write!(f, "{disk} is open in {}", by.join(", ")),
            Self::Unchecked { disk, errno } => {
                write!(f, "cannot check whether {disk} is in use: {errno}")
            }
            Self::Interface { name } => write!(f, "the network interface {name} is up"),
        }
    }
}

impl InUse {
    /// Returns the block device, if the use is one of a disk.
    pub(super) fn disk(&self) -> Option<&String> {
        match self {
            Self::Mounted { disk, .. }
            | Self::Swap { disk }
            | Self::Held { disk, .. }
            | Self::Claimed { disk, .. }
            | Self::Open { disk, .. }
            | Self::Unchecked { disk, .. } => Some(disk),
            Self::Interface { .. } => None,
        }
    }
}
