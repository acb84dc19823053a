//! What a target is before it is opened: its file, checked, or how much memory it shall have.

use super::{OpenError, device};
use crate::args::Memory;
use crate::memory::{self, Need};
use crate::targets::spec::TargetSpec;
use crate::units::ByteSize;
use pinfold::Domain;
use pinfold::pci::Bdf;
use pinfold::vfio::Options;
use pinfold_nvme::vfio::PciController;
use rustix::fs::OFlags;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The block of a model controller.
pub(crate) const BLOCK: u64 = 512;
/// The largest model controller on memory.
const MAX_MEMORY: u64 = 1 << 40;

/// What bytes are kept in.
#[derive(Debug)]
pub(crate) enum Medium {
    /// A file, reached by io_uring.
    File(File),
    /// Something behind a controller.
    Controller(ControllerMedium),
}

/// What a controller keeps bytes in.
#[derive(Debug)]
pub(crate) enum ControllerMedium {
    /// A file behind a model controller.
    Image {
        /// The file.
        file: File,
        /// How large the controller is.
        bytes: u64,
    },
    /// Memory behind a model controller.
    Memory {
        /// How large the controller is.
        bytes: u64,
        /// How much of it the run will fill.
        held: u64,
    },
    /// A real controller's namespace.
    Pci {
        /// The controller.
        pci: PciController,
        /// The namespace.
        nsid: u32,
    },
}

/// A target before it is opened.
#[derive(Debug)]
pub(crate) struct Place {
    /// As the user named it.
    pub(crate) name: String,
    /// The path, for messages about files.
    pub(crate) path: PathBuf,
    /// What it is kept in.
    pub(crate) medium: Medium,
}

impl Place {
    /// Memory behind a model controller, of which `used` bytes will be used.
    pub(crate) fn memory(spec: &TargetSpec, size: ByteSize, used: u64) -> Result<Self, OpenError> {
        let name = spec.to_string();
        if size.0 > MAX_MEMORY {
            return Err(OpenError::TooLarge { name, limit: MAX_MEMORY });
        }
        let held = used.min(size.0);
        // Alone: what else the run needs is known when all its targets are.
        memory::check(Need { targets: held, ..Need::default() }, Memory::Auto)?;
        Ok(Self {
            path: PathBuf::from(&name),
            name,
            medium: Medium::Controller(ControllerMedium::Memory { bytes: size.0, held }),
        })
    }

    /// A namespace of a real controller, and how many bytes it has. The controller is open, and quiet; it was started to be
    /// asked, and is started again when it is used. It shall have `interrupts` besides the admin queue's.
    pub(crate) fn pci(
        spec: &TargetSpec,
        bdf: Bdf,
        nsid: Option<u32>,
        interrupts: u32,
    ) -> Result<(Self, u64), OpenError> {
        let name = spec.to_string();
        let pci = open_pci(&name, bdf, interrupts)?;
        let namespace = device::find(&name, &device::start_alone(&name, &pci)?, nsid)?;
        let medium = Medium::Controller(ControllerMedium::Pci { pci, nsid: namespace.nsid });
        Ok((Self { path: PathBuf::from(&name), name, medium }, namespace.bytes()))
    }

    /// A file or a block device that exists, to be read and, where `write` says so, written; and how many bytes it has.
    pub(crate) fn existing(spec: &TargetSpec, path: &Path, write: bool) -> Result<(Self, u64), OpenError> {
        let name = spec.to_string();
        let (file, bytes) = if is_block_device(path) {
            open_device(path, write, &name)?
        } else {
            open_regular(path, write, name.clone())?
        };
        Ok((Self { name, path: path.to_owned(), medium: Medium::File(file) }, bytes))
    }

    /// An image that exists, and how many bytes it has.
    pub(crate) fn image(spec: &TargetSpec, path: &Path, write: bool) -> Result<(Self, u64), OpenError> {
        let name = spec.to_string();
        let (file, bytes) = open_regular(path, write, name.clone())?;
        if bytes == 0 || !bytes.is_multiple_of(BLOCK) {
            return Err(OpenError::ImageSize { name, bytes });
        }
        let medium = Medium::Controller(ControllerMedium::Image { file, bytes });
        Ok((Self { name, path: path.to_owned(), medium }, bytes))
    }

