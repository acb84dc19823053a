//! `copy`: all bytes of one target to another, by way of a third if asked; the destination is whole or absent.

pub(crate) mod digest;
pub(crate) mod error;
pub(crate) mod pump;
pub(crate) mod staged;

use crate::account::{CopyReport, Hashes, PhaseReport, StackReport};
use crate::args::CopyArgs;
use crate::failure::{Failure, LimitError};
use crate::fixes;
use crate::limits;
use crate::memory;
use crate::open::{BLOCK, OpenError, Opened, Place, Use, domain_of, scratch};
use crate::output;
use crate::progress::Progress;
use crate::signal::Interrupt;
use crate::stack::Stack;
use crate::targets::spec::TargetSpec;
use digest::digest;
use pinfold::Buffer;
use pump::{Plan, pump};
use rustix::fs::Mode;
use staged::Staged;
use std::os::unix::fs::PermissionsExt;

/// Copies, and prints the account.
pub(crate) fn run(args: &CopyArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let account = copy(args, &interrupt)?;
    if args.json {
        return output::json(&account);
    }
    let mut text = account.to_text();
    if args.pools {
        text.push('\n');
        text.push_str(&account.stack.pools_to_kernel_text());
    }
    output::text(&text)
}

/// What is copied, checked, before any memory is taken for it.
struct Job {
    source: Place,
    destination: Place,
    via: Option<Place>,
    /// Keeps what was made for the run, until it gets its name or is removed.
    staged: Option<Staged>,
    total: u64,
    /// How many bytes the destination's file has in the end.
    destination_bytes: u64,
}

impl Job {
    fn prepare(args: &CopyArgs) -> Result<Self, Failure> {
        let (source, capacity) = open_source(&args.source, args.poll)?;
        let total = args.size.map_or(capacity, |size| size.0);
        if total > capacity {
            let target = source.name;
            return Err(LimitError::Beyond { size: total, capacity, target }.into());
        }
        let via = args.via.as_ref().map(|spec| open_via(spec, args, total)).transpose()?;
        if let Some(via) = via.as_ref().filter(|via| via.is_same_file(&source)) {
            return Err(OpenError::ViaIsSource(via.name.clone()).into());
        }
        let (destination, staged, destination_bytes) = open_destination(args, &source, total)?;
        Ok(Self { source, destination, via, staged, total, destination_bytes })
    }

    fn places(&self) -> impl Iterator<Item = &Place> {
        [&self.source, &self.destination].into_iter().chain(&self.via)
    }
}

fn open_source(spec: &TargetSpec, poll: bool) -> Result<(Place, u64), Failure> {
    match spec {
        TargetSpec::File(path) => Ok(Place::existing(spec, path, false)?),
        TargetSpec::SoftImage(path) => Ok(Place::image(spec, path, false)?),
        TargetSpec::SoftMemory(_) => Err(LimitError::EmptySource(spec.to_string()).into()),
        TargetSpec::Vfio { bdf, nsid } => Ok(Place::pci(spec, *bdf, *nsid, u32::from(!poll))?),
    }
}

fn open_via(spec: &TargetSpec, args: &CopyArgs, total: u64) -> Result<Place, Failure> {
    let (place, capacity) = match spec {
        TargetSpec::SoftMemory(size) => (Place::memory(spec, *size, total)?, size.0),
        TargetSpec::SoftImage(path) => {
            let (place, bytes) = Place::image(spec, path, true)?;
            if place.holds_data() && !args.force {
                return Err(OpenError::HoldsData(place.name).into());
            }
            (place, bytes)
        }
        TargetSpec::Vfio { .. } => overwritten(spec, args)?,
        TargetSpec::File(path) => (Place::staged(spec, path, scratch(path)?, total), u64::MAX),
    };
    room(&place.name, capacity, total)?;
    Ok(place)
}

/// A real controller's namespace, whose bytes will be written over, and how many they are.
fn overwritten(spec: &TargetSpec, args: &CopyArgs) -> Result<(Place, u64), Failure> {
    match spec {
        TargetSpec::Vfio { bdf, nsid } if args.force => {
            Ok(Place::pci(spec, *bdf, *nsid, u32::from(!args.poll))?)
        }
        _ => Err(OpenError::HoldsData(spec.to_string()).into()),
    }
}

fn open_destination(
    args: &CopyArgs,
    source: &Place,
    total: u64,
) -> Result<(Place, Option<Staged>, u64), Failure> {
    let spec = &args.destination;
    let (path, bytes) = match spec {
        TargetSpec::SoftMemory(size) => {
            let place = Place::memory(spec, *size, total)?;
            room(&place.name, size.0, total)?;
            return Ok((place, None, total));
        }
        TargetSpec::Vfio { .. } => {
            let (place, capacity) = overwritten(spec, args)?;
            room(&place.name, capacity, total)?;
            return Ok((place, None, total));
        }
        TargetSpec::File(path) => (path, total),
        // A controller has at least one block, so that an image without any could not be opened again.
        TargetSpec::SoftImage(path) => (path, total.next_multiple_of(BLOCK).max(BLOCK)),
    };
    let staged = Staged::create(path, args.force, mode_like(source), source.file())?;
    staged.reserve(bytes)?;
    let file = staged.file().try_clone();
    let file = file.map_err(|error| OpenError::System { name: spec.to_string(), error })?;
    let place = Place::staged(spec, path, file, bytes);
    Ok((place, Some(staged), bytes))
}

/// The permissions of the source, which the umask is then taken from.
fn mode_like(source: &Place) -> Mode {
    let metadata = source.file().and_then(|file| file.metadata().ok());
    Mode::from_raw_mode(metadata.map_or(0o666, |metadata| metadata.permissions().mode() & 0o777))
}

