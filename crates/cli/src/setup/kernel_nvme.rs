//! The PCI controller behind a device file of the kernel's NVMe driver: /dev/nvme0, /dev/nvme0n1,
//! /dev/ng0n1, a partition.

use super::error::OpenError;
use pinfold::pci::Bdf;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Returns why a path does not name a controller, and what to do.
pub(crate) fn refuse(name: String, path: &Path) -> OpenError {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if path.starts_with("/dev") => return OpenError::NoDeviceFile { name, error },
        Err(_) => return OpenError::NoController(name),
    };
    let kind = match metadata.file_type() {
        kind if kind.is_block_device() => "block",
        kind if kind.is_char_device() => "char",
        _ => return OpenError::NoController(name),
    };
    let rdev = metadata.rdev();
    let number = format!("{}:{}", rustix::fs::major(rdev), rustix::fs::minor(rdev));
    match find(&Path::new("/sys/dev").join(kind).join(number)) {
        Some(Found::Pci(bdf)) => OpenError::KernelController { name, bdf },
        Some(Found::Other) => OpenError::NotPci(name),
        None => OpenError::NoController(name),
    }
}

/// What is behind an NVMe device.
#[derive(PartialEq, Eq, Debug)]
enum Found {
    Pci(Bdf),
    /// A controller over fabrics, or one that the kernel does not show.
    Other,
}

/// Follows a link in /sys/dev; `None` where it is not an NVMe device's.
fn find(link: &Path) -> Option<Found> {
    let device = fs::canonicalize(link).ok()?;
    // .../0000:01:00.0/nvme/nvme0/nvme0n1, or .../nvme-subsystem/nvme-subsys0/nvme0n1 where a
    // namespace may have several paths.
    let is_nvme = |folder: &Path| folder.file_name().is_some_and(|name| name == "nvme");
    if let Some(class) = device.ancestors().find(|folder| is_nvme(folder)) {
        return Some(class.parent().and_then(bdf_of).map_or(Found::Other, Found::Pci));
    }
    let starts = |folder: &Path, with| {
        folder.file_name().is_some_and(|n| n.to_string_lossy().starts_with(with))
    };
    let Some(subsystem) = device.ancestors().find(|folder| starts(folder, "nvme-subsys")) else {
        // The generic character devices of such namespaces are in a class of their own.
        let is_generic = device.ancestors().any(|folder| starts(folder, "nvme-generic"));
        return is_generic.then_some(Found::Other);
    };
    let mut controllers: Vec<PathBuf> = fs::read_dir(subsystem)
        .ok()?
        .filter_map(|entry| fs::canonicalize(entry.ok()?.path()).ok())
        .collect();
    controllers.sort();
    let bdf = controllers
        .iter()
        .find_map(|path| bdf_of(path.parent().filter(|up| is_nvme(up))?.parent()?));
    Some(bdf.map_or(Found::Other, Found::Pci))
}

fn bdf_of(folder: &Path) -> Option<Bdf> {
    folder.file_name()?.to_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_controller_behind_a_device_file_is_found() {
        let sys = tempfile::tempdir().unwrap();
        let at = |path: &str| sys.path().join(path);
        let controller = at("devices/pci0000:00/0000:00:01.0/0000:01:00.0/nvme/nvme0");
        fs::create_dir_all(controller.join("nvme0n1/nvme0n1p1")).unwrap();
        let fabrics = at("devices/virtual/nvme-fabrics/ctl/nvme/nvme1");
        fs::create_dir_all(&fabrics).unwrap();
        let subsystem = at("devices/virtual/nvme-subsystem/nvme-subsys0");
        fs::create_dir_all(subsystem.join("nvme2n1")).unwrap();
        fs::create_dir_all(at("devices/virtual/block/loop0")).unwrap();
        symlink(&controller, subsystem.join("nvme0")).unwrap();
        let of = |target: PathBuf| {
            let link = at("link");
            let _ = fs::remove_file(&link);
            symlink(target, &link).unwrap();
            find(&link)
        };
        let pci = Some(Found::Pci("0000:01:00.0".parse().unwrap()));
        for below in ["", "nvme0n1", "nvme0n1/nvme0n1p1"] {
            assert_eq!(of(controller.join(below)), pci, "{below}");
        }
        assert_eq!(of(subsystem.join("nvme2n1")), pci);
        assert_eq!(of(fabrics), Some(Found::Other));
        fs::remove_file(subsystem.join("nvme0")).unwrap();
        assert_eq!(of(subsystem.join("nvme2n1")), Some(Found::Other));
        assert_eq!(of(at("devices/virtual/block/loop0")), None);
        assert_eq!(of(at("nowhere")), None);
    }

    #[test]
    fn a_refusal_says_what_to_do() {
        let bdf = "0000:01:00.0".parse().unwrap();
        let text = OpenError::KernelController { name: "/dev/nvme0".into(), bdf }.to_string();
        assert!(text.contains("pinfold bind 0000:01:00.0"), "{text}");
        assert!(text.contains("pinfold nvme 0000:01:00.0"), "{text}");
        let text = refuse("/dev/null".into(), Path::new("/dev/null")).to_string();
        assert!(text.contains("is not a controller"), "{text}");
        let text = refuse("/dev/nvme99".into(), Path::new("/dev/nvme99")).to_string();
        assert!(text.contains("lspci -d ::0108"), "{text}");
    }
}
