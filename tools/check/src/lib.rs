//! Runs an unmodified program that opens VFIO against a model device, without hardware, and reports
//! what its driver does wrong.
//!
//! The program's calls of VFIO and iommufd are answered by seccomp's user notification; the device
//! is the model controller of `pinfold-nvme-model`, or the model disk of `pinfold-virtio`; its accesses go through the address space that
//! the program has mapped to the program's memory. [`run`] does all of it. The page `docs/check.md`
//! says what it sees, and what it cannot.
//!
//! ```no_run
//! use pinfold_check::{CheckConfig, DeviceConfig, DeviceModel, run};
//! use pinfold_nvme_model::MemoryMedia;
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = DeviceConfig {
//!     bdf: "0000:01:00.0".parse()?,
//!     group: 7,
//!     media: Arc::new(MemoryMedia::new(64 << 20)?),
//!     model: DeviceModel::nvme(),
//! };
//! let program = ["qemu-img", "info", "nvme://0000:01:00.0/1"].map(Into::into).to_vec();
//! let report = run(&CheckConfig::new(vec![device], program))?;
//! for finding in &report.findings {
//!     eprint!("{finding}");
//! }
//! # Ok(())
//! # }
//! ```

mod devices;
mod findings;
mod function;
mod hostile;
mod irq;
mod kernel;
mod memory_calls;
mod namespace;
mod nvme;
mod pci;
mod process;
mod space;
mod span;
mod supervisor;
mod symbols;
mod sys;
mod virtio;
mod watch;

pub use devices::{DeviceConfig, DeviceError, DeviceModel};
pub use findings::{Finding, KINDS, Kind, Severity};
pub use function::Fate;
pub use hostile::{Knob, KnobError};
pub use pci::Identity;
pub use supervisor::Ending;

use findings::Findings;
use kernel::{Kernel, Shared};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use supervisor::Supervisor;
use sys::spawn::{SpawnError, Step};

/// What is run, and against which devices.
#[derive(Clone, Debug)]
pub struct CheckConfig {
    /// The devices that the program finds. Only they exist.
    pub devices: Vec<DeviceConfig>,
    /// The program and its arguments.
    pub program: Vec<OsString>,
    /// The seed of hostile devices; `None` for devices that behave well.
    pub hostile: Option<u64>,
    /// Knobs that have these values, whatever the seed decides; of several of a name the last.
    pub knobs: Vec<Knob>,
    /// The width of the IOMMU in bits: 39 or 48.
    pub iova_bits: u32,
    /// Whether there is an iommufd, beside type 1.
    pub iommufd: bool,
    /// Whether calls by which memory goes (`munmap` and others) are looked at, too. Each then takes
    /// longer.
    pub watch_memory: bool,
    /// Kills the program after this time.
    pub time_limit: Option<Duration>,
    /// Kills the program, and all that it has started, when it is set, as by a signal's handler.
    pub stop: Arc<AtomicBool>,
    /// Identifiers of findings that are not reported.
    pub suppress: Vec<String>,
}

impl CheckConfig {
    /// Creates a configuration with devices that behave well, behind an IOMMU of 39 bits, with
    /// iommufd and type 1, and without a time limit.
    pub fn new(devices: Vec<DeviceConfig>, program: Vec<OsString>) -> Self {
        let (hostile, iova_bits, time_limit) = (None, 39, None);
        let suppress = Vec::new();
        let knobs = Vec::new();
        let (iommufd, watch_memory) = (true, false);
        Self {
            devices,
            program,
            hostile,
            knobs,
            iova_bits,
            iommufd,
            watch_memory,
            time_limit,
            stop: Arc::default(),
            suppress,
        }
    }
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct CheckReport {
    /// The findings, in the order in which they were made; of repeated ones the first.
    pub findings: Vec<Finding>,
    /// How often each kind was found.
    pub counts: BTreeMap<&'static str, u64>,
    /// How many findings were suppressed.
    pub suppressed: u64,
    /// How the program ended.
    pub ending: Ending,
    /// How many commands the devices executed.
    pub commands: u64,
    /// The knobs of each device, as `NAME=VALUE`.
    pub knobs: Vec<Vec<String>>,
    /// What has become of each device.
    pub fates: Vec<Fate>,
}

impl CheckReport {
    /// Returns the worst severity among the findings.
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).max()
    }
}

/// Why nothing was checked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// A device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The program could not be started.
    #[error("cannot run {program}: {error}")]
    Program {
        /// Its name.
        program: String,
        /// The system error.
        error: io::Error,
    },
    /// The machine refused a namespace.
    #[error("cannot give the program {what}: {error}; {next}")]
    Namespace {
        /// What was refused.
        what: &'static str,
        /// The system error.
        error: io::Error,
        /// What to do.
        next: &'static str,
    },
    /// The machine refused the filter.
    #[error("cannot install seccomp's notification: {error}; {next}")]
    Filter {
        /// The system error.
        error: io::Error,
        /// What to do.
        next: &'static str,
    },
    /// A system call of check itself failed.
    #[error("{call} failed: {error}")]
    System {
        /// The call.
        call: &'static str,
        /// The system error.
        error: io::Error,
    },
}

