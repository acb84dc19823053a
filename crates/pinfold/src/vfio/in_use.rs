//! Whether somebody needs what a device's driver offers: to take the disk of a mounted file system away is the mistake
//! that costs most.

use super::claim::Claims;
use super::lookup::Found;
use crate::probe::{Roots, text};
use crate::sys::Errno;
use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

/// What uses a device.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum InUse {
    /// A file system on it is mounted.
    Mounted {
        /// The block device.
        disk: String,
        /// Where.
        at: String,
    },
    /// The system swaps to it.
    Swap {
        /// The block device.
        disk: String,
    },
    /// A device mapper, RAID or the like is built on it.
    Held {
        /// The block device.
        disk: String,
        /// The first thing that is built on it.
        by: String,
    },
    /// Something holds it exclusively: a file system (of another mount namespace, or under an anonymous number), swap,
    /// RAID, the device mapper, a program.
    Claimed {
        /// The block device.
        disk: String,
        /// The programs that have it open, as far as they can be seen.
        by: Vec<String>,
    },
    /// Programs have it open, without a claim.
    Open {
        /// The block device.
        disk: String,
        /// The programs.
        by: Vec<String>,
    },
    /// Whether something uses it could not be found out.
    Unchecked {
        /// The block device.
        disk: String,
        /// Why its node could not be opened.
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
                write!(f, "{disk} is held exclusively (a file system, swap, RAID, the device mapper)")
            }
            Self::Claimed { disk, by } => write!(f, "{disk} is held exclusively, open in {}", by.join(", ")),
            Self::Open { disk, by } => write!(f, "{disk} is open in {}", by.join(", ")),
            Self::Unchecked { disk, errno } => {
                write!(f, "whether {disk} is in use could not be found out ({errno})")
            }
            Self::Interface { name } => write!(f, "the network interface {name} is up"),
        }
    }
}

impl InUse {
    /// The block device, where it is one.
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

/// What uses the device, and claims on those of its disks that nothing uses.
pub(super) fn uses(roots: &Roots, found: &Found) -> (Vec<InUse>, Claims) {
    let mut uses = Vec::new();
    let mounts = std::fs::read(roots.proc.join("self/mountinfo")).unwrap_or_default();
    let swaps = std::fs::read(roots.proc.join("swaps")).unwrap_or_default();
    let disks: Vec<String> = disks(roots, found).into_iter().collect();
    for disk in disks.iter().cloned() {
        let folder = roots.sys.join("class/block").join(&disk);
        let node = format!("/dev/{disk}");
        let number = text::word(&folder.join("dev"));
        if let Some(at) = number.and_then(|number| mounted(&mounts, &number, &node)) {
            uses.push(InUse::Mounted { disk: disk.clone(), at });
        }
        if let Some(by) = text::names(&folder.join("holders")).into_iter().next() {
            uses.push(InUse::Held { disk: disk.clone(), by });
        }
        if let Some(by) = looped(roots, &node) {
            uses.push(InUse::Held { disk: disk.clone(), by });
        }
        if text::lines(&swaps).any(|line| line.split_whitespace().next() == Some(&node)) {
            uses.push(InUse::Swap { disk });
        }
    }
    let claims = Claims::take(roots, &disks, &mut uses);
    uses.extend(interfaces(roots, found).into_iter().map(|name| InUse::Interface { name }));
    (uses, claims)
}

/// The loop device that is backed by `node`: it has it open without a claim, and in no process.
fn looped(roots: &Roots, node: &str) -> Option<String> {
    let class = roots.sys.join("class/block");
    let backed = |name: &String| {
        text::word(&class.join(name).join("loop/backing_file")).is_some_and(|path| path == node)
    };
    text::names(&class).into_iter().filter(|name| name.starts_with("loop")).find(backed)
}

/// The disks and partitions behind the device.
///
/// A namespace of an NVMe controller may hang below its subsystem instead of below the controller (multipath); then the
/// subsystem has a link to the controller.
fn disks(roots: &Roots, found: &Found) -> BTreeSet<String> {
    let class = roots.sys.join("class/block");
    let behind = |name: &String| {
        let Some(place) = real(&class.join(name)) else { return false };
        let below = |folder: &Path| folder.ancestors().any(|part| named(part, found));
        let through_subsystem = place
            .ancestors()
            .filter(|part| part.file_name().is_some_and(|n| n.to_string_lossy().starts_with("nvme-subsys")))
            .flat_map(|subsystem| text::names(subsystem).into_iter().map(|n| subsystem.join(n)))
            .filter_map(|link| real(&link))
            .any(|controller| below(&controller));
        below(&place) || through_subsystem
    };
    text::names(&class).into_iter().filter(behind).collect()
}

fn interfaces(roots: &Roots, found: &Found) -> Vec<String> {
    let class = roots.sys.join("class/net");
    let up = |name: &String| {
        let flags = text::word(&class.join(name).join("flags"));
        let flags = flags.and_then(|word| u32::from_str_radix(word.trim_start_matches("0x"), 16).ok());
        let behind = real(&class.join(name)).is_some_and(|p| p.ancestors().any(|part| named(part, found)));
        behind && flags.is_some_and(|flags| flags & 1 != 0)
    };
    text::names(&class).into_iter().filter(up).collect()
}

fn named(part: &Path, found: &Found) -> bool {
    part.file_name().is_some_and(|name| name.to_string_lossy() == found.bdf.to_string())
}

fn real(link: &Path) -> Option<PathBuf> {
    std::fs::canonicalize(link).ok()
}

/// Where the block device `8:1`, `/dev/sda1`, is mounted: by fields 3 and 5 of a line of `mountinfo`, or by its last but
/// one: btrfs has an anonymous number there.
fn mounted(mounts: &[u8], number: &str, node: &str) -> Option<String> {
    text::lines(mounts).find_map(|line| {
        let (fields, source) = line.split_once(" - ")?;
        let mut fields = fields.split(' ').skip(2);
        let same = fields.next()? == number || source.split(' ').nth(1) == Some(node);
        same.then(|| fields.nth(1).map(str::to_owned)).flatten()
    })
}
