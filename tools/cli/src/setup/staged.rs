//! A destination that is complete or absent: it is written under a temporary name in the same
//! folder, and renamed once all of it is on the disk. If it is dropped before, nothing remains.

use super::error::OpenError;
use crate::engine::pump::Ranges;
use rustix::fs::{self, AtFlags, Mode, OFlags, RenameFlags, StatxAttributes, StatxFlags};
use rustix::io::{Errno, retry_on_intr};
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Why a destination could not be created or committed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StagedError {
    /// The name is taken.
    #[error("{0} exists: name another destination, or replace it with --force")]
    Exists(String),
    /// It is a directory.
    #[error("{0} is a directory: name a file in it")]
    Directory(String),
    /// It is a device, a pipe, a socket.
    #[error(
        "{0} is not a regular file: only those can be replaced; name a new file and write that into it (`cat`), or, of an \
         NVMe device, name the controller (vfio:BDF)"
    )]
    NotRegular(String),
    /// It is a symbolic link to nothing.
    #[error("{0} is a symbolic link to nothing: remove it, or name the file it should point to")]
    Dangling(String),
    /// The path ends in `/` or `..`.
    #[error("{0} does not name a file: append the file's name")]
    NoName(String),
    /// It would replace the source.
    #[error("{0} is the source itself: name another destination")]
    SameFile(String),
    /// A file system or a file is mounted on it: another cannot take its place.
    #[error(
        "{0} is a mount point, which cannot be replaced: unmount it, or name another destination and write that into it (`cat`)"
    )]
    MountPoint(String),
    /// It, or its folder, has an attribute that forbids it.
    #[error(
        "{0} is immutable or append-only, so no file can be renamed to it or within it: name another path, or see `chattr`"
    )]
    Immutable(String),
    /// The file system has too little free space.
    #[error(
        "{name} cannot have {bytes} bytes: its file system has {free} free; free some space there, or name a path on \
         another file system"
    )]
    NoSpace {
        /// The destination.
        name: String,
        /// The length it needs.
        bytes: u64,
        /// The free space in bytes, that of the superuser included.
        free: u64,
    },
    /// The file system, or its quota, did not grant the space.
    #[error(
        "{name} cannot have {bytes} bytes: {error}; free some space there, or name a path on another file system"
    )]
    NoRoom {
        /// The destination.
        name: String,
        /// The length it needs.
        bytes: u64,
        /// The system's error.
        error: Errno,
    },
    /// A step failed.
    #[error("{name}: {step} failed: {error}{}", advice(step, *.error))]
    System {
        /// The destination.
        name: String,
        /// The step.
        step: &'static str,
        /// The system's error.
        error: Errno,
    },
}

/// Returns what to do, to be appended to the error.
fn advice(step: &str, error: Errno) -> &'static str {
    // Steps that no file system refuses to a program that has the file open.
    let is_own = step == RANDOM || step.starts_with("flushing") || step == SIZE;
    match error {
        Errno::PERM | Errno::ACCESS | Errno::NOSYS if is_own => {
            ": a seccomp filter or a security module refuses the call: run it with a profile that allows it (of a container: \
             --security-opt seccomp=PROFILE; of a service: SystemCallFilter=)"
        }
        Errno::NOENT | Errno::NOTDIR => {
            ": name a file in a folder that exists, or make the folder first"
        }
        Errno::ACCESS => ": name a file in a folder that you may write, or change its mode",
        Errno::PERM => {
            ": the file system forbids it, for example to others than the owner (the folder's sticky bit) or for all (`lsattr`); \
             name a file in another folder"
        }
        Errno::BUSY => ": it is in use, for example as a mount point; name another destination",
        Errno::ROFS => ": the file system is read-only; name a path on another one",
        Errno::FBIG => ": larger than a file may be (`ulimit -f`, or the file system's limit)",
        Errno::NAMETOOLONG => ": choose a shorter name",
        Errno::MFILE | Errno::NFILE => ": raise the limit of open files (`ulimit -n`)",
        Errno::IO => ": the device failed; see `dmesg`",
        _ => "",
    }
}

/// Steps that no file system forbids.
const SIZE: &str = "setting its size";
const RANDOM: &str = "a random name for it (getrandom)";

/// The number of names tried.
const ATTEMPTS: usize = 16;

