//! Exclusive claims on disks. The kernel gives a block device to one exclusive holder at a time:
//! each mounted file system (also one that mountinfo shows with an anonymous number, as btrfs and
//! ZFS, or in another mount namespace), swap, RAID, the device mapper, and each program that opened
//! it with O_EXCL. A refused claim therefore means that the disk is in use, and a claim on a whole
//! disk keeps all others from it and from its partitions.

use super::in_use::InUse;
use crate::sys::files::Roots;
use crate::sys::{Errno, files};
use rustix::fs::{FileType, Mode, OFlags};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often, and how long apart, an unclaimed opener is checked: udev and blkid only inspect a new
/// disk, and have closed it by then.
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
    /// As sysfs and mountinfo write it: `259:0`.
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
