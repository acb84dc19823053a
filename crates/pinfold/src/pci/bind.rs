//! Binding a device to VFIO and back: [`Binder`].
//!
//! `driver_override` (Linux 3.16) names the one driver that may have a device; the old driver is
//! unbound, and the kernel is asked to find one again. The previous state is recorded before
//! anything changes, so that a later process can restore it. Both directions are complete or rolled
//! back.

#[cfg(test)]
mod tests;

use super::claim::{Claims, uses};
use super::lookup::{self, Bdf, GroupMember, PciDevice, VFIO_PCI, blocking_members, find};
use crate::pci::claim::InUse;
use crate::pci::lookup::NoDevice;
use crate::sys::files::Roots;
use crate::sys::{Errno, files, kernel};
use std::fmt;
use std::path::{Path, PathBuf};

/// The result of a bind or an unbind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DriverChange {
    /// The device.
    pub bdf: Bdf,
    /// The previous driver.
    pub from: Option<String>,
    /// The driver now.
    pub to: Option<String>,
    /// The IOMMU group.
    pub group: Option<u32>,
    /// Other devices of the group whose drivers prevent its use.
    pub others: Vec<GroupMember>,
}

impl fmt::Display for DriverChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name =
            |driver: &Option<String>| driver.clone().unwrap_or_else(|| "no driver".to_owned());
        if self.from == self.to {
            write!(f, "{}: {} has it already", self.bdf, name(&self.to))?;
        } else {
            write!(f, "{}: {} -> {}", self.bdf, name(&self.from), name(&self.to))?;
        }
        match self.group {
            Some(group) => write!(f, ", group {group}")?,
            None => write!(f, ", in no IOMMU group")?,
        }
        if self.to.as_deref() == Some(VFIO_PCI) && !self.others.is_empty() {
            let others: Vec<String> = self
                .others
                .iter()
                .map(|other| format!("{} ({})", other.address, other.driver))
                .collect();
            let others = others.join(", ");
            write!(
                f,
                "\n  the IOMMU cannot tell it from {others}: bind these to VFIO too, or it cannot be opened"
            )?;
        }
        Ok(())
    }
}

/// Binds devices to VFIO, and returns them to their drivers.
#[derive(Debug)]
pub struct Binder<W = Sysfs> {
    roots: Roots,
    /// The directory that records the previous driver: it does not survive a reboot, as the binding
    /// does not.
    records: PathBuf,
    sysfs: W,
}

impl Default for Binder {
    fn default() -> Self {
        Self { roots: Roots::default(), records: "/run/pinfold/bound".into(), sysfs: Sysfs }
    }
}

impl Binder {
    /// Returns the binder of this machine.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Writes to the kernel's files; replaced in tests.
pub trait SysfsWrite {
    /// Writes `text` to an existing file with one call.
    ///
    /// # Errors
    /// The kernel's.
    fn write(&self, path: &Path, text: &str) -> Result<(), Errno>;
}

/// The sysfs of this machine.
#[derive(Clone, Copy, Debug)]
pub struct Sysfs;

impl SysfsWrite for Sysfs {
    fn write(&self, path: &Path, text: &str) -> Result<(), Errno> {
        use std::io::Write;
        let written = std::fs::OpenOptions::new().write(true).open(path);
        written
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .map_err(|error| (&error).into())
    }
}

impl<W: SysfsWrite> Binder<W> {
    /// Binds the device to VFIO. Changes nothing if it already is.
    ///
    /// Each of its disks is claimed exclusively first, until its driver is unbound, so that no use
    /// can begin meanwhile. A disk that is in use or open in a program, a node that cannot be
    /// opened, and a network interface that is up are [`BindError::InUse`]. `force` binds it
    /// regardless: a mounted file system then loses its disk, with everything that was not yet
    /// written to it.
    ///
    /// Needs root.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind(&self, bdf: Bdf, force: bool) -> Result<DriverChange, BindError> {
        let device = find(&self.roots, bdf)?;
        let before = device.driver.clone();
        if before.as_deref() == Some(VFIO_PCI) {
            return Ok(self.change(device, before));
        }
        if !self.roots.sys.join("bus/pci/drivers").join(VFIO_PCI).is_dir() {
            return Err(BindError::NoDriver);
        }
        let noiommu =
            files::word(&self.roots.sys.join("module/vfio/parameters/enable_unsafe_noiommu_mode"));
        if device.group.is_none() && noiommu.as_deref() != Some("Y") {
            return Err(BindError::NoIommu(bdf));
        }
        let (uses, claims) = uses(&self.roots, &device);
        if !uses.is_empty() && !force {
            return Err(BindError::InUse { bdf, uses });
        }
        let record = Record { driver: before.clone(), forced: driver_override(&device) };
        record.write(&self.records, bdf)?;
        self.rebind(&device, VFIO_PCI, Some(VFIO_PCI), claims).map_err(|error| {
            let rollback = self.roll_back(&device, &record);
            if rollback == Rollback::Complete {
                Record::remove(&self.records, bdf);
            }
            error.into_error(bdf, VFIO_PCI, rollback)
        })?;
        Ok(self.change(find(&self.roots, bdf)?, before))
    }

