//! Giving a device to VFIO, and giving it back: [`Binder`].
//!
//! `driver_override` (Linux 3.16) names the one driver that may have a device; the old driver lets go, and the kernel is
//! asked to find one again. What was there is written down before anything is changed, so that a later process can put
//! it back. Both directions are whole or undone.

use super::bdf::Bdf;
use super::claim::Claims;
use super::in_use::{InUse, uses};
use super::lookup::{self, Found, VFIO_PCI, find, in_the_way};
use super::{Neighbour, OpenError};
use crate::probe::{Roots, text};
use crate::sys::Errno;
use record::Record;
use std::path::{Path, PathBuf};

mod record;
#[cfg(test)]
mod tests;

/// Why a device was not given to VFIO, or not given back. Everything is as it was, except where the error says so.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The device can not be looked up, or VFIO could not use it.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// Something uses what the device's driver offers.
    #[error("{bdf} is in use: {}; stop using it first, or say --force", list(.uses))]
    InUse {
        /// The device.
        bdf: Bdf,
        /// What uses it.
        uses: Vec<InUse>,
    },
    /// A program has the device open through VFIO: the kernel would wait for it, without end.
    #[error("{bdf} is open in a program ({node}): end it first; `sudo fuser -v {node}` names it")]
    Held {
        /// The device.
        bdf: Bdf,
        /// The device node that is open.
        node: String,
    },
    /// Only root may.
    #[error("{} may not be written: only root may do this; try it with sudo", path.display())]
    Denied {
        /// The file.
        path: PathBuf,
    },
    /// A file of the kernel took no write.
    #[error("{} could not be written: {errno}; {after}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        errno: Errno,
        /// How things stand now.
        after: After,
    },
    /// The kernel took all writes, and the driver has not got the device.
    #[error("{bdf} was offered to {wanted}, which did not take it (`dmesg | tail` says why); {after}")]
    NotTaken {
        /// The device.
        bdf: Bdf,
        /// The driver.
        wanted: String,
        /// How things stand now.
        after: After,
    },
    /// What was there could not be written down.
    #[error("what was there before could not be kept in {}: {errno}; nothing was changed", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// What the system said.
        errno: Errno,
    },
    /// The device is not VFIO's.
    #[error("{bdf} is not VFIO's: {} has it", driver.as_deref().unwrap_or("no driver"))]
    NotBound {
        /// The device.
        bdf: Bdf,
        /// Who has it.
        driver: Option<String>,
    },
}

/// How things stand after a failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum After {
    /// As before.
    AsBefore,
    /// The old driver could not be had back: the device is without one, or with another.
    NotAsBefore(Bdf),
}

impl std::fmt::Display for After {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AsBefore => f.write_str("everything is as it was"),
            Self::NotAsBefore(bdf) => write!(
                f,
                "and the old driver did not take the device back: `echo {bdf} | sudo tee /sys/bus/pci/drivers_probe` \
                 offers it again"
            ),
        }
    }
}

fn list(uses: &[InUse]) -> String {
    uses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// What a bind or an unbind did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Handed {
    /// The device.
    pub bdf: Bdf,
    /// The driver that had it.
    pub from: Option<String>,
    /// The driver that has it.
    pub to: Option<String>,
    /// Its IOMMU group.
    pub group: Option<u32>,
    /// Other devices of the group that keep it from being used as long as the kernel's drivers have them.
    pub others: Vec<Neighbour>,
}

/// Gives devices to VFIO and back.
#[derive(Debug)]
pub struct Binder<F = SysFiles> {
    roots: Roots,
    /// Where it is written down what was there: a folder that is gone after a reboot, like what it tells of.
    records: PathBuf,
    files: F,
}

impl Default for Binder {
    fn default() -> Self {
        Self { roots: Roots::default(), records: "/run/pinfold/bound".into(), files: SysFiles }
    }
}

