//! What the program sees of `/dev` and `/sys`: nodes of VFIO and iommufd, and the devices.

use crate::function::Function;
use crate::kernel::Node;
use crate::sys::spawn::Change;
use std::ffi::{CString, OsStr};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Folders over which a new one is built before it is moved to its place. One exists everywhere.
const SCRATCH: [&str; 5] = ["/tmp", "/mnt", "/run", "/var", "/home"];

fn c(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// The changes that make a folder again, with its content, so that something can be added.
struct Rebuild {
    changes: Vec<Change>,
    scratch: PathBuf,
}

impl Rebuild {
    fn new() -> io::Result<Self> {
        let scratch = SCRATCH.iter().map(Path::new).find(|path| path.is_dir());
        let scratch = scratch.ok_or(io::ErrorKind::NotFound)?.to_owned();
        Ok(Self { changes: Vec::new(), scratch })
    }

    /// Begins with what is in `folder` but `left_out`.
    fn begin(&mut self, folder: &Path, left_out: &[&str]) -> io::Result<()> {
        self.changes.push(Change::Tmpfs(c(&self.scratch)?));
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let (from, at) = (entry.path(), self.scratch.join(entry.file_name()));
            if left_out.iter().any(|name| entry.file_name() == OsStr::new(name)) {
                continue;
            }
            let kind = entry.file_type()?;
            if kind.is_symlink() {
                self.changes.push(Change::Link(c(&fs::read_link(&from)?)?, c(&at)?));
                continue;
            }
            self.changes.push(match kind.is_dir() {
                true => Change::Folder(c(&at)?),
                false => Change::File(c(&at)?, Vec::new()),
            });
            self.changes.push(Change::Bind(c(&from)?, c(&at)?));
        }
        Ok(())
    }

    fn folder(&mut self, name: impl AsRef<Path>) -> io::Result<()> {
        self.changes.push(Change::Folder(c(&self.scratch.join(name))?));
        Ok(())
    }

    fn file(&mut self, name: impl AsRef<Path>, content: impl Into<Vec<u8>>) -> io::Result<()> {
        self.changes.push(Change::File(c(&self.scratch.join(name))?, content.into()));
        Ok(())
    }

    fn link(&mut self, name: impl AsRef<Path>, text: &str) -> io::Result<()> {
        let text = CString::new(text)?;
        self.changes.push(Change::Link(text, c(&self.scratch.join(name))?));
        Ok(())
    }

    /// Puts it in the folder's place.
    fn end(&mut self, folder: &Path) -> io::Result<()> {
        self.changes.push(Change::Move(c(&self.scratch)?, c(folder)?));
        Ok(())
    }
}