    /// Returns the device to the driver that it had before [`bind`](Self::bind), or to the one that
    /// the kernel chooses if that is not recorded.
    ///
    /// Needs root.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn unbind(&self, bdf: Bdf) -> Result<DriverChange, BindError> {
        let device = find(&self.roots, bdf)?;
        let before = device.driver.clone();
        if before.as_deref() != Some(VFIO_PCI) {
            return Err(BindError::NotBound { bdf, driver: before });
        }
        if let Some(node) = self.open_node(&device) {
            return Err(BindError::Busy { bdf, node });
        }
        let record = Record::read(&self.records, bdf).unwrap_or_default();
        let wanted = record.driver.as_deref();
        let forced = record.forced.as_deref().unwrap_or("");
        self.rebind(&device, forced, wanted, Claims::default()).map_err(|error| {
            let now = Record { driver: before.clone(), forced: Some(VFIO_PCI.to_owned()) };
            let rollback = self.roll_back(&device, &now);
            error.into_error(bdf, wanted.unwrap_or("any driver"), rollback)
        })?;
        Record::remove(&self.records, bdf);
        Ok(self.change(find(&self.roots, bdf)?, before))
    }

    fn change(&self, device: PciDevice, from: Option<String>) -> DriverChange {
        let group = device.group.map(|group| group.number);
        let mut others =
            group.map(|number| blocking_members(&self.roots, number)).unwrap_or_default();
        others.retain(|other| other.address != device.bdf.to_string());
        DriverChange { bdf: device.bdf, from, to: device.driver, group, others }
    }

    /// Moves the device to the driver that `forced` names (any, if empty). With `wanted` it must be
    /// that one in the end. Its disks stay claimed until the current driver is unbound.
    fn rebind(
        &self,
        device: &PciDevice,
        forced: &str,
        wanted: Option<&str>,
        claims: Claims,
    ) -> Result<(), Step> {
        // An empty line removes the override.
        self.write(device.folder.join("driver_override"), &format!("{forced}\n"))?;
        let now = lookup::link_name(&device.folder.join("driver"));
        if now.is_some() && now.as_deref() != wanted {
            self.write(device.folder.join("driver/unbind"), &device.bdf.to_string())?;
        }
        drop(claims);
        if wanted.is_some() && now.as_deref() == wanted {
            return Ok(());
        }
        self.write(self.roots.sys.join("bus/pci/drivers_probe"), &device.bdf.to_string())?;
        match wanted {
            Some(_) if lookup::link_name(&device.folder.join("driver")).as_deref() != wanted => {
                Err(Step::DriverRefused)
            }
            _ => Ok(()),
        }
    }

    fn write(&self, path: PathBuf, text: &str) -> Result<(), Step> {
        self.sysfs.write(&path, text).map_err(|errno| Step::Write(path, errno))
    }

    /// Undoes a partial [`rebind`](Self::rebind).
    fn roll_back(&self, device: &PciDevice, record: &Record) -> Rollback {
        let forced = record.forced.as_deref().unwrap_or("");
        let undone = match &record.driver {
            Some(driver) => self.rebind(device, forced, Some(driver), Claims::default()),
            None => self.leave_unbound(device, forced),
        };
        let now = lookup::link_name(&device.folder.join("driver"));
        // A failed write does not matter if the state is the previous one.
        let same = now == record.driver && driver_override(device) == record.forced;
        if undone.is_ok() || same { Rollback::Complete } else { Rollback::Incomplete(device.bdf) }
    }

    fn leave_unbound(&self, device: &PciDevice, forced: &str) -> Result<(), Step> {
        self.write(device.folder.join("driver_override"), &format!("{forced}\n"))?;
        if lookup::link_name(&device.folder.join("driver")).is_some() {
            self.write(device.folder.join("driver/unbind"), &device.bdf.to_string())?;
        }
        Ok(())
    }

    /// Returns the node through which a program has the device open.
    fn open_node(&self, device: &PciDevice) -> Option<String> {
        let path = device.group.as_ref()?.node(&self.roots);
        // A group can be open once, so a refusal tells. Opening and closing it changes nothing.
        let opened = rustix::fs::open(
            &path,
            rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        );
        opened
            .is_err_and(|errno| errno == rustix::io::Errno::BUSY)
            .then(|| path.display().to_string())
    }
}

/// Returns the device's `driver_override`, if it has one.
fn driver_override(device: &PciDevice) -> Option<String> {
    files::word(&device.folder.join("driver_override")).filter(|word| word != "(null)")
}