/// A file under a temporary name.
#[derive(Debug)]
pub(crate) struct Staged {
    directory: OwnedFd,
    temporary: OsString,
    name: OsString,
    shown: String,
    replace: bool,
    /// The final permissions.
    mode: Mode,
    file: File,
    renamed: bool,
}

impl Staged {
    /// Creates the temporary file for `destination`, which is replaced only if `replace` is set.
    /// Only its owner may open the temporary file; on commit it gets the permissions `mode` less
    /// the umask. Nothing remains if this fails.
    pub(crate) fn create(
        destination: &Path,
        replace: bool,
        mode: Mode,
        source: Option<&File>,
    ) -> Result<Self, StagedError> {
        let shown = destination.display().to_string();
        let destination = resolve(destination, replace, source)?;
        let system = |step, error| StagedError::System { name: shown.clone(), step, error };
        let Some(name) = destination.file_name() else { return Err(StagedError::NoName(shown)) };
        let parent = match destination.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let directory = fs::open(parent, flags, Mode::empty())
            .map_err(|error| system("opening its folder", error))?;
        if attributes(&directory, Path::new("")).intersects(FROZEN) {
            return Err(StagedError::Immutable(parent.display().to_string()));
        }
        let (temporary, file) =
            create_unique(&directory).map_err(|(step, error)| system(step, error))?;
        let name = name.to_owned();
        let mode = Mode::from_raw_mode(mode.as_raw_mode() & !umask());
        Ok(Self {
            directory,
            temporary,
            name,
            shown,
            replace,
            mode,
            file: file.into(),
            renamed: false,
        })
    }

    /// Returns the file under its temporary name.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Sets the length of the file and reserves space for the data of `ranges`, if the file system
    /// can; the rest are holes.
    ///
    /// A length beyond the free space is refused before anything is taken: `fallocate` would take
    /// all the free space until it fails, and meanwhile every other program's writes there fail
    /// too.
    pub(crate) fn reserve(&self, length: u64, ranges: &Ranges) -> Result<(), StagedError> {
        let bytes = ranges.data_bytes();
        if let Some(free) = self.free_space()
            && free < bytes
        {
            return Err(StagedError::NoSpace { name: self.shown.clone(), bytes, free });
        }
        retry_on_intr(|| fs::ftruncate(&self.file, length))
            .map_err(|error| self.system("setting its size", error))?;
        for range in ranges.data() {
            let (file, flags) = (&self.file, fs::FallocateFlags::empty());
            match retry_on_intr(|| fs::fallocate(file, flags, range.start, range.end - range.start))
            {
                Ok(()) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => break,
                Err(error @ (Errno::NOSPC | Errno::DQUOT)) => {
                    return Err(StagedError::NoRoom { name: self.shown.clone(), bytes, error });
                }
                Err(error) => return Err(self.system("reserving its space", error)),
            }
        }
        Ok(())
    }

    /// Returns the free bytes of the file system, if it knows its size.
    fn free_space(&self) -> Option<u64> {
        let system = fs::fstatvfs(&self.file).ok()?;
        (system.f_blocks != 0).then(|| system.f_bfree.saturating_mul(system.f_frsize))
    }

    /// Truncates the file to `bytes` bytes, flushes it, and renames it. When this succeeds, the
    /// destination is complete and survives a power loss.
    pub(crate) fn commit(mut self, bytes: u64) -> Result<(), StagedError> {
        let set_size = retry_on_intr(|| fs::ftruncate(&self.file, bytes));
        set_size.map_err(|error| self.system(SIZE, error))?;
        let set_mode = retry_on_intr(|| fs::fchmod(&self.file, self.mode));
        set_mode.map_err(|error| self.system("setting its mode", error))?;
        retry_on_intr(|| fs::fsync(&self.file))
            .map_err(|error| self.system("flushing it", error))?;
        self.rename()?;
        match retry_on_intr(|| fs::fsync(&self.directory)) {
            // Some network and host-shared file systems cannot flush a folder.
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(error) => {
                Err(self.system("flushing its folder (the file itself is complete)", error))
            }
        }
    }

