//! A target before it is opened: its file, checked, or the size of its memory.

use super::error::OpenError;
use super::stack::{self, BufferNeed, MemoryNeed, Stack};
use crate::args::{MachineArgs, Memory, SoftOptions, StackArgs, TargetSpec, Via};
use crate::units::ByteSize;
use pinfold::pci::Bdf;
use pinfold::soft::SoftConfig;
use pinfold::vfio::Options;
use pinfold::{Arena, Domain, MappingPolicy, Source, is_image_in_use};
use pinfold_nvme::Registers;
use pinfold_nvme::driver::{Config, Controller, Namespace, Vector};
use pinfold_nvme::vfio::PciController;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The smallest block of a controller.
pub(crate) const BLOCK: u64 = 512;
/// The most memory of a model controller.
const MAX_MEMORY: u64 = 1 << 40;

/// The storage of a target's bytes.
#[derive(Debug)]
pub(crate) enum Medium {
    /// A file, through io_uring.
    File(File),
    /// A controller.
    Controller(ControllerMedium),
}

/// The storage of a controller's bytes.
#[derive(Debug)]
pub(crate) enum ControllerMedium {
    /// An image file, of a model controller.
    Image {
        /// The file.
        file: File,
        /// The namespace's capacity.
        bytes: u64,
        /// The controller's options.
        options: SoftOptions,
    },
    /// Memory, of a model controller.
    Memory {
        /// The namespace's capacity.
        bytes: u64,
        /// The part of it that the run will use.
        held: u64,
        /// The controller's options.
        options: SoftOptions,
    },
    /// A real controller's namespace.
    Pci {
        /// The controller.
        pci: RealController,
        /// The namespace.
        nsid: u32,
    },
}

/// A real controller that is open.
#[derive(Clone, Debug)]
pub(crate) enum RealController {
    /// Through VFIO.
    Vfio(PciController),
    /// Behind a unit that the program has taken.
    #[cfg(feature = "vtd")]
    Vtd(pinfold_nvme::vtd::UnitController),
}

impl RealController {
    /// Returns its registers.
    pub(crate) fn registers(&self) -> Arc<dyn Registers> {
        match self {
            Self::Vfio(pci) => pci.registers(),
            #[cfg(feature = "vtd")]
            Self::Vtd(pci) => pci.registers(),
        }
    }

    /// Returns its address space.
    pub(crate) fn domain(&self) -> &Domain {
        match self {
            Self::Vfio(pci) => pci.domain(),
            #[cfg(feature = "vtd")]
            Self::Vtd(pci) => pci.domain(),
        }
    }

    /// Returns the interrupt vector with this number, if there is one.
    pub(crate) fn vector(&self, number: u16) -> Option<Vector> {
        match self {
            Self::Vfio(pci) => pci.vector(number),
            #[cfg(feature = "vtd")]
            Self::Vtd(_) => None,
        }
    }
}

/// A target before it is opened.
#[derive(Debug)]
pub(crate) struct ResolvedTarget {
    /// The name that the user gave.
    pub(crate) name: String,
    /// The path, for messages about files.
    pub(crate) path: PathBuf,
    /// The storage of its bytes.
    pub(crate) medium: Medium,
}

impl ResolvedTarget {
    /// Resolves a model controller with memory, of which the run uses `used` bytes.
    pub(crate) fn memory(spec: &TargetSpec, size: ByteSize, used: u64) -> Result<Self, OpenError> {
        let name = spec.to_string();
        if size.0 > MAX_MEMORY {
            return Err(OpenError::TooLarge { name, limit: MAX_MEMORY });
        }
        let held = used.min(size.0);
        // Checked alone: what else the run needs is known once all its targets are.
        if held > 0 {
            stack::check(MemoryNeed { targets: held, ..MemoryNeed::default() }, Memory::Auto)?;
        }
        Ok(Self {
            path: PathBuf::from(&name),
            name,
            medium: Medium::Controller(ControllerMedium::Memory {
                bytes: size.0,
                held,
                options: spec.soft_options(),
            }),
        })
    }