/// Returns the changes that show the functions to the program.
pub(crate) fn changes(functions: &[Arc<Function>], iommufd: bool) -> io::Result<Vec<Change>> {
    let mut build = Rebuild::new()?;
    let groups: std::collections::BTreeSet<u32> = functions.iter().map(|f| f.group).collect();

    build.begin(Path::new("/dev"), &["vfio", "iommu"])?;
    build.folder("vfio")?;
    build.file("vfio/vfio", "")?;
    for group in &groups {
        build.file(format!("vfio/{group}"), "")?;
    }
    if iommufd {
        build.folder("vfio/devices")?;
        for index in 0..functions.len() {
            build.file(format!("vfio/devices/vfio{index}"), "")?;
        }
        build.file("iommu", "")?;
    }
    build.end(Path::new("/dev"))?;

    // Of a machine without PCI the whole of `bus` is made again.
    let devices = Path::new("/sys/bus/pci/devices");
    let (place, prefix) = match devices.is_dir() {
        true => (devices, ""),
        false => (Path::new("/sys/bus"), "pci/devices/"),
    };
    // From a device's folder to `/sys`.
    let up = "../../../..";
    let names: Vec<String> = functions.iter().map(|f| f.bdf.to_string()).collect();
    build.begin(place, &names.iter().map(String::as_str).collect::<Vec<_>>())?;
    if !prefix.is_empty() {
        build.folder("pci")?;
        build.folder("pci/devices")?;
    }
    for (index, function) in functions.iter().enumerate() {
        let folder = format!("{prefix}{}", function.bdf);
        let identity = function.identity();
        let ([vendor, device], [sub_vendor, sub_device]) = (identity.id, identity.subsystem);
        build.folder(&folder)?;
        let mut file = |name: &str, text: String| build.file(format!("{folder}/{name}"), text);
        file("vendor", format!("{vendor:#06x}\n"))?;
        file("device", format!("{device:#06x}\n"))?;
        file("subsystem_vendor", format!("{sub_vendor:#06x}\n"))?;
        file("subsystem_device", format!("{sub_device:#06x}\n"))?;
        file("class", format!("{:#08x}\n", identity.class))?;
        file("revision", format!("{:#04x}\n", identity.revision))?;
        file("numa_node", "-1\n".to_owned())?;
        file("driver_override", "(null)\n".to_owned())?;
        file("enable", "1\n".to_owned())?;
        build.file(format!("{folder}/config"), function.config_bytes())?;
        build.link(format!("{folder}/driver"), &format!("{up}/bus/pci/drivers/vfio-pci"))?;
        let group = format!("{up}/kernel/iommu_groups/{}", function.group);
        build.link(format!("{folder}/iommu_group"), &group)?;
        if iommufd {
            build.folder(format!("{folder}/vfio-dev"))?;
            build.folder(format!("{folder}/vfio-dev/vfio{index}"))?;
            build.file(format!("{folder}/vfio-dev/vfio{index}/dev"), format!("511:{index}\n"))?;
        }
    }
    build.end(place)?;

    // Of a machine without an IOMMU the whole of `kernel`.
    let all = Path::new("/sys/kernel/iommu_groups");
    let (place, prefix) = match all.is_dir() {
        true => (all, ""),
        false => (Path::new("/sys/kernel"), "iommu_groups/"),
    };
    let numbers: Vec<String> = groups.iter().map(u32::to_string).collect();
    build.begin(place, &numbers.iter().map(String::as_str).collect::<Vec<_>>())?;
    if !prefix.is_empty() {
        build.folder(prefix)?;
    }
    for group in &groups {
        let folder = format!("{prefix}{group}");
        build.folder(&folder)?;
        build.file(format!("{folder}/type"), "DMA\n")?;
        build.folder(format!("{folder}/devices"))?;
        for function in functions.iter().filter(|f| f.group == *group) {
            let text = format!("../../../../bus/pci/devices/{}", function.bdf);
            build.link(format!("{folder}/devices/{}", function.bdf), &text)?;
        }
    }
    build.end(place)?;
    Ok(build.changes)
}

/// Returns the nodes that the program sees, by their files in its namespace.
pub(crate) fn nodes(pid: u32, functions: &[Arc<Function>]) -> Vec<(crate::process::Inode, Node)> {
    let mut names =
        vec![("vfio/vfio".to_owned(), Node::Container), ("iommu".into(), Node::Iommufd)];
    for (index, function) in functions.iter().enumerate() {
        names.push((format!("vfio/{}", function.group), Node::Group(function.group)));
        names.push((format!("vfio/devices/vfio{index}"), Node::Device(index)));
    }
    let inode = |(name, node): (String, Node)| {
        let found = fs::metadata(format!("/proc/{pid}/root/dev/{name}")).ok()?;
        Some(((found.dev(), found.ino()), node))
    };
    names.into_iter().filter_map(inode).collect()
}

/// Returns whether a path may lead to a node, by its last component: others are not looked at.
pub(crate) fn may_be_node(path: &[u8]) -> bool {
    let last = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let digits = last.strip_prefix(b"vfio").unwrap_or(last);
    last == b"iommu"
        || last == b"vfio"
        || !digits.is_empty() && digits.iter().all(u8::is_ascii_digit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_nodes_are_looked_at() {
        for path in ["/dev/vfio/vfio", "vfio", "/dev/vfio/7", "devices/vfio12", "/dev/iommu", "9"] {
            assert!(may_be_node(path.as_bytes()), "{path}");
        }
        for path in ["", "/dev/", "/dev/null", "/lib/libc.so.6", "vfiox", "vfio1x", "/dev/vfio/7/"]
        {
            assert!(!may_be_node(path.as_bytes()), "{path}");
        }
    }
}