impl Binder {
    /// The one of this machine.
    pub fn new() -> Self {
        Self::default()
    }
}

/// The writes to the kernel's files; a seam for tests.
pub trait Files {
    /// Writes `text` to a file that is there, by one call.
    ///
    /// # Errors
    /// What the kernel said.
    fn write(&self, path: &Path, text: &str) -> Result<(), Errno>;
}

/// The real ones.
#[derive(Clone, Copy, Debug)]
pub struct SysFiles;

impl Files for SysFiles {
    fn write(&self, path: &Path, text: &str) -> Result<(), Errno> {
        use std::io::Write;
        let written = std::fs::OpenOptions::new().write(true).open(path);
        written.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|error| errno(&error))
    }
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::new(error.raw_os_error().unwrap_or(libc::EIO))
}

impl<F: Files> Binder<F> {
    /// Gives the device to VFIO. Where VFIO has it already nothing is changed.
    ///
    /// Each of its disks is claimed exclusively before, until its driver has let go, so that nothing can begin to use one
    /// meanwhile. A disk that is in use, or open in a program, a node that cannot be opened, and a network interface that
    /// is up are [`BindError::InUse`]. With `force` the device goes all the same: what is mounted loses its disk, with all
    /// that was not written to it yet.
    ///
    /// Needs root.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind(&self, bdf: Bdf, force: bool) -> Result<Handed, BindError> {
        let found = find(&self.roots, bdf)?;
        let before = found.driver.clone();
        if before.as_deref() == Some(VFIO_PCI) {
            return Ok(self.handed(found, before));
        }
        if !self.roots.sys.join("bus/pci/drivers").join(VFIO_PCI).is_dir() {
            let missing = "the driver vfio-pci".to_owned();
            return Err(OpenError::NoModule { missing, type1: false }.into());
        }
        let without = text::word(&self.roots.sys.join("module/vfio/parameters/enable_unsafe_noiommu_mode"));
        if found.group.is_none() && without.as_deref() != Some("Y") {
            return Err(OpenError::NoIommu(bdf).into());
        }
        let (uses, claims) = uses(&self.roots, &found);
        if !uses.is_empty() && !force {
            return Err(BindError::InUse { bdf, uses });
        }
        let record = Record { driver: before.clone(), forced: overridden(&found) };
        record.keep(&self.records, bdf)?;
        self.hand(&found, VFIO_PCI, Some(VFIO_PCI), claims).map_err(|error| {
            let after = self.put_back(&found, &record);
            if after == After::AsBefore {
                Record::forget(&self.records, bdf);
            }
            error.into_error(bdf, VFIO_PCI, after)
        })?;
        Ok(self.handed(find(&self.roots, bdf)?, before))
    }

    /// Gives the device back to the driver that it had before [`bind`](Self::bind); if that is not known, to the one
    /// that the kernel chooses.
    ///
    /// Needs root.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn unbind(&self, bdf: Bdf) -> Result<Handed, BindError> {
        let found = find(&self.roots, bdf)?;
        let before = found.driver.clone();
        if before.as_deref() != Some(VFIO_PCI) {
            return Err(BindError::NotBound { bdf, driver: before });
        }
        if let Some(node) = self.open_node(&found) {
            return Err(BindError::Held { bdf, node });
        }
        let record = Record::read(&self.records, bdf).unwrap_or_default();
        let wanted = record.driver.as_deref();
        self.hand(&found, record.forced.as_deref().unwrap_or(""), wanted, Claims::default()).map_err(
            |error| {
                let now = Record { driver: before.clone(), forced: Some(VFIO_PCI.to_owned()) };
                let after = self.put_back(&found, &now);
                error.into_error(bdf, wanted.unwrap_or("any driver"), after)
            },
        )?;
        Record::forget(&self.records, bdf);
        Ok(self.handed(find(&self.roots, bdf)?, before))
    }

    fn handed(&self, found: Found, from: Option<String>) -> Handed {
        let group = found.group.map(|group| group.number);
        let mut others = group.map(|number| in_the_way(&self.roots, number)).unwrap_or_default();
        others.retain(|other| other.address != found.bdf.to_string());
        Handed { bdf: found.bdf, from, to: found.driver, group, others }
    }

    /// Puts a device into the hands of the driver that `forced` names (any, where it is empty). With `wanted` it must
    /// be that one in the end. Its disks are claimed until the driver that it has lets go.
    fn hand(&self, found: &Found, forced: &str, wanted: Option<&str>, claims: Claims) -> Result<(), Step> {
        // An empty line takes the override back.
        self.write(found.folder.join("driver_override"), &format!("{forced}\n"))?;
        let now = lookup::link_name(&found.folder.join("driver"));
        if now.is_some() && now.as_deref() != wanted {
            self.write(found.folder.join("driver/unbind"), &found.bdf.to_string())?;
        }
        drop(claims);
        if wanted.is_some() && now.as_deref() == wanted {
            return Ok(());
        }
        self.write(self.roots.sys.join("bus/pci/drivers_probe"), &found.bdf.to_string())?;
        match wanted {
            Some(_) if lookup::link_name(&found.folder.join("driver")).as_deref() != wanted => {
                Err(Step::NotTaken)
            }
            _ => Ok(()),
        }
    }

    fn write(&self, path: PathBuf, text: &str) -> Result<(), Step> {
        self.files.write(&path, text).map_err(|errno| Step::Write(path, errno))
    }

    /// Undoes what was done of [`hand`](Self::hand).
    fn put_back(&self, found: &Found, record: &Record) -> After {
        let forced = record.forced.as_deref().unwrap_or("");
        let back = match &record.driver {
            Some(driver) => self.hand(found, forced, Some(driver), Claims::default()),
            None => self.leave_without(found, forced),
        };
        let now = lookup::link_name(&found.folder.join("driver"));
        // A refused write does not matter where everything is as it was all the same.
        let same = now == record.driver && overridden(found) == record.forced;
        if back.is_ok() || same { After::AsBefore } else { After::NotAsBefore(found.bdf) }
    }

    fn leave_without(&self, found: &Found, forced: &str) -> Result<(), Step> {
        self.write(found.folder.join("driver_override"), &format!("{forced}\n"))?;
        if lookup::link_name(&found.folder.join("driver")).is_some() {
            self.write(found.folder.join("driver/unbind"), &found.bdf.to_string())?;
        }
        Ok(())
    }

    /// The node by which a program has the device open.
    fn open_node(&self, found: &Found) -> Option<String> {
        let group = found.group.as_ref()?;
        let prefix = if group.unprotected { "noiommu-" } else { "" };
        let path = self.roots.dev.join(format!("vfio/{prefix}{}", group.number));
        // A group is open once: who is refused for that knows. Opening it and closing it again changes nothing.
        let busy = rustix::fs::open(
            &path,
            rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        );
        busy.is_err_and(|errno| errno == rustix::io::Errno::BUSY).then(|| path.display().to_string())
    }
}

/// What `driver_override` says, if it says something.
fn overridden(found: &Found) -> Option<String> {
    text::word(&found.folder.join("driver_override")).filter(|word| word != "(null)")
}

/// Why a step failed.
enum Step {
    Write(PathBuf, Errno),
    NotTaken,
}

impl Step {
    fn into_error(self, bdf: Bdf, wanted: &str, after: After) -> BindError {
        match self {
            Self::Write(path, errno)
                if matches!(errno.raw(), libc::EACCES | libc::EPERM) && after == After::AsBefore =>
            {
                BindError::Denied { path }
            }
            Self::Write(path, errno) => BindError::Write { path, errno, after },
            Self::NotTaken => BindError::NotTaken { bdf, wanted: wanted.to_owned(), after },
        }
    }
}