    /// Resolves a namespace of a real controller, with its capacity. The controller was started to
    /// be identified, is disabled now, and is started again when it is used. It has `interrupts`
    /// besides the admin queue's.
    pub(crate) fn pci(
        spec: &TargetSpec,
        (via, bdf): (Via, Bdf),
        nsid: Option<u32>,
        interrupts: u32,
        machine: MachineArgs,
    ) -> Result<(Self, u64), OpenError> {
        let name = spec.to_string();
        let pci = open_pci(&name, via, bdf, interrupts, machine)?;
        let namespace = find_namespace(&name, &start_alone(&name, &pci)?, nsid)?;
        let medium = Medium::Controller(ControllerMedium::Pci { pci, nsid: namespace.nsid });
        Ok((Self { path: PathBuf::from(&name), name, medium }, namespace.bytes()))
    }

    /// Resolves an existing file or block device, with its length; it is opened for writing if
    /// `write` is set.
    pub(crate) fn existing(
        spec: &TargetSpec,
        path: &Path,
        write: bool,
    ) -> Result<(Self, u64), OpenError> {
        let name = spec.to_string();
        let (file, bytes) = if is_block_device(path) {
            open_device(path, write, &name)?
        } else {
            open_regular(path, write, name.clone())?
        };
        if write {
            refuse_in_use(&file, &name)?;
        }
        Ok((Self { name, path: path.to_owned(), medium: Medium::File(file) }, bytes))
    }

    /// Resolves an existing image, with its length.
    pub(crate) fn image(
        spec: &TargetSpec,
        path: &Path,
        write: bool,
    ) -> Result<(Self, u64), OpenError> {
        let name = spec.to_string();
        let (file, bytes) = open_regular(path, write, name.clone())?;
        if write {
            refuse_in_use(&file, &name)?;
        }
        let options = spec.soft_options();
        let block = options.block_bytes;
        if bytes == 0 || !bytes.is_multiple_of(block.into()) {
            return Err(OpenError::ImageSize { name, bytes, block });
        }
        let medium = Medium::Controller(ControllerMedium::Image { file, bytes, options });
        Ok((Self { name, path: path.to_owned(), medium }, bytes))
    }

    /// Resolves a controller whose data will not be used.
    pub(crate) fn controller(spec: &TargetSpec, machine: MachineArgs) -> Result<Self, OpenError> {
        match spec {
            TargetSpec::SoftMemory(size, _) => Self::memory(spec, *size, 0),
            TargetSpec::SoftImage(path, _) => {
                Self::image(spec, path, false).map(|(target, _)| target)
            }
            TargetSpec::File(path) => Err(refuse_kernel_nvme(spec.to_string(), path)),
            TargetSpec::Pci { via, bdf, nsid } => {
                let name = spec.to_string();
                let pci = open_pci(&name, *via, *bdf, 0, machine)?;
                let medium =
                    Medium::Controller(ControllerMedium::Pci { pci, nsid: nsid.unwrap_or(1) });
                Ok(Self { path: PathBuf::from(&name), name, medium })
            }
        }
    }

    /// Resolves a file that is being created for `spec`.
    pub(crate) fn staged(spec: &TargetSpec, path: &Path, file: File, bytes: u64) -> Self {
        let medium = match spec {
            TargetSpec::SoftImage(_, options) => {
                Medium::Controller(ControllerMedium::Image { file, bytes, options: *options })
            }
            _ => Medium::File(file),
        };
        Self { name: spec.to_string(), path: path.to_owned(), medium }
    }

    /// Returns the file, if there is one.
    pub(crate) fn file(&self) -> Option<&File> {
        match &self.medium {
            Medium::File(file) | Medium::Controller(ControllerMedium::Image { file, .. }) => {
                Some(file)
            }
            Medium::Controller(_) => None,
        }
    }