    /// A controller, of which nothing will be used but itself.
    pub(crate) fn controller(spec: &TargetSpec) -> Result<Self, OpenError> {
        match spec {
            TargetSpec::SoftMemory(size) => Self::memory(spec, *size, 0),
            TargetSpec::SoftImage(path) => Self::image(spec, path, false).map(|(place, _)| place),
            TargetSpec::File(_) => Err(OpenError::NoController(spec.to_string())),
            TargetSpec::Vfio { bdf, nsid } => {
                let name = spec.to_string();
                let pci = open_pci(&name, *bdf, 0)?;
                let medium = Medium::Controller(ControllerMedium::Pci { pci, nsid: nsid.unwrap_or(1) });
                Ok(Self { path: PathBuf::from(&name), name, medium })
            }
        }
    }

    /// A file that is being made, as what `spec` says that it is to be.
    pub(crate) fn staged(spec: &TargetSpec, path: &Path, file: File, bytes: u64) -> Self {
        let medium = match spec {
            TargetSpec::SoftImage(_) => Medium::Controller(ControllerMedium::Image { file, bytes }),
            _ => Medium::File(file),
        };
        Self { name: spec.to_string(), path: path.to_owned(), medium }
    }

    /// The file, where there is one.
    pub(crate) fn file(&self) -> Option<&File> {
        match &self.medium {
            Medium::File(file) | Medium::Controller(ControllerMedium::Image { file, .. }) => Some(file),
            Medium::Controller(_) => None,
        }
    }

    /// How many bytes of memory it holds in the end.
    pub(crate) fn held_bytes(&self) -> u64 {
        match &self.medium {
            Medium::Controller(ControllerMedium::Memory { held, .. }) => *held,
            _ => 0,
        }
    }

    /// Whether a controller stands before it.
    pub(crate) fn has_controller(&self) -> bool {
        !matches!(self.medium, Medium::File(_))
    }

    /// Whether the same file is behind both.
    pub(crate) fn is_same_file(&self, other: &Self) -> bool {
        let id =
            |place: &Self| place.file().and_then(|file| file.metadata().ok()).map(|m| (m.dev(), m.ino()));
        id(self).is_some() && id(self) == id(other)
    }

    /// The address space that a real controller is in.
    pub(crate) fn domain(&self) -> Option<&Domain> {
        match &self.medium {
            Medium::Controller(ControllerMedium::Pci { pci, .. }) => Some(pci.domain()),
            _ => None,
        }
    }

    /// Whether any block of its file is not a hole; of a real controller and a block device it is taken for granted.
    pub(crate) fn holds_data(&self) -> bool {
        let used = |metadata: Metadata| metadata.file_type().is_block_device() || metadata.blocks() > 0;
        self.domain().is_some() || self.file().and_then(|file| file.metadata().ok()).is_some_and(used)
    }
}

fn open_pci(name: &str, bdf: Bdf, interrupts: u32) -> Result<PciController, OpenError> {
    // Number 0 is the admin queue's.
    let vectors = if interrupts > 0 { interrupts.saturating_add(1) } else { 0 };
    PciController::open(&bdf.to_string(), &Options::new(), vectors)
        .map_err(|error| OpenError::Pci { name: name.to_owned(), error })
}

/// The address space of a run with these targets: that of the real controller, or one behind the software IOMMU.
pub(crate) fn domain_of(places: &[&Place]) -> Result<Domain, OpenError> {
    let mut real = places.iter().filter_map(|place| Some((place, place.domain()?)));
    let Some((first, domain)) = real.next() else { return Domain::soft().map_err(OpenError::Domain) };
    let others = places.iter().filter(|place| place.has_controller() && place.name != first.name);
    match others.map(|place| place.name.clone()).next() {
        Some(other) => Err(OpenError::Mixed { first: first.name.clone(), other }),
        None => Ok(domain.clone()),
    }
}

fn is_block_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// A block device; one that is written must be nobody else's: no file system's, no swap, no part of another device.
fn open_device(path: &Path, write: bool, name: &str) -> Result<(File, u64), OpenError> {
    let system = |error| OpenError::System { name: name.to_owned(), error };
    let flags = if write { OFlags::EXCL.bits().cast_signed() } else { 0 };
    let mut file =
        OpenOptions::new().read(true).write(write).custom_flags(flags).open(path).map_err(system)?;
    let bytes = file.seek(SeekFrom::End(0)).map_err(system)?;
    Ok((file, bytes))
}

fn open_regular(path: &Path, write: bool, name: String) -> Result<(File, u64), OpenError> {
    // Opening a pipe would wait for its other end.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let opened = OpenOptions::new().read(true).write(write).custom_flags(flags).open(path);
    let system = |error| OpenError::System { name: name.clone(), error };
    let file = opened.map_err(system)?;
    let metadata = file.metadata().map_err(system)?;
    if !metadata.is_file() {
        return Err(OpenError::NotRegular(name));
    }
    Ok((file, metadata.len()))
}
