//! `serve`: a target as a network block device.

use crate::args::{Protect, ServeArgs, TargetSpec};
use crate::failure::Failure;
use crate::output;
use crate::report::cpu::CpuReport;
use crate::report::serve::{Listening, ServeReport};
use crate::report::stack::StackReport;
use crate::server::error::ServeError;
use crate::server::listener::Listener;
use crate::server::payload::PIECE;
use crate::server::run::{self, ServeOptions};
use crate::server::tls;
use crate::setup::error::OpenError;
use crate::setup::limits;
use crate::setup::memory::{self, BufferNeed};
use crate::setup::open::OpenTarget;
use crate::setup::options::TargetOptions;
use crate::setup::resolve::{Medium, ResolvedTarget, check_units, domain_of};
use crate::setup::stack::Stack;
use crate::signal::Interrupt;
use crate::targets::file;
use crate::targets::target::TargetInfo;
use crate::units::ByteSize;
use pinfold::CpuTime;
use pinfold_nbd::{BlockSizes, Export, TransmissionFlags};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::time::Instant;

/// The least memory of a thread.
const LEAST_BUDGET: u64 = 2 << 20;
/// The longest payload, which every client may assume ("Block size constraints").
const MAX_PAYLOAD: u32 = 32 << 20;
/// The alignment that O_DIRECT needs on most devices.
const SECTOR: u64 = 512;

/// Serves until a signal arrives, answers what is in flight, and prints the report.
pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let threads = args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, Into::into));
    let tls = args.tls_certificates.as_deref();
    let tls = tls.map(|folder| tls::configure(folder, args.tls_verify_peer)).transpose()?;
    let (target, capacity) = resolve(args, threads)?;
    let budget = budget(args.buffers, threads)?;
    let requests = limits::check(ByteSize(PIECE as u64), args.iodepth, &[&target])?;
    // A quarter more than is used at any time, since buffers of several sizes leave gaps.
    let count = (budget * threads).div_ceil(PIECE) * 5 / 4 + 2 * threads;
    let buffers = BufferNeed { count, bytes: PIECE, lower: "--buffers" };
    let controllers = u64::from(target.has_controller());
    memory::check(Stack::need(buffers, controllers, target.held_bytes()), args.stack.memory)?;
    let stack =
        Stack::build(args.stack, domain_of(&[&target], args.stack.iommu_units)?, buffers, controllers)?;
    let file = match &target.medium {
        Medium::File(file) => Some(file.try_clone()),
        Medium::Controller(_) => None,
    };
    let system = |error| OpenError::System { name: target.name.clone(), error };
    let file = file.transpose().map_err(system)?;
    let alignment = file::alignment([capacity, SECTOR]);
    let options = TargetOptions {
        alignment,
        depth: requests.depth,
        jobs: threads,
        jobs_option: "threads",
        poll: args.poll,
        direct: !args.cached,
        moves: false,
    };
    let mut target = OpenTarget::open(target, &stack, options)?;
    let export = export(args, target.target().info(), capacity, budget);
    raise_descriptor_limit();
    let listener = Listener::bind(&args.nbd)?;
    announce(
        args,
        &Listening::new(args.target.to_string(), export.size(), listener.uri(&args.name, tls.is_some())),
    )?;

    let (began, before) = (Instant::now(), CpuTime::here());
    let options = ServeOptions {
        export: &export,
        file: file.as_ref(),
        tls: tls.as_ref(),
        writable: !args.read_only,
        connections: args.connections,
        depth: requests.depth,
        budget,
    };
    let served = run::run(listener, target.targets(), &stack.data, options, &interrupt)?;
    let cpu = CpuReport::since(before, served.clients.requests);
    let stack = StackReport::new(&stack, &[&target]);
    let report =
        ServeReport::new(args.target.to_string(), began.elapsed(), &served, cpu, stack, target.notes());
    (if args.json { output::json(&report) } else { output::text(&report.to_string()) })?;
    if served.clients.unflushed > 0 {
        Err(ServeError::Unflushed(args.target.to_string()).into())
    } else {
        Ok(())
    }
}

fn announce(args: &ServeArgs, listening: &Listening) -> Result<(), Failure> {
    Ok(if args.json { output::json(listening) } else { output::text(&listening.to_string()) }?)
}

/// Resolves the target, with its capacity. Each of `threads` threads has a queue, and an interrupt unless it polls.
fn resolve(args: &ServeArgs, threads: usize) -> Result<(ResolvedTarget, u64), Failure> {
    let (spec, writes) = (&args.target, !args.read_only);
    let unsupported = |option, value: &str, reason: &str| OpenError::Unsupported {
        option,
        value: value.to_owned(),
        reason: reason.to_owned(),
    };
    if args.stack.protect == Protect::Static {
        let reason = "payloads are received and sent in place, which needs memory that is mapped for each request: leave the \
            option out, or use revoke or strict";
        return Err(unsupported("protect", Protect::Static.name(), reason).into());
    }
    if args.cached && !matches!(spec, TargetSpec::File(_)) {
        return Err(unsupported("cached", "", "only a file has a page cache: leave the option out").into());
    }
    check_units(args.stack.iommu_units, [spec])?;
    Ok(match spec {
        TargetSpec::File(path) => ResolvedTarget::existing(spec, path, writes)?,
        TargetSpec::SoftImage(path, _) => ResolvedTarget::image(spec, path, writes)?,
        TargetSpec::SoftMemory(size, _) => {
            (ResolvedTarget::memory(spec, *size, if writes { size.0 } else { 0 })?, size.0)
        }
        TargetSpec::Vfio { bdf, nsid } => {
            let interrupts = if args.poll { 0 } else { u32::try_from(threads).unwrap_or(u32::MAX) };
            ResolvedTarget::pci(spec, *bdf, *nsid, interrupts)?
        }
    })
}

/// Returns the memory of each thread.
fn budget(ByteSize(asked): ByteSize, threads: usize) -> Result<usize, ServeError> {
    let needed = LEAST_BUDGET.saturating_mul(threads as u64);
    let each = usize::try_from(asked / threads as u64).ok().filter(|_| asked >= needed);
    each.ok_or(ServeError::Buffers { asked, threads, needed })
}

/// Describes the target to clients.
fn export(args: &ServeArgs, info: &TargetInfo, capacity: u64, budget: usize) -> Export {
    // A flush covers what has been written through any queue: of a file all its data, of a namespace all completed commands.
    let mut flags =
        TransmissionFlags::SEND_FLUSH | TransmissionFlags::SEND_FUA | TransmissionFlags::CAN_MULTI_CONN;
    if args.read_only {
        flags |= TransmissionFlags::READ_ONLY;
    } else {
        flags |= TransmissionFlags::SEND_WRITE_ZEROES;
        if info.no_trim.is_none() {
            flags |= TransmissionFlags::SEND_TRIM;
        }
    }
    let is_file = matches!(args.target, TargetSpec::File(_));
    let minimum = match is_file {
        true if args.cached => 1,
        true => info.alignment,
        false => info.block,
    };
    let half = u32::try_from(budget / 2).unwrap_or(MAX_PAYLOAD).max(1);
    let maximum = MAX_PAYLOAD.min(1 << half.ilog2());
    let minimum = u32::try_from(minimum).unwrap_or(1);
    let blocks = BlockSizes { minimum, preferred: minimum.max(4096), maximum };
    Export::new(&args.name, capacity, flags).description(&args.description).block_sizes(blocks)
}

/// Raises the limit of open files as far as it goes without privileges: each client takes one.
fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(errno) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::debug!("the limit of open files stays: {errno}");
    }
}