    /// Returns how many bytes of memory it will hold.
    pub(crate) fn held_bytes(&self) -> u64 {
        match &self.medium {
            Medium::Controller(ControllerMedium::Memory { held, .. }) => *held,
            _ => 0,
        }
    }

    /// Returns whether it is a controller's namespace.
    pub(crate) fn has_controller(&self) -> bool {
        !matches!(self.medium, Medium::File(_))
    }

    /// Returns whether both have the same file.
    pub(crate) fn is_same_file(&self, other: &Self) -> bool {
        let id = |target: &Self| {
            target.file().and_then(|file| file.metadata().ok()).map(|m| (m.dev(), m.ino()))
        };
        id(self).is_some() && id(self) == id(other)
    }

    /// Returns the address space of a real controller.
    pub(crate) fn domain(&self) -> Option<&Domain> {
        match &self.medium {
            Medium::Controller(ControllerMedium::Pci { pci, .. }) => Some(pci.domain()),
            _ => None,
        }
    }

    /// Returns whether its file may hold data; real controllers and block devices are assumed to.
    pub(crate) fn holds_data(&self) -> bool {
        let used = |file: &File| {
            file.metadata().map_or(true, |metadata| {
                metadata.file_type().is_block_device()
                    || may_hold_data(file, metadata.len(), metadata.blocks())
            })
        };
        self.domain().is_some() || self.file().is_some_and(used)
    }
}

/// Returns whether a file of `bytes` bytes in `blocks` blocks may hold data. Without any block it
/// may, too: file systems that allocate late, that keep small files elsewhere or that do not count
/// (FUSE, 9p) report none, so it must be known to be one hole. Where holes are not known, all is
/// data.
fn may_hold_data(file: &File, bytes: u64, blocks: u64) -> bool {
    let is_hole =
        || bytes == 0 || rustix::fs::seek(file, rustix::fs::SeekFrom::Data(0)) == Err(Errno::NXIO);
    blocks > 0 || !is_hole()
}

#[cfg_attr(not(feature = "vtd"), expect(unused_variables, reason = "it allows nothing"))]
fn open_pci(
    name: &str,
    via: Via,
    bdf: Bdf,
    interrupts: u32,
    machine: MachineArgs,
) -> Result<RealController, OpenError> {
    // Vector 0 is the admin queue's.
    let vectors = if interrupts > 0 { interrupts.saturating_add(1) } else { 0 };
    let opened = match via {
        Via::Vfio => PciController::open(&bdf.to_string(), &Options::new(), vectors)
            .map(RealController::Vfio),
        #[cfg(feature = "vtd")]
        Via::Vtd if !machine.i_own_this_machine => {
            return Err(OpenError::NotOwned(name.to_owned()));
        }
        #[cfg(feature = "vtd")]
        Via::Vtd => super::owned::open(bdf).map(RealController::Vtd),
    };
    opened.map_err(|error| OpenError::Pci { name: name.to_owned(), error })
}

/// Checks that `--iommu-units` is not used with a real controller, before any target is opened.
pub(crate) fn check_units<'s>(
    units: Option<u8>,
    specs: impl IntoIterator<Item = &'s TargetSpec>,
) -> Result<(), OpenError> {
    let real = specs.into_iter().find(|spec| matches!(spec, TargetSpec::Pci { .. }));
    units.zip(real).map_or(Ok(()), |(units, spec)| {
        let reason =
            format!("{spec} is behind the IOMMU units of this machine: leave the option out");
        Err(OpenError::Unsupported { option: "iommu-units", value: units.to_string(), reason })
    })
}

