//! The driver a device had before it was bound to VFIO, recorded in a file.

use super::error::BindError;
use crate::pci::bdf::Bdf;
use std::path::{Path, PathBuf};

/// The driver settings of a device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Record {
    /// Its driver.
    pub(super) driver: Option<String>,
    /// Its `driver_override`.
    pub(super) forced: Option<String>,
}

impl Record {
    fn path(folder: &Path, bdf: Bdf) -> PathBuf {
        folder.join(bdf.to_string())
    }

    /// Writes two lines: the driver and the override, each empty where there is none.
    pub(super) fn write(&self, folder: &Path, bdf: Bdf) -> Result<(), BindError> {
        let path = Self::path(folder, bdf);
        let text = format!(
            "{}\n{}\n",
            self.driver.as_deref().unwrap_or(""),
            self.forced.as_deref().unwrap_or("")
        );
        let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, text));
        written.map_err(|error| match error.kind() {
            std::io::ErrorKind::PermissionDenied => BindError::Denied { path },
            _ => BindError::Record { path, errno: (&error).into() },
        })
    }

    pub(super) fn read(folder: &Path, bdf: Bdf) -> Option<Self> {
        let text = std::fs::read_to_string(Self::path(folder, bdf)).ok()?;
        let mut lines = text.lines().map(|line| line.trim().to_owned());
        let mut next = || lines.next().filter(|line| !line.is_empty());
        Some(Self { driver: next(), forced: next() })
    }

    /// Removes the file. One that cannot be removed is overwritten by the next bind.
    pub(super) fn remove(folder: &Path, bdf: Bdf) {
        let path = Self::path(folder, bdf);
        if let Err(error) = std::fs::remove_file(&path)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "cannot remove the record of a device's driver");
        }
    }
}
