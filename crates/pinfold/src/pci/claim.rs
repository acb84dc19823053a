//! Exclusive claims on disks. The kernel gives a block device to one exclusive holder at a time:
//! each mounted file system (also one that mountinfo shows with an anonymous number, as btrfs and
//! ZFS, or in another mount namespace), swap, RAID, the device mapper, and each program that opened
//! it with O_EXCL. A refused claim therefore means that the disk is in use, and a claim on a whole
//! disk keeps all others from it and from its partitions.

use super::lookup::PciDevice;
use crate::sys::files::Roots;
use crate::sys::{Errno, files};
use rustix::fs::{FileType, Mode, OFlags};
use std::collections::BTreeSet;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The number of checks of an unclaimed opener, and their interval: udev and blkid only inspect a
/// new disk, and have closed it by then.
const CHECKS: u32 = 20;
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Exclusive claims on disks, released on drop.
#[derive(Debug, Default)]
pub(super) struct Claims {
    held: Vec<OwnedFd>,
}

/// A disk or a partition, and its device node.
struct Node {
    disk: String,
    path: PathBuf,
    /// In the notation of sysfs and mountinfo: `259:0`.
    number: String,
}

impl Claims {
    /// Claims each of `disks`, and adds the uses that prevent it to `uses`.
    pub(super) fn acquire(roots: &Roots, disks: &[String], uses: &mut Vec<InUse>) -> Self {
        let mut claims = Self::default();
        // A partition cannot be claimed beside its disk, not even by the same program.
        let (wholes, parts): (Vec<_>, Vec<_>) = disks
            .iter()
            .filter_map(|disk| Node::find(roots, disk))
            .partition(|node| !disks.iter().any(|disk| is_part(roots, &node.disk, disk)));
        for whole in &wholes {
            let mut all = vec![whole];
            all.extend(parts.iter().filter(|part| is_part(roots, &part.disk, &whole.disk)));
            let known =
                uses.iter().any(|used| all.iter().any(|node| used.disk() == Some(&node.disk)));
            match whole.claim() {
                Ok(held) => {
                    claims.held.push(held);
                    uses.extend(all.iter().filter_map(|node| node.long_term_openers(roots)));
                }
                // No medium, or unplugged: nothing can use it.
                Err(errno) if matches!(errno.raw(), libc::ENOMEDIUM | libc::ENXIO) => {}
                Err(_) if known => {}
                Err(errno) if errno.raw() == libc::EBUSY => uses.extend(busy(roots, &all)),
                Err(errno) => uses.push(InUse::Unchecked { disk: whole.disk.clone(), errno }),
            }
        }
        claims
    }
}

/// Returns which of a disk (the first of `all`) and its partitions are claimed.
fn busy(roots: &Roots, all: &[&Node]) -> Vec<InUse> {
    let claimed = |node: &&&Node| node.claim().is_err_and(|errno| errno.raw() == libc::EBUSY);
    let mut busy: Vec<_> = all.iter().skip(1).filter(claimed).collect();
    if busy.is_empty() {
        busy.extend(all.first());
    }
    let used = |node: &&&Node| InUse::Claimed { disk: node.disk.clone(), by: node.openers(roots) };
    busy.iter().map(used).collect()
}

fn is_part(roots: &Roots, part: &str, disk: &str) -> bool {
    let place = std::fs::canonicalize(roots.sys.join("class/block").join(part));
    let above = place.ok().and_then(|place| Some(place.parent()?.file_name()?.to_owned()));
    part != disk && above.is_some_and(|name| name == disk)
}

impl Node {
    /// Returns `None` for a disk without a number: a path of a multipath disk, which nothing can
    /// open.
    fn find(roots: &Roots, disk: &str) -> Option<Self> {
        let folder = roots.sys.join("class/block").join(disk);
        let number = files::word(&folder.join("dev"))?;
        let uevent = std::fs::read(folder.join("uevent")).unwrap_or_default();
        let name =
            files::lines(&uevent).find_map(|line| line.strip_prefix("DEVNAME=").map(str::to_owned));
        let path = roots.dev.join(name.unwrap_or_else(|| disk.replace('!', "/")));
        Some(Self { disk: disk.to_owned(), path, number })
    }

    /// Opens it exclusively: `O_EXCL` without `O_CREAT`, supported for block devices since Linux
    /// 2.6.
    fn claim(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open(&self.path, flags, Mode::empty())?;
        let found = block_number(&rustix::fs::fstat(&file)?);
        // The node may be stale and belong to another device.
        if found.as_deref() == Some(&*self.number) {
            Ok(file)
        } else {
            Err(Errno::new(libc::ENODEV))
        }
    }

    /// Returns the programs that keep it open without a claim, beyond a short inspection.
    fn long_term_openers(&self, roots: &Roots) -> Option<InUse> {
        let mut by = self.openers(roots);
        for _ in 0..CHECKS {
            if by.is_empty() {
                return None;
            }
            std::thread::sleep(CHECK_INTERVAL);
            by = self.openers(roots);
        }
        Some(InUse::Open { disk: self.disk.clone(), by })
    }

    /// Returns the programs that have it open, as far as this process may see them:
    /// `qemu (pid 123)`.
    fn openers(&self, roots: &Roots) -> Vec<String> {
        let own = std::process::id().to_string();
        let pids = files::names(&roots.proc)
            .into_iter()
            .filter(|name| *name != own && name.bytes().all(|byte| byte.is_ascii_digit()));
        let open = |pid: &String| {
            let fds = roots.proc.join(pid).join("fd");
            files::names(&fds).iter().any(|fd| self.is_target_of(&fds.join(fd)))
        };
        let named = |pid: String| {
            let comm = files::word(&roots.proc.join(&pid).join("comm")).unwrap_or_default();
            format!("{comm} (pid {pid})")
        };
        pids.filter(open).map(named).collect()
    }

