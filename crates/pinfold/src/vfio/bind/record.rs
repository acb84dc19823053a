//! What a device had before it was given to VFIO, in a file.

use super::super::bdf::Bdf;
use super::{BindError, errno};
use std::path::{Path, PathBuf};

/// What a device had.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Record {
    /// Its driver.
    pub(super) driver: Option<String>,
    /// What its `driver_override` said.
    pub(super) forced: Option<String>,
}

impl Record {
    fn path(folder: &Path, bdf: Bdf) -> PathBuf {
        folder.join(bdf.to_string())
    }

    /// Writes it down. Two lines: the driver, the override; empty where there is none.
    pub(super) fn keep(&self, folder: &Path, bdf: Bdf) -> Result<(), BindError> {
        let path = Self::path(folder, bdf);
        let text =
            format!("{}\n{}\n", self.driver.as_deref().unwrap_or(""), self.forced.as_deref().unwrap_or(""));
        let kept = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, text));
        kept.map_err(|error| match error.kind() {
            std::io::ErrorKind::PermissionDenied => BindError::Denied { path },
            _ => BindError::Record { path, errno: errno(&error) },
        })
    }

    pub(super) fn read(folder: &Path, bdf: Bdf) -> Option<Self> {
        let text = std::fs::read_to_string(Self::path(folder, bdf)).ok()?;
        let mut lines = text.lines().map(|line| line.trim().to_owned());
        let mut next = || lines.next().filter(|line| !line.is_empty());
        Some(Self { driver: next(), forced: next() })
    }

    /// Where it can not be removed it is overwritten by the next bind.
    pub(super) fn forget(folder: &Path, bdf: Bdf) {
        let path = Self::path(folder, bdf);
        if let Err(error) = std::fs::remove_file(&path)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "a record of a device's driver stays behind");
        }
    }
}
