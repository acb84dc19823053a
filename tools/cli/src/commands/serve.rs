//! `serve`: a target as a network block device.

use crate::args::{Protect, ServeArgs, TargetSpec};
use crate::failure::Failure;
use crate::output;
use crate::report::CpuReport;
use crate::report::serve::{Listening, ServeReport};
use crate::report::stack::StackReport;
use crate::server::address::NbdAddress;
use crate::server::error::ServeError;
use crate::server::listener::Listener;
use crate::server::payload::{Asked, MAX_PAYLOAD, Machine, PIECE, Plan};
use crate::server::run::{self, Captive, PidFile, PrivateFolder, ServeOptions};
use crate::server::stream;
use crate::server::watch::Watch;
use crate::setup::error::OpenError;
use crate::setup::open::{OpenTarget, TargetOptions, check_requests};
use crate::setup::resolve::{Medium, ResolvedTarget, check_units, stack_for};
use crate::setup::stack::BufferNeed;
use crate::signal::Interrupt;
use crate::targets::file;
use crate::targets::target::TargetInfo;
use crate::units::ByteSize;
use pinfold::{CpuTime, ImageLock, lock_image, uring};
use pinfold_nbd::{BlockSizes, Export, TransmissionFlags};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fmt::Display;
use std::fs::File;
use std::time::Instant;

/// The least alignment that O_DIRECT is used with.
const SECTOR: u64 = 512;

/// Serves until a signal arrives, answers the requests in flight, and prints the report.
pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    let mut passed = Listener::passed()?;
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    if passed.is_none() && args.nbd.is_none() && args.unix.is_none() && args.run.is_none() {
        return Err(ServeError::NoAddress.into());
    }
    match serve(args, plan(args, None)?, &mut passed, &interrupt) {
        // The default number of threads is that of the controller's queues.
        Err(Failure::Open(OpenError::Queues { granted, .. }))
            if args.threads.is_none() && granted > 0 =>
        {
            serve(args, plan(args, Some(granted.into()))?, &mut passed, &interrupt)
        }
        other => other,
    }
}

fn plan(args: &ServeArgs, queues: Option<usize>) -> Result<Plan, ServeError> {
    let locks = matches!(args.target, TargetSpec::Pci { .. });
    Plan::new(
        Asked { buffers: args.buffers, threads: args.threads, queues, locks },
        Machine::here(),
    )
}