/// Why a step failed.
enum Step {
    Write(PathBuf, Errno),
    DriverRefused,
}

impl Step {
    fn into_error(self, bdf: Bdf, wanted: &str, rollback: Rollback) -> BindError {
        match self {
            Self::Write(path, errno)
                if matches!(errno.raw(), libc::EACCES | libc::EPERM)
                    && rollback == Rollback::Complete =>
            {
                BindError::Denied { path }
            }
            Self::Write(path, errno) => BindError::Write { path, errno, rollback },
            Self::DriverRefused => {
                BindError::DriverRefused { bdf, wanted: wanted.to_owned(), rollback }
            }
        }
    }
}

// The driver a device had before it was bound to VFIO, recorded in a file.

/// The driver settings of a device.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Record {
    /// Its driver.
    driver: Option<String>,
    /// Its `driver_override`.
    forced: Option<String>,
}

impl Record {
    fn path(folder: &Path, bdf: Bdf) -> PathBuf {
        folder.join(bdf.to_string())
    }

    /// Writes two lines: the driver and the override, each empty where there is none.
    fn write(&self, folder: &Path, bdf: Bdf) -> Result<(), BindError> {
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

    fn read(folder: &Path, bdf: Bdf) -> Option<Self> {
        let text = std::fs::read_to_string(Self::path(folder, bdf)).ok()?;
        let mut lines = text.lines().map(|line| line.trim().to_owned());
        let mut next = || lines.next().filter(|line| !line.is_empty());
        Some(Self { driver: next(), forced: next() })
    }

    /// Removes the file. One that cannot be removed is overwritten by the next bind.
    fn remove(folder: &Path, bdf: Bdf) {
        let path = Self::path(folder, bdf);
        if let Err(error) = std::fs::remove_file(&path)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "cannot remove the record of a device's driver");
        }
    }
}

// Errors of binding and unbinding.

/// Why a device was not bound to VFIO, or not returned to its driver. Nothing has changed, except
/// where the error's [`Rollback`] says so.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// There is no such device.
    #[error(transparent)]
    NoDevice(#[from] NoDevice),
    /// The kernel module `vfio-pci` is not loaded.
    #[error("the driver vfio-pci is not loaded: {}", kernel::load("vfio-pci"))]
    NoDriver,
    /// No IOMMU translates the device's accesses.
    #[error(
        "{0} is in no IOMMU group: switch the IOMMU on in the firmware and on the kernel's command line \
         (`pinfold doctor` says what is missing)"
    )]
    NoIommu(Bdf),
    /// The device is in use.
    #[error("{bdf} is in use: {}; stop using it first, or pass --force", list(.uses))]
    InUse {
        /// The device.
        bdf: Bdf,
        /// The uses of the device.
        uses: Vec<InUse>,
    },
    /// A program has the device open through VFIO; an unbind would block until it closes it.
    #[error("{bdf} is open in a program ({node}): end it first; `sudo fuser -v {node}` names it")]
    Busy {
        /// The device.
        bdf: Bdf,
        /// The device node that is open.
        node: String,
    },
    /// The caller is not root.
    #[error("cannot write {}: permission denied; {}", path.display(), as_root())]
    Denied {
        /// The file.
        path: PathBuf,
    },
    /// A write to a file of the kernel failed.
    #[error("cannot write {}: {errno}; {rollback}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        errno: Errno,
        /// The state it left.
        rollback: Rollback,
    },
    /// The driver did not accept the device.
    #[error("{wanted} did not accept {bdf} (`dmesg | tail` says why); {rollback}")]
    DriverRefused {
        /// The device.
        bdf: Bdf,
        /// The driver.
        wanted: String,
        /// The state it left.
        rollback: Rollback,
    },
    /// The previous driver could not be recorded.
    #[error("cannot record the previous driver in {}: {errno}; nothing was changed", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The system's error.
        errno: Errno,
    },
    /// The device is not bound to VFIO.
    #[error("{bdf} is not bound to VFIO, but to {}", driver.as_deref().unwrap_or("no driver"))]
    NotBound {
        /// The device.
        bdf: Bdf,
        /// Its driver.
        driver: Option<String>,
    },
}

/// The state after a failed bind or unbind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rollback {
    /// As before.
    Complete,
    /// The previous driver did not accept the device again: it has none, or another.
    Incomplete(Bdf),
}

impl fmt::Display for Rollback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Complete => f.write_str("everything is as it was"),
            Self::Incomplete(bdf) => write!(
                f,
                "and the previous driver did not accept the device again: `echo {bdf} | sudo tee \
                 /sys/bus/pci/drivers_probe` offers it once more"
            ),
        }
    }
}

fn as_root() -> &'static str {
    if rustix::process::geteuid().is_root() {
        "although this is root: look at a user namespace, or a security module"
    } else {
        "run it as root (sudo)"
    }
}

fn list(uses: &[InUse]) -> String {
    uses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