/// Whether `total` bytes, in whole blocks, are inside `capacity`.
fn room(name: &str, capacity: u64, total: u64) -> Result<(), Failure> {
    // What is left over behind the last whole block can not be used.
    let (capacity, needed) = (capacity / BLOCK * BLOCK, total.next_multiple_of(BLOCK));
    if needed <= capacity {
        return Ok(());
    }
    Err(Failure::TooSmall { target: name.to_owned(), capacity, needed })
}

/// The targets, opened, and what moves between them.
struct Run<'a> {
    args: &'a CopyArgs,
    interrupt: &'a Interrupt,
    buffers: Vec<Buffer>,
    plan: Plan,
    phases: Vec<PhaseReport>,
}

impl Run<'_> {
    fn phase(&mut self, from: &mut Opened<'_>, to: &mut Opened<'_>, title: &str) -> Result<(), Failure> {
        let (source, sink) = (from.target(), to.target());
        let names = (source.info().name.clone(), sink.info().name.clone());
        let progress = Progress::new(title, self.plan.total);
        let phase = pump(source, sink, self.plan, &mut self.buffers, &progress, self.interrupt)?;
        self.phases.push(PhaseReport::new(names.0, names.1, &phase));
        Ok(())
    }

    fn verify(&mut self, source: &mut Opened<'_>, destination: &mut Opened<'_>) -> Result<Hashes, Failure> {
        let Plan { total, block } = self.plan;
        let mut hash = |opened: &mut Opened<'_>, title| {
            let progress = Progress::new(title, total);
            digest(opened.target(), (total, block), &mut self.buffers, &progress, self.interrupt)
        };
        let hashes = Hashes {
            source: hash(source, "verifying source")?,
            destination: hash(destination, "verifying copy")?,
        };
        if hashes.source == hashes.destination {
            return Ok(hashes);
        }
        Err(Failure::Differs {
            source_name: self.args.source.to_string(),
            destination: self.args.destination.to_string(),
            read: hashes.source.to_string(),
            wrote: hashes.destination.to_string(),
        })
    }
}

/// Copies; the destination has its name when this succeeds, and is absent when it does not.
pub(crate) fn copy(args: &CopyArgs, interrupt: &Interrupt) -> Result<CopyReport, Failure> {
    let job = Job::prepare(args)?;
    let (block, depth) = limits::check(args.bs, args.iodepth, &job.places().collect::<Vec<_>>())?;
    let slots = limits::slots(job.total, block, depth);
    let domain = domain_of(&job.places().collect::<Vec<_>>())?;
    let controllers = job.places().filter(|place| place.has_controller()).count() as u64;
    let held = job.places().map(Place::held_bytes).sum();
    memory::check(Stack::need((slots, block), controllers, held), args.stack.memory)?;
    let stack = Stack::build(args.stack, domain, (slots, block), controllers)?;
    let open = |place: Place| -> Result<Opened<'_>, Failure> {
        // Only controllers are polled: a file that is still empty can not be asked whether it can be.
        let poll = args.poll && place.has_controller();
        let mut opened = Opened::open(place, &stack, Use { block, depth: slots, jobs: 1, poll })?;
        limits::check_opened(block, depth, opened.target().info())?;
        Ok(opened)
    };
    let Job { source, destination, via, staged, total, destination_bytes } = job;
    let (mut source, mut destination) = (open(source)?, open(destination)?);
    let mut via = via.map(open).transpose()?;

    let plan = Plan { total, block };
    let mut run = Run { args, interrupt, buffers: stack.buffers()?, plan, phases: Vec::new() };
    match &mut via {
        None => run.phase(&mut source, &mut destination, "copying")?,
        Some(via) => {
            run.phase(&mut source, via, "there")?;
            run.phase(via, &mut destination, "and back")?;
        }
    }
    if args.size.is_none() {
        unchanged(&args.source, &source, total)?;
    }
    let sha256 = if args.verify { Some(run.verify(&mut source, &mut destination)?) } else { None };

    let opened: Vec<_> = [&source, &destination].into_iter().chain(&via).collect();
    let account = CopyReport {
        command: "copy",
        source: args.source.to_string(),
        destination: args.destination.to_string(),
        via: args.via.as_ref().map(ToString::to_string),
        bytes: total,
        block_bytes: block as u64,
        iodepth: slots as u64,
        phases: run.phases,
        sha256,
        stack: stack_report(&stack, &opened),
        notes: opened.iter().flat_map(|opened| opened.notes()).collect(),
    };
    drop((source, via, destination));
    if interrupt.asked() {
        return Err(error::PumpError::Interrupted.into());
    }
    if let Some(staged) = staged {
        staged.commit(destination_bytes)?;
    }
    Ok(account)
}

/// A file that has grown meanwhile was copied only in part.
fn unchanged(spec: &TargetSpec, source: &Opened<'_>, before: u64) -> Result<(), Failure> {
    match source.file_bytes().map_err(OpenError::File)? {
        Some(after) if after > before => Err(Failure::SourceGrew { name: spec.to_string(), before, after }),
        _ => Ok(()),
    }
}

/// What the stack and its controllers did.
pub(crate) fn stack_report(stack: &Stack, opened: &[&Opened<'_>]) -> StackReport {
    StackReport {
        protect: stack.protect,
        memory: stack.memory_report(),
        fixes: fixes::of(stack, opened.iter().filter_map(|opened| opened.memlock_needed())),
        devices: opened.iter().filter_map(|opened| opened.device_report()).collect(),
        pools: opened.iter().flat_map(|opened| opened.pool_reports()).collect(),
        domain: stack.domain_report(),
    }
}