fn serve(
    args: &ServeArgs,
    Plan { threads, budget }: Plan,
    passed: &mut Option<Listener>,
    interrupt: &Interrupt,
) -> Result<(), Failure> {
    let tls = args.tls_certificates.as_deref();
    let tls = tls.map(|folder| stream::configure(folder, args.tls_verify_peer)).transpose()?;
    let (target, capacity) = resolve(args, threads)?;
    let length = range(args, &target.name, capacity)?;
    let requests = check_requests(ByteSize(PIECE as u64), args.iodepth, &[&target])?;
    // A quarter more than is used at any time, since buffers of several sizes leave gaps.
    let count = (budget * threads).div_ceil(PIECE) * 5 / 4 + 2 * threads;
    let buffers = BufferNeed { count, bytes: PIECE, threads: threads + 2, lower: "--buffers" };
    let stack = stack_for(args.stack, &[&target], buffers)?;
    let system = |error| OpenError::System { name: target.name.clone(), error };
    let medium = target.file().map(File::try_clone).transpose().map_err(system)?;
    let file = match &target.medium {
        Medium::File(_) => medium.as_ref(),
        Medium::Controller(_) => None,
    };
    let lock = medium.as_ref().map(|file| lock_image(file, !args.read_only));
    if lock == Some(ImageLock::InUse) {
        return Err(OpenError::InUse(target.name).into());
    }
    let watch = medium.as_ref().map(File::try_clone).transpose().map_err(system)?;
    let watch = watch.map(|file| Watch::new(target.path.clone(), file, capacity));
    // The alignment that O_DIRECT needs, if the range is a multiple of it: otherwise the page cache
    // is used, and that is reported.
    let sector = file.and_then(uring::direct_alignment).map_or(SECTOR, u64::from).max(SECTOR);
    let options = TargetOptions {
        alignment: file::alignment([args.offset.0, length, sector]),
        depth: requests.depth,
        jobs: threads,
        jobs_option: "threads",
        poll: args.poll,
        direct: !args.cached,
        one_thread: false,
    };
    let mut target = OpenTarget::open(target, &stack, options)?;
    check_blocks(args, target.target().info())?;
    let export = export(args, target.target().info(), file, length);
    raise_descriptor_limit();
    // A folder is removed behind the socket in it.
    let folder = private_folder(args, passed.as_ref())?;
    let listener = listen(args, folder.as_ref(), passed)?;
    let uris = listener.uris(&args.name, tls.is_some());
    let name = args.target.to_string();
    let _pidfile =
        args.pidfile.as_deref().map(|path| PidFile::write(path, medium.as_ref())).transpose()?;
    let mut notes = target.notes();
    let given = [args.offset.0, args.length.map_or(0, |length| length.0)];
    let unaligned = given.iter().any(|bytes| !bytes.is_multiple_of(sector));
    if unaligned && file.is_some() && !args.cached {
        notes.push(format!(
            "{name}: give --offset and --length as multiples of {sector} to use O_DIRECT"
        ));
    }
    if let Some(ImageLock::Unavailable(errno)) = lock {
        notes.push(format!(
            "{name}: it cannot be locked ({errno}): let no other program write it meanwhile"
        ));
    }
    if args.run.is_some() {
        // At the start; the report follows at the end.
        notes.iter().for_each(|note| tracing::warn!("{note}"));
    }
    let command = args
        .run
        .as_deref()
        .map(|line| Ok((line, Captive::start(line, &listener, &uris, interrupt)?)));
    let command = command.transpose().map_err(|error: ServeError| error)?;
    if command.is_none() {
        let sizes = export.sizes();
        print(args, &Listening::new(name.clone(), export.size(), uris, sizes, notes.clone()))?;
    }

    let (began, before) = (Instant::now(), CpuTime::here());
    let options = ServeOptions {
        export: &export,
        base: args.offset.0,
        file,
        watch: watch.as_ref(),
        tls: tls.as_ref(),
        writable: !args.read_only,
        connections: args.connections,
        depth: requests.depth,
        budget,
    };
    let served = run::run(listener, target.targets(), &stack.data, options, interrupt);
    let command = command.map_or(Ok(()), |(line, command)| command.end(line));
    let mut served = served?;
    let failed = served.failed.take();
    let cpu = CpuReport::since(before, served.clients.requests);
    let stack = StackReport::new(&stack, &[&target]);
    notes.extend(watch.as_ref().and_then(Watch::change));
    let report = ServeReport::new(name.clone(), began.elapsed(), &served, cpu, stack, notes);
    let printed = print(args, &report);
    let unflushed = (served.clients.unflushed > 0).then_some(ServeError::Unflushed(name));
    // The first of these is the exit code, and the report does not hide it.
    failed.or(unflushed).map_or(command, Err)?;
    printed
}

/// Prints a report; beside a command, whose is standard output, on standard error.
fn print(args: &ServeArgs, report: &(impl Display + serde::Serialize)) -> Result<(), Failure> {
    match (args.run.is_some(), args.json) {
        (true, json) => output::on_stderr(report, json),
        (false, true) => output::json(report),
        (false, false) => output::text(&report.to_string()),
    }?;
    Ok(())
}

/// Creates a folder for the socket, if it has no other address.
fn private_folder(
    args: &ServeArgs,
    passed: Option<&Listener>,
) -> Result<Option<PrivateFolder>, ServeError> {
    let any = args.unix.as_ref().map_or(args.nbd.is_none(), |path| path.as_os_str() == "-");
    (any && passed.is_none()).then(PrivateFolder::new).transpose()
}

/// Listens where the user says, or at the socket that was passed.
fn listen(
    args: &ServeArgs,
    folder: Option<&PrivateFolder>,
    passed: &mut Option<Listener>,
) -> Result<Listener, ServeError> {
    if let Some(listener) = passed.take() {
        return match (&args.nbd, &args.unix) {
            (Some(_), _) => Err(ServeError::Passed("--nbd")),
            (None, Some(_)) => Err(ServeError::Passed("-U")),
            (None, None) => Ok(listener),
        };
    }
    match (folder, &args.unix, &args.nbd) {
        (Some(folder), ..) => Listener::bind(&NbdAddress::Unix(folder.socket())),
        (None, Some(path), _) => Listener::bind(&NbdAddress::Unix(path.clone())),
        (None, None, Some(address)) => Listener::bind(address),
        (None, None, None) => Err(ServeError::NoAddress),
    }
}