    fn rename(&mut self) -> Result<(), StagedError> {
        let (directory, from, to) = (&self.directory, &self.temporary, &self.name);
        let outcome = if self.replace {
            retry_on_intr(|| fs::renameat(directory, from, directory, to))
        } else {
            let flags = RenameFlags::NOREPLACE;
            match retry_on_intr(|| fs::renameat_with(directory, from, directory, to, flags)) {
                // A file system without that flag: a hard link does not replace a file either.
                Err(Errno::INVAL | Errno::NOSYS) => {
                    fs::linkat(directory, from, directory, to, AtFlags::empty())
                        .and_then(|()| fs::unlinkat(directory, from, AtFlags::empty()))
                }
                other => other,
            }
        };
        match outcome {
            Ok(()) => self.renamed = true,
            Err(Errno::EXIST) => return Err(StagedError::Exists(self.shown.clone())),
            Err(error) => return Err(self.system("renaming it", error)),
        }
        Ok(())
    }

    fn system(&self, step: &'static str, error: Errno) -> StagedError {
        StagedError::System { name: self.shown.clone(), step, error }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.renamed
            && let Err(error) = fs::unlinkat(&self.directory, &self.temporary, AtFlags::empty())
        {
            tracing::warn!(
                "{:?}, a temporary file of {}, remains: {error}",
                self.temporary,
                self.shown
            );
        }
    }
}

/// Returns where `destination` leads, if it may be written.
fn resolve(
    destination: &Path,
    replace: bool,
    source: Option<&File>,
) -> Result<PathBuf, StagedError> {
    let shown = || destination.display().to_string();
    let system = |error| StagedError::System { name: shown(), step: "examining it", error };
    if destination.as_os_str().as_encoded_bytes().ends_with(b"/") && !destination.is_dir() {
        return Err(StagedError::NoName(shown()));
    }
    let link = match fs::lstat(destination) {
        Err(Errno::NOENT) => return Ok(destination.to_owned()),
        Err(error) => return Err(system(error)),
        Ok(stat) => fs::FileType::from_raw_mode(stat.st_mode).is_symlink(),
    };
    let existing = match fs::stat(destination) {
        Err(Errno::NOENT) if link => return Err(StagedError::Dangling(shown())),
        other => other.map_err(system)?,
    };
    let kind = fs::FileType::from_raw_mode(existing.st_mode);
    if kind.is_dir() {
        return Err(StagedError::Directory(shown()));
    }
    if let Some(source) = source {
        let source = fs::fstat(source).map_err(system)?;
        if (source.st_dev, source.st_ino) == (existing.st_dev, existing.st_ino) {
            return Err(StagedError::SameFile(shown()));
        }
    }
    if !kind.is_file() {
        return Err(StagedError::NotRegular(shown()));
    }
    if !replace {
        return Err(StagedError::Exists(shown()));
    }
    // Renaming onto it would fail, once all is written.
    let attributes = attributes(fs::CWD, destination);
    if attributes.contains(StatxAttributes::MOUNT_ROOT) {
        return Err(StagedError::MountPoint(shown()));
    }
    if attributes.intersects(FROZEN) {
        return Err(StagedError::Immutable(shown()));
    }
    if !link {
        return Ok(destination.to_owned());
    }
    std::fs::canonicalize(destination)
        .map_err(|error| system(Errno::from_io_error(&error).unwrap_or(Errno::NOENT)))
}

/// The attributes of a file that cannot be renamed, or of a folder in which nothing can be.
const FROZEN: StatxAttributes = StatxAttributes::IMMUTABLE.union(StatxAttributes::APPEND);

/// Returns the attributes of `path`, a link followed; none where the kernel or the file system does
/// not tell them (Linux 4.11; mount points 5.8): then the rename fails.
fn attributes(directory: impl AsFd, path: &Path) -> StatxAttributes {
    let flags = if path.as_os_str().is_empty() { AtFlags::EMPTY_PATH } else { AtFlags::empty() };
    fs::statx(directory, path, flags, StatxFlags::empty())
        .map_or(StatxAttributes::empty(), |statx| statx.stx_attributes & statx.stx_attributes_mask)
}

/// Creates an empty file with an unused name, which only its owner may open; returns the step that
/// failed with its error.
fn create_unique(directory: &OwnedFd) -> Result<(OsString, OwnedFd), (&'static str, Errno)> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut attempts = 0;
    loop {
        let name = temporary_name().map_err(|error| (RANDOM, error))?;
        match fs::openat(directory, OsStr::new(&name), flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => return Ok((name, file)),
            Err(Errno::EXIST) if attempts < ATTEMPTS => attempts += 1,
            Err(error) => return Err(("creating a file in its folder", error)),
        }
    }
}

/// Returns `Umask` of `/proc/self/status` (Linux 4.7); if it is unknown, only the owner gets
/// access.
fn umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|mask| u32::from_str_radix(mask.trim(), 8).ok()).unwrap_or(0o077)
}