/// Returns the address space of a run with these targets: the real controller's, or one of a
/// software IOMMU of `units` units, by default 1.
pub(crate) fn domain_of(
    targets: &[&ResolvedTarget],
    units: Option<u8>,
) -> Result<Domain, OpenError> {
    let mut real = targets.iter().filter_map(|target| Some((target, target.domain()?)));
    let Some((first, domain)) = real.next() else {
        let mut config = SoftConfig::default();
        config.units = units.unwrap_or(config.units);
        return Domain::soft_with(config).map_err(OpenError::Domain);
    };
    let others =
        targets.iter().filter(|target| target.has_controller() && target.name != first.name);
    match others.map(|target| target.name.clone()).next() {
        Some(other) => Err(OpenError::Mixed { first: first.name.clone(), other }),
        None => Ok(domain.clone()),
    }
}

/// Allocates the memory of a run with these targets, after a check that the machine has it.
pub(crate) fn stack_for(
    args: StackArgs,
    targets: &[&ResolvedTarget],
    buffers: BufferNeed,
) -> Result<Stack, OpenError> {
    let domain = domain_of(targets, args.iommu_units)?;
    let controllers = targets.iter().filter(|target| target.has_controller()).count() as u64;
    let held = targets.iter().map(|target| target.held_bytes()).sum();
    stack::check(Stack::need(buffers, controllers, held), args.memory)?;
    Ok(Stack::build(args, domain, buffers, controllers)?)
}

/// Refuses a file that is to be written while a program has locked it as an image: both would write
/// it.
pub(crate) fn refuse_in_use(file: &File, name: &impl ToString) -> Result<(), OpenError> {
    if is_image_in_use(file) { Err(OpenError::InUse(name.to_string())) } else { Ok(()) }
}

/// Refuses to replace or empty such a file: the program would go on with one that has no name any
/// more, or no contents.
pub(crate) fn refuse_to_replace(path: &Path, name: &impl ToString) -> Result<(), OpenError> {
    // A FIFO would be waited for.
    let is_file = path.metadata().is_ok_and(|metadata| metadata.is_file());
    match is_file.then(|| File::open(path)) {
        Some(Ok(file)) => refuse_in_use(&file, name),
        _ => Ok(()),
    }
}

fn is_block_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// Opens a block device. For writing it must not be in use: by a file system, as swap, or as part
/// of another device.
fn open_device(path: &Path, write: bool, name: &str) -> Result<(File, u64), OpenError> {
    let system = |error| OpenError::System { name: name.to_owned(), error };
    let flags = if write { OFlags::EXCL.bits().cast_signed() } else { 0 };
    let mut file = OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(flags)
        .open(path)
        .map_err(|error| cannot_open(name.to_owned(), write, error))?;
    let bytes = file.seek(SeekFrom::End(0)).map_err(system)?;
    Ok((file, bytes))
}

fn cannot_open(name: String, write: bool, error: std::io::Error) -> OpenError {
    match error.kind() {
        ErrorKind::ReadOnlyFilesystem if write => OpenError::ReadOnly(name),
        _ => OpenError::System { name, error },
    }
}

fn open_regular(path: &Path, write: bool, name: String) -> Result<(File, u64), OpenError> {
    // Without O_NONBLOCK, opening a pipe would wait for its other end.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let opened = OpenOptions::new().read(true).write(write).custom_flags(flags).open(path);
    let system = |error| OpenError::System { name: name.clone(), error };
    let file = opened.map_err(|error| cannot_open(name.clone(), write, error))?;
    let metadata = file.metadata().map_err(system)?;
    if !metadata.is_file() {
        return Err(OpenError::NotRegular(name));
    }
    let bytes = metadata.len();
    // A file whose content the kernel generates on a read (/proc, cgroups) has a length of 0.
    let more = file.read_at(&mut [0], bytes).map_err(system)? > 0;
    // One that has grown meanwhile is found by what needs the whole of it.
    if more && file.metadata().map_err(system)?.len() == bytes {
        return Err(OpenError::NoLength { name, bytes });
    }
    Ok((file, bytes))
}

// The PCI controller behind a device file of the kernel's NVMe driver: /dev/nvme0, /dev/nvme0n1,
// /dev/ng0n1, a partition.