/// Resolves the target, with its capacity. Each of `threads` threads has a queue, and an interrupt
/// unless it polls.
fn resolve(args: &ServeArgs, threads: usize) -> Result<(ResolvedTarget, u64), Failure> {
    let (spec, writes) = (&args.target, !args.read_only);
    let unsupported = |option, value: &str, reason: &str| OpenError::Unsupported {
        option,
        value: value.to_owned(),
        reason: reason.to_owned(),
    };
    if args.stack.protect == Protect::Static {
        let reason = "payloads are received and sent in place, which needs memory that is mapped for each request: leave the \
            option out, or use batch, revoke or strict";
        return Err(unsupported("protect", Protect::Static.name(), reason).into());
    }
    if args.cached && !matches!(spec, TargetSpec::File(_)) {
        return Err(unsupported(
            "cached",
            "",
            "only a file has a page cache: leave the option out",
        )
        .into());
    }
    check_units(args.stack.iommu_units, [spec])?;
    Ok(match spec {
        TargetSpec::File(path) => ResolvedTarget::existing(spec, path, writes)?,
        TargetSpec::SoftImage(path, _) => ResolvedTarget::image(spec, path, writes)?,
        TargetSpec::SoftMemory(size, _) => {
            (ResolvedTarget::memory(spec, *size, if writes { size.0 } else { 0 })?, size.0)
        }
        TargetSpec::Pci { via, bdf, nsid } => {
            let interrupts = if args.poll { 0 } else { u32::try_from(threads).unwrap_or(u32::MAX) };
            ResolvedTarget::pci(spec, (*via, *bdf), *nsid, interrupts, args.stack.machine)?
        }
    })
}

/// Returns how many bytes are served of a target of `capacity` bytes.
fn range(args: &ServeArgs, target: &str, capacity: u64) -> Result<u64, ServeError> {
    let (ByteSize(offset), length) = (args.offset, args.length);
    let refused = |option, asked, reason| ServeError::Range { option, asked, reason };
    let Some(rest) = capacity.checked_sub(offset) else {
        return Err(refused("offset", offset, format!("{target} has only {capacity} bytes")));
    };
    match length {
        None => Ok(rest),
        Some(ByteSize(0)) => {
            Err(refused("length", 0, "serve one byte at least, or leave it out".into()))
        }
        Some(ByteSize(length)) if length <= rest => Ok(length),
        Some(ByteSize(length)) => {
            let reason = format!("{target} has only {rest} bytes from --offset {offset}");
            Err(refused("length", length, reason))
        }
    }
}

/// Checks that the range is made of the blocks of an open target.
fn check_blocks(args: &ServeArgs, info: &TargetInfo) -> Result<(), ServeError> {
    let block = info.block as u64;
    let length = args.length.map(|ByteSize(length)| ("length", length));
    for (option, asked) in [Some(("offset", args.offset.0)), length].into_iter().flatten() {
        if !asked.is_multiple_of(block) {
            let reason =
                format!("{} is used in blocks of {block} bytes: write a multiple", info.name);
            return Err(ServeError::Range { option, asked, reason });
        }
    }
    Ok(())
}

/// Describes the served range of `length` bytes to clients.
fn export(args: &ServeArgs, info: &TargetInfo, file: Option<&File>, length: u64) -> Export {
    // A flush covers what has been written through any queue: of a file all its data, of a
    // namespace all completed commands.
    let mut flags = TransmissionFlags::SEND_FLUSH
        | TransmissionFlags::SEND_FUA
        | TransmissionFlags::CAN_MULTI_CONN;
    if args.read_only {
        flags |= TransmissionFlags::READ_ONLY;
    } else {
        flags |= TransmissionFlags::SEND_WRITE_ZEROES;
        if info.no_trim.is_none() {
            flags |= TransmissionFlags::SEND_TRIM;
        }
    }
    let minimum = match file {
        Some(_) if args.cached => 1,
        Some(_) => info.alignment,
        None => info.block,
    };
    let minimum = u32::try_from(minimum).unwrap_or(1);
    // Fewer bytes than a physical block are read before they are written.
    let physical = file.and_then(|file| rustix::fs::ioctl_blkpbszget(file).ok());
    let physical =
        physical.filter(|physical| physical.is_power_of_two() && *physical <= MAX_PAYLOAD);
    let preferred = minimum.max(4096).max(physical.unwrap_or(0));
    let blocks = BlockSizes { minimum, preferred, maximum: MAX_PAYLOAD };
    Export::new(&args.name, length, flags).description(&args.description).block_sizes(blocks)
}

/// Raises the limit of open files as far as it goes without privileges: each client takes one.
fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(errno) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::debug!("the limit of open files stays: {errno}");
    }
}