fn temporary_name() -> Result<OsString, Errno> {
    let mut random = [0u8; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    Ok(format!(".pinfold-{:016x}.part", u64::from_ne_bytes(random)).into())
}

// A file that is created for a run and has no name during it.

/// The kind of file that a path names.
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
        // If it is part of the root file system, as in an image that is entered by chroot(1), the
        // name decides.
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
    use std::io::Write;
    use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};

    const MODE: Mode = Mode::from_raw_mode(0o644);

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn write(staged: &Staged, bytes: &[u8]) {
        let mut file = staged.file();
        file.write_all(bytes).unwrap();
    }

    #[test]
    fn a_committed_file_has_its_name_size_and_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let staged = Staged::create(&path, false, Mode::from_raw_mode(0o400), None).unwrap();
        staged.reserve(100, &Ranges::whole(100)).unwrap();
        write(&staged, b"hello, padded");
        assert!(!path.exists());
        assert_eq!(
            staged.file().metadata().unwrap().mode() & 0o777,
            0o600,
            "independent of the final mode"
        );
        staged.commit(5).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"hello");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o400);
        assert_eq!(names(dir.path()), ["out"]);
    }

    #[test]
    fn a_dropped_staged_file_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let staged = Staged::create(&dir.path().join("out"), false, MODE, None).unwrap();
        assert_eq!(names(dir.path()).len(), 1);
        drop(staged);
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn an_existing_file_is_replaced_only_on_request() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        std::fs::write(&path, "old").unwrap();
        let refused = Staged::create(&path, false, MODE, None).unwrap_err();
        assert!(matches!(refused, StagedError::Exists(_)), "{refused}");
        let staged = Staged::create(&path, true, MODE, None).unwrap();
        write(&staged, b"new");
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        staged.commit(3).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(names(dir.path()), ["out"]);
    }

    #[test]
    fn a_file_created_meanwhile_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let staged = Staged::create(&path, false, MODE, None).unwrap();
        std::fs::write(&path, "another program's").unwrap();
        assert!(matches!(staged.commit(0), Err(StagedError::Exists(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"another program's");
        assert_eq!(names(dir.path()), ["out"]);
    }

    #[test]
    fn a_link_is_followed_and_stays_a_link() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("far")).unwrap();
        std::fs::write(dir.path().join("far/real"), "old").unwrap();
        let link = dir.path().join("link");
        symlink("far/real", &link).unwrap();
        let staged = Staged::create(&link, true, MODE, None).unwrap();
        staged.commit(0).unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(std::fs::metadata(dir.path().join("far/real")).unwrap().size(), 0);
        let dangling = dir.path().join("dangling");
        symlink("nowhere", &dangling).unwrap();
        assert!(matches!(
            Staged::create(&dangling, true, MODE, None),
            Err(StagedError::Dangling(_))
        ));
    }

    #[test]
    fn a_destination_that_is_not_a_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let create = |path: &Path, source: Option<&File>| {
            Staged::create(path, true, MODE, source).unwrap_err()
        };
        assert!(matches!(create(dir.path(), None), StagedError::Directory(_)));
        assert!(matches!(create(Path::new("/dev/null"), None), StagedError::NotRegular(_)));
        assert!(matches!(create(&dir.path().join("new/"), None), StagedError::NoName(_)));
        assert!(matches!(create(&dir.path().join("no/file"), None), StagedError::System { .. }));
        let path = dir.path().join("itself");
        std::fs::write(&path, "x").unwrap();
        let other_name = dir.path().join("hard-link");
        std::fs::hard_link(&path, &other_name).unwrap();
        let source = File::open(&path).unwrap();
        assert!(matches!(create(&path, Some(&source)), StagedError::SameFile(_)));
        assert!(matches!(create(&other_name, Some(&source)), StagedError::SameFile(_)));
        assert_eq!(names(dir.path()), ["hard-link", "itself"]);
    }

    #[test]
    fn missing_space_is_reported_before_anything_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let staged = Staged::create(&dir.path().join("out"), false, MODE, None).unwrap();
        let error = staged.reserve(1 << 60, &Ranges::whole(1 << 60)).unwrap_err();
        assert!(
            matches!(error, StagedError::NoSpace { bytes, free, .. } if free < bytes),
            "{error}"
        );
        assert_eq!(staged.file().metadata().unwrap().blocks(), 0);
    }

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