impl CheckError {
    /// Returns the error of the system that refused it, if that is the reason and the message does not
    /// say what to do: where a namespace is refused, "no space left" is a limit of namespaces.
    pub fn system(&self) -> Option<&io::Error> {
        match self {
            Self::Device(DeviceError::Model(error)) => error.system(),
            Self::Namespace { error, .. } => {
                (error.raw_os_error() != Some(libc::ENOSPC)).then_some(error)
            }
            Self::Device(DeviceError::System(error))
            | Self::Program { error, .. }
            | Self::Filter { error, .. }
            | Self::System { error, .. } => Some(error),
            Self::Device(DeviceError::Small { .. } | DeviceError::Twice { .. }) => None,
        }
    }
}

fn start_error(SpawnError { step, error }: SpawnError, program: &OsString) -> CheckError {
    const NEXT: &str = "run it as root, allow user namespaces \
        (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), \
        or, in Docker, use --security-opt seccomp=unconfined --cap-add SYS_ADMIN";
    const FULL: &str = "raise the limits of namespaces (sysctl user.max_user_namespaces, \
        user.max_mnt_namespaces)";
    let next = if error.raw_os_error() == Some(libc::ENOSPC) { FULL } else { NEXT };
    match step {
        Step::UserNamespace | Step::UserMap => {
            CheckError::Namespace { what: "a user namespace", error, next }
        }
        Step::MountNamespace => CheckError::Namespace { what: "a mount namespace", error, next },
        Step::Mount => CheckError::Namespace {
            what: "devices in /dev and /sys",
            error,
            next: "a security module or a read-only /sys may refuse mounts",
        },
        Step::NoNewPrivileges | Step::Filter => CheckError::Filter {
            next: match error.raw_os_error() {
                Some(libc::EINVAL) => "it needs Linux 5.19 or later",
                Some(libc::EBUSY) => {
                    "another program already receives notifications of this one (a container's \
                     runtime, or another check): run it outside"
                }
                _ => "the container's seccomp profile may forbid it",
            },
            error,
        },
        Step::Message => CheckError::System { call: "sendmsg", error },
        Step::Exec => {
            CheckError::Program { program: program.to_string_lossy().into_owned(), error }
        }
    }
}

/// Runs the program to its end, and its children to theirs.
///
/// It takes over the children of this process, so it is for a program that does nothing else
/// meanwhile.
///
/// # Errors
/// [`CheckError`]: the program did not run, or was killed because check failed.
pub fn run(config: &CheckConfig) -> Result<CheckReport, CheckError> {
    let system = |call| move |error: io::Error| CheckError::System { call, error };
    let findings = Arc::new(Findings::new(config.suppress.clone()));
    let functions = devices::build(&config.devices, config.hostile, &config.knobs, &findings)?;
    let knobs = functions.iter().map(|function| function.knobs().to_vec()).collect();
    let changes =
        namespace::changes(&functions, config.iommufd).map_err(system("reading /dev and /sys"))?;
    let shared = Shared {
        findings: findings.clone(),
        functions: functions.clone(),
        iova_bits: config.iova_bits,
    };
    let kernel = Kernel::new(shared).map_err(system("fstat"))?;
    let none = OsString::new();
    let name = config.program.first().unwrap_or(&none);
    // What outlives its parent becomes a child of this process, and is waited for.
    let own = rustix::process::getpid();
    rustix::process::set_child_subreaper(Some(own))
        .map_err(|errno| system("PR_SET_CHILD_SUBREAPER")(errno.into()))?;
    let own_user = !supervisor::may_mount();
    let memory = config.watch_memory;
    let children = supervisor::Children::open().map_err(system("opening /proc/self/task"))?;
    let (child, listener) = sys::spawn::spawn(&config.program, changes, own_user, memory)
        .map_err(|error| start_error(error, name))?;
    // What the program opens is open here, too. It has the limit that it was given.
    let mut files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    files.current = files.maximum;
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, files);
    let mut supervisor = Supervisor::new(kernel, listener, child.id(), children);
    let ending = supervisor.run(child.id(), config.time_limit, &config.stop);
    if ending.is_err() {
        supervisor.kill_children();
    }
    let ending = ending.map_err(system("the notification"))?;
    drop(supervisor);
    let commands = functions.iter().map(|function| function.requests()).sum();
    let fates = functions.iter().map(|function| function.fate()).collect();
    let suppressed = findings.suppressed();
    let (findings, counts) = findings.take();
    Ok(CheckReport { findings, counts, suppressed, ending, commands, knobs, fates })
}
