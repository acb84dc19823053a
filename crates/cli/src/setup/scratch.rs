//! A file that is created for a run and has no name during it.

use super::error::OpenError;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// What a path names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// Nothing: a file can be created.
    New,
    /// A folder: a file can be created in it.
    Folder,
    /// A file or device.
    Exists,
}

/// Returns what `path` names. Only what the kernel says not to exist does not.
pub(crate) fn place(path: &Path) -> Result<Place, OpenError> {
    let name = || path.display().to_string();
    match path.metadata() {
        Ok(metadata) if metadata.is_dir() => Ok(Place::Folder),
        Ok(_) => Ok(Place::Exists),
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(OpenError::System { name: name(), error })
        }
        Err(_) if path.symlink_metadata().is_ok() => Err(OpenError::Dangling(name())),
        Err(_) => Ok(Place::New),
    }
}

/// The file systems of devices and of the kernel, in which no file is created: the name of a device
/// that does not exist would become a file in memory.
const RESERVED: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Checks that a file that would be created at `path` would not be among the machine's devices. The
/// file system decides, not the name: `/dev/shm` is one for files, and devices may be mounted
/// elsewhere.
pub(crate) fn check_folder(path: &Path) -> Result<(), OpenError> {
    let parent =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // If it cannot be found, nothing can be created in it.
    let Ok(folder) = parent.canonicalize() else { return Ok(()) };
    let device = |path: &Path| path.metadata().map(|metadata| metadata.dev()).ok();
    let is_in = |reserved: &&&str| {
        let place = device(Path::new(**reserved));
        // Where it is part of the root file system, as in an image that is entered by chroot(1),
        // the name decides.
        let is_mount = place != device(Path::new("/"));
        place.is_some() && place == device(&folder) && (is_mount || folder.starts_with(**reserved))
    };
    match RESERVED.iter().find(is_in) {
        Some(folder) => Err(OpenError::AmongDevices { name: path.display().to_string(), folder }),
        None => Ok(()),
    }
}

/// Creates the file, which must not exist, and unlinks it: however the run ends, power loss
/// included, nothing remains. While it has its name it is empty, and only its owner may open it.
pub(crate) fn scratch(path: &Path) -> Result<File, OpenError> {
    check_folder(path)?;
    let created = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path);
    let name = || path.display().to_string();
    let file = created.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => OpenError::ScratchExists(name()),
        _ => OpenError::System { name: name(), error },
    })?;
    std::fs::remove_file(path).map_err(|error| OpenError::System { name: name(), error })?;
    Ok(file)
}

/// Creates such a file in `folder`.
pub(crate) fn scratch_in(folder: &Path) -> Result<File, OpenError> {
    // A few may be those of programs that were killed.
    let names = (0..100)
        .map(|number| folder.join(format!(".pinfold-{}-{number}.scratch", std::process::id())));
    let mut last = OpenError::ScratchExists(folder.display().to_string());
    for path in names {
        match scratch(&path) {
            Err(error @ OpenError::ScratchExists(_)) => last = error,
            other => return other,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_scratch_file_has_no_name_and_replaces_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("scratch");
        let file = scratch(&path).unwrap();
        assert!(!path.exists());
        file.write_all_at(b"secret", 0).unwrap();
        let metadata = file.metadata().unwrap();
        assert_eq!((metadata.nlink(), metadata.mode() & 0o777, metadata.len()), (0, 0o600, 6));
        std::fs::write(&path, "mine").unwrap();
        assert!(matches!(scratch(&path), Err(OpenError::ScratchExists(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    }

    #[test]
    fn nothing_is_created_among_devices() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("devices");
        std::os::unix::fs::symlink("/dev", &link).unwrap();
        for path in [
            "/dev/pinfold-none",
            "/dev/../dev/pinfold-none",
            "/proc/pinfold-none",
            "/sys/kernel/pinfold-none",
        ] {
            let error = scratch(Path::new(path)).unwrap_err();
            assert!(matches!(error, OpenError::AmongDevices { .. }), "{path}: {error}");
            assert!(!Path::new(path).exists());
        }
        assert!(matches!(scratch(&link.join("none")), Err(OpenError::AmongDevices { .. })));
        assert!(matches!(scratch_in(&link), Err(OpenError::AmongDevices { .. })));
    }

    #[test]
    fn a_file_system_in_memory_below_dev_is_one_for_files() {
        let device = |path: &str| Path::new(path).metadata().map(|metadata| metadata.dev()).ok();
        if device("/dev/shm").is_none() || device("/dev/shm") == device("/dev") {
            return; // nothing is mounted there
        }
        check_folder(Path::new("/dev/shm/pinfold-none")).unwrap();
    }

    #[test]
    fn a_path_is_new_only_if_it_does_not_exist() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        std::fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        assert_eq!(place(dir.path()).unwrap(), Place::Folder);
        assert_eq!(place(&file).unwrap(), Place::Exists);
        assert_eq!(place(&dir.path().join("new")).unwrap(), Place::New);
        assert!(matches!(place(&link), Err(OpenError::Dangling(_))));
        assert!(matches!(place(&file.join("below")), Err(OpenError::System { .. })));
        let file = scratch_in(dir.path()).unwrap();
        assert_eq!(
            (file.metadata().unwrap().nlink(), std::fs::read_dir(dir.path()).unwrap().count()),
            (0, 2)
        );
    }
}