/// Returns why a path does not name a controller, and what to do.
pub(crate) fn refuse_kernel_nvme(name: String, path: &Path) -> OpenError {
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

/// The controller behind an NVMe device.
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

// Starts the NVMe driver on a controller, and finds its namespace.

/// The time that the driver waits for a completion.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A controller that has been started.
pub(crate) type Driver = Controller<Arc<dyn Registers>, Arena>;

/// Starts a controller with `queues` queues whose memory comes from `memory`.
pub(super) fn start_driver(
    name: &str,
    registers: Arc<dyn Registers>,
    memory: Arena,
    queues: u16,
    retry_limit: Duration,
) -> Result<Driver, OpenError> {
    let config = Config { timeout: TIMEOUT, queues, retry_limit, ..Config::default() };
    Controller::start(registers, memory, config)
        .map_err(|error| OpenError::Driver { name: name.to_owned(), error })
}

/// Starts a real controller with a little memory of its own, to identify it.
pub(super) fn start_alone(name: &str, pci: &RealController) -> Result<Driver, OpenError> {
    let rings =
        Arena::builder().size(1 << 20).source(Source::Plain).mapping_policy(MappingPolicy::Whole);
    let rings = rings.build(pci.domain());
    let rings = rings.map_err(|error| OpenError::Rings { name: name.to_owned(), error })?;
    let Config { queues, retry_limit, .. } = Config::default();
    start_driver(name, pci.registers(), rings, queues, retry_limit)
}

/// Returns the named namespace, or the first usable one.
pub(super) fn find_namespace(
    name: &str,
    controller: &Driver,
    nsid: Option<u32>,
) -> Result<Namespace, OpenError> {
    match nsid {
        None => controller
            .namespaces()
            .first()
            .copied()
            .ok_or_else(|| OpenError::NoNamespace(name.to_owned())),
        Some(nsid) => controller.namespace(nsid).map_err(|reason| OpenError::NoSuchNamespace {
            name: name.to_owned(),
            nsid,
            reason,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_file_without_blocks_holds_data_unless_it_is_a_hole() {
        let file = tempfile::tempfile().unwrap();
        assert!(!may_hold_data(&file, 0, 0));
        file.set_len(1 << 20).unwrap();
        assert!(!may_hold_data(&file, 1 << 20, 0));
        file.write_all_at(b"data", 300_000).unwrap();
        // The answer of a file system that does not count blocks.
        assert!(may_hold_data(&file, 1 << 20, 0));
        assert!(may_hold_data(&file, 1 << 20, 8));
    }

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
    fn a_read_only_file_system_can_be_read() {
        let error = |kind: ErrorKind| std::io::Error::from(kind);
        let read_only = |write| {
            cannot_open("disk".into(), write, error(ErrorKind::ReadOnlyFilesystem)).to_string()
        };
        assert!(read_only(true).contains("serve -r"), "{}", read_only(true));
        assert!(!read_only(false).contains("serve -r"), "{}", read_only(false));
        let text = cannot_open("disk".into(), true, error(ErrorKind::NotFound)).to_string();
        assert!(text.contains("check the path"), "{text}");
    }

    #[test]
    fn a_refusal_says_what_to_do() {
        let bdf = "0000:01:00.0".parse().unwrap();
        let text = OpenError::KernelController { name: "/dev/nvme0".into(), bdf }.to_string();
        assert!(text.contains("pinfold bind 0000:01:00.0"), "{text}");
        assert!(text.contains("pinfold nvme 0000:01:00.0"), "{text}");
        let text = refuse_kernel_nvme("/dev/null".into(), Path::new("/dev/null")).to_string();
        assert!(text.contains("is not a controller"), "{text}");
        let text = refuse_kernel_nvme("/dev/nvme99".into(), Path::new("/dev/nvme99")).to_string();
        assert!(text.contains("lspci -d ::0108"), "{text}");
    }
}
