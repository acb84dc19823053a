//! A file that is made for a run and removed at its end.

use super::OpenError;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

/// A file that is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Scratch {
    path: PathBuf,
}

impl Scratch {
    /// Makes the file, which must not exist.
    pub(crate) fn create(path: &Path) -> Result<(Self, File), OpenError> {
        let made = OpenOptions::new().read(true).write(true).create_new(true).open(path);
        let name = || path.display().to_string();
        match made {
            Ok(file) => Ok((Self { path: path.to_owned() }, file)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                Err(OpenError::ScratchExists(name()))
            }
            Err(error) => Err(OpenError::System { name: name(), error }),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!("{}, made for this run, stays: {error}", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_made_and_removed_and_takes_nothing_that_exists() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("scratch");
        let (scratch, file) = Scratch::create(&path).unwrap();
        assert!(path.exists());
        assert!(matches!(Scratch::create(&path), Err(OpenError::ScratchExists(_))));
        assert!(path.exists());
        drop((scratch, file));
        assert!(!path.exists());
    }
}
