//! A file that is created for a run and has no name during it.

use super::error::OpenError;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Creates the file, which must not exist, and unlinks it: however the run ends, power loss included, nothing remains.
/// While it has its name it is empty, and only its owner may open it.
pub(crate) fn scratch(path: &Path) -> Result<File, OpenError> {
    let created = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path);
    let name = || path.display().to_string();
    let file = created.map_err(|error| match error.kind() {
        ErrorKind::AlreadyExists => OpenError::ScratchExists(name()),
        _ => OpenError::System { name: name(), error },
    })?;
    std::fs::remove_file(path).map_err(|error| OpenError::System { name: name(), error })?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt};

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
}
