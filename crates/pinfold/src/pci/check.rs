//! Checks what uses a device. Unbinding the disk of a mounted file system is the most expensive
//! mistake here.

use super::claim::Claims;
use super::in_use::InUse;
use super::lookup::PciDevice;
use crate::sys::files::Roots;
use crate::sys::{Errno, files};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

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