    fn is_target_of(&self, fd: &Path) -> bool {
        // Restricted to `/dev`: a stat on a file system that hangs would block.
        let device = std::fs::read_link(fd).is_ok_and(|path| path.starts_with("/dev"));
        device
            && rustix::fs::stat(fd)
                .is_ok_and(|stat| block_number(&stat).as_deref() == Some(&*self.number))
    }
}

/// Returns the number of a block device: `259:0`.
fn block_number(stat: &rustix::fs::Stat) -> Option<String> {
    let number =
        || format!("{}:{}", rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
    FileType::from_raw_mode(stat.st_mode).is_block_device().then(number)
}

// Checks what uses a device. Unbinding the disk of a mounted file system is the most expensive
// mistake here.

/// Returns what uses `device`, and exclusive claims on those of its disks that are unused.
pub(super) fn uses(roots: &Roots, device: &PciDevice) -> (Vec<InUse>, Claims) {
    let mut uses = Vec::new();
    let mounts = std::fs::read(roots.proc.join("self/mountinfo")).unwrap_or_default();
    let swaps = std::fs::read(roots.proc.join("swaps")).unwrap_or_default();
    let disks: Vec<String> = disks(roots, device).into_iter().collect();
    for disk in disks.iter().cloned() {
        let folder = roots.sys.join("class/block").join(&disk);
        let node = format!("/dev/{disk}");
        let number = files::word(&folder.join("dev"));
        if let Some(at) = number.and_then(|number| mounted(&mounts, &number, &node)) {
            uses.push(InUse::Mounted { disk: disk.clone(), at });
        }
        if let Some(by) = files::names(&folder.join("holders")).into_iter().next() {
            uses.push(InUse::Held { disk: disk.clone(), by });
        }
        if let Some(by) = loop_device(roots, &node) {
            uses.push(InUse::Held { disk: disk.clone(), by });
        }
        if files::lines(&swaps).any(|line| line.split_whitespace().next() == Some(&node)) {
            uses.push(InUse::Swap { disk });
        }
    }
    // Without the list of disks, or of interfaces, there is none to be checked: that is not
    // permission to take the device.
    for class in ["class/block", "class/net"] {
        let folder = roots.sys.join(class);
        match std::fs::read_dir(&folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                let (disk, errno) = (folder.display().to_string(), Errno::from(&error));
                uses.push(InUse::Unchecked { disk, errno });
            }
            _ => {}
        }
    }
    let claims = Claims::acquire(roots, &disks, &mut uses);
    uses.extend(interfaces(roots, device).into_iter().map(|name| InUse::Interface { name }));
    (uses, claims)
}

/// Returns the loop device backed by `node`: it has the node open without a claim, and in no
/// process.
fn loop_device(roots: &Roots, node: &str) -> Option<String> {
    let class = roots.sys.join("class/block");
    let backed = |name: &String| {
        files::word(&class.join(name).join("loop/backing_file")).is_some_and(|path| path == node)
    };
    files::names(&class).into_iter().filter(|name| name.starts_with("loop")).find(backed)
}

/// Returns the disks and partitions of the device.
///
/// With multipath, a namespace of an NVMe controller is a child of its subsystem instead of the
/// controller; the subsystem then has a link to the controller.
fn disks(roots: &Roots, device: &PciDevice) -> BTreeSet<String> {
    let class = roots.sys.join("class/block");
    let belongs = |name: &String| {
        let Some(place) = real(&class.join(name)) else { return false };
        let below = |folder: &Path| folder.ancestors().any(|part| named(part, device));
        let through_subsystem = place
            .ancestors()
            .filter(|part| {
                part.file_name().is_some_and(|n| n.to_string_lossy().starts_with("nvme-subsys"))
            })
            .flat_map(|subsystem| files::names(subsystem).into_iter().map(|n| subsystem.join(n)))
            .filter_map(|link| real(&link))
            .any(|controller| below(&controller));
        below(&place) || through_subsystem
    };
    files::names(&class).into_iter().filter(belongs).collect()
}

fn interfaces(roots: &Roots, device: &PciDevice) -> Vec<String> {
    let class = roots.sys.join("class/net");
    let up = |name: &String| {
        let flags = files::word(&class.join(name).join("flags"));
        let flags =
            flags.and_then(|word| u32::from_str_radix(word.trim_start_matches("0x"), 16).ok());
        let belongs =
            real(&class.join(name)).is_some_and(|p| p.ancestors().any(|part| named(part, device)));
        belongs && flags.is_some_and(|flags| flags & 1 != 0)
    };
    files::names(&class).into_iter().filter(up).collect()
}

fn named(part: &Path, device: &PciDevice) -> bool {
    part.file_name().is_some_and(|name| name.to_string_lossy() == device.bdf.to_string())
}

fn real(link: &Path) -> Option<PathBuf> {
    std::fs::canonicalize(link).ok()
}

/// Returns where the block device with this number (`8:1`) and node (`/dev/sda1`) is mounted. A
/// line of `mountinfo` has the number in field 3 and the mount point in field 5; btrfs has an
/// anonymous number there, so the last but one, the source, is compared too.
fn mounted(mounts: &[u8], number: &str, node: &str) -> Option<String> {
    files::lines(mounts).find_map(|line| {
        let (fields, source) = line.split_once(" - ")?;
        let mut fields = fields.split(' ').skip(2);
        let same = fields.next()? == number || source.split(' ').nth(1) == Some(node);
        same.then(|| fields.nth(1).map(str::to_owned)).flatten()
    })
}

// The users of a device.

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
