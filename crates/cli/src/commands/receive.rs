//! `receive`: the packets of an interface, counted, written to a file, stored, or sent back.

use crate::args::{Memory, ReceiveArgs, TargetSpec};
use crate::engine::error::EngineError;
use crate::failure::Failure;
use crate::output;
use crate::packets::capture::Capture;
use crate::packets::destination::{DEPTH, Destination};
use crate::packets::store::{Slots, Store};
use crate::packets::worker::{Action, Shared, Snapshot, Worker};
use crate::progress::Line;
use crate::report::receive::ReceiveReport;
use crate::setup::error::OpenError as TargetOpenError;
use crate::setup::memory::{self, BufferNeed, MemoryNeed};
use crate::setup::open::OpenTarget;
use crate::signal::Interrupt;
use crate::targets::target::Target;
use crate::units::ByteSize;
use pinfold_xdp::socket::BusyPoll;
use pinfold_xdp::{ChunkSize, Interface, OpenError, Options, PacketPage, Redirect, Socket, redirect};
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often the live line is drawn and the end is looked for.
const TICK: Duration = Duration::from_millis(50);
/// The holder of packets that wait to be written.
const HOLDER: &str = "capture";
/// The holder of packets that are being written to the target.
const STORING: &str = "store";

/// Receives until the end that was requested or a signal, and prints the report.
pub(crate) fn run(args: &ReceiveArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let interface = redirect::interface(&args.interface)?;
    if !args.force && has_default_route(&args.interface) {
        return Err(Failure::DefaultRoute { interface: args.interface.clone() });
    }
    let queues = queues(args, &interface);
    check_memory(args, queues.len())?;
    let prepare = |spec| Destination::prepare(spec, args.memory, queues.len());
    let destination = args.to.as_ref().map(prepare).transpose()?;
    let mut sockets = open(args, &interface, queues, destination.as_ref())?;
    // Packets reach the kernel's stack until the sockets are entered below.
    let redirect = Redirect::attach(&interface)?;
    // After what can be refused, so that no file is created or emptied by a program that cannot receive.
    let resolve = |destination: &Destination<'_>| destination.resolve(args.force);
    let (resolved, file) = destination.as_ref().map(resolve).transpose()?.unzip();
    let stored = destination.as_ref().zip(resolved).map(|(destination, target)| destination.open(target));
    let mut stored = stored.transpose()?;
    let slots = Slots::new(stored.as_mut().and_then(|target| target.target().info().capacity));
    let targets = stored.as_mut().map(OpenTarget::targets).unwrap_or_default();
    let capture = args.pcap.as_ref().map(|path| Capture::start(path, args.force)).transpose()?;
    // Last: from here on the kernel's stack does not get these packets.
    for socket in &mut sockets {
        socket.redirect(&redirect)?;
    }
    let began = Instant::now();
    let queues: Vec<_> = sockets.iter().map(Socket::queue).collect();
    let zero_copy = sockets.iter().all(Socket::is_zero_copy);
    let published: Vec<_> = sockets.iter().map(|_| Mutex::new(None)).collect();
    let shared = Shared::new(interrupt.child(), args.count);
    let kept = Kept { capture: capture.as_ref(), slots: &slots, targets };
    let sockets = receive(args, sockets, kept, &shared, &published, began)?;
    let elapsed = began.elapsed();
    // Before the file is finished: the network is the kernel's again.
    drop(redirect);
    drop(sockets);
    let written = capture.map(Capture::finish).transpose()?;
    // The last slot is as long as all others.
    if let (Some(file), Some(spec)) = (file.flatten(), &args.to) {
        let failed = |error| TargetOpenError::System { name: spec.to_string(), error };
        file.set_len(slots.bytes()).and_then(|()| file.sync_all()).map_err(failed)?;
        // Its name, too.
        if let TargetSpec::File(path) = spec {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            File::open(folder.unwrap_or(Path::new(".")))
                .and_then(|folder| folder.sync_all())
                .map_err(failed)?;
        }
    }
    let snapshots: Vec<_> = published.iter().filter_map(newest).collect();
    let attached = (interface.name(), zero_copy);
    let report = ReceiveReport::new(attached, &queues, &snapshots, elapsed, written, args.to.as_ref());
    if args.json {
        output::json(&report)?
    } else {
        output::text(&report.to_text())?
    }
    if interrupt.is_raised() { Err(EngineError::Interrupted.into()) } else { Ok(()) }
}

/// What packets are kept in.
struct Kept<'k> {
    capture: Option<&'k Capture>,
    slots: &'k Slots,
    /// A queue at the target of each socket, if packets are stored.
    targets: Vec<&'k mut (dyn Target<PacketPage> + Send)>,
}

/// Checks that the fill ring of each queue has its chunks, and that the machine has the memory.
fn check_memory(args: &ReceiveArgs, queues: usize) -> Result<(), Failure> {
    let chunk = if args.small_chunks { ChunkSize::HalfPage } else { ChunkSize::Page };
    let least = u64::from(Options::DEFAULT_RING) * u64::from(chunk.bytes());
    let ByteSize(each) = args.memory;
    if each < least {
        let reason = format!("each queue needs at least {}", ByteSize(least));
        return Err(TargetOpenError::Unsupported {
            option: "memory",
            value: args.memory.to_string(),
            reason,
        }
        .into());
    }
    let bytes = usize::try_from(each).unwrap_or(usize::MAX);
    let buffers = BufferNeed { count: queues, bytes, lower: "--memory, or name one --queue" };
    let arenas = each.saturating_mul(queues as u64);
    Ok(memory::check(MemoryNeed { buffers, arenas, targets: 0 }, Memory::Auto)?)
}

/// Returns the queues that are requested.
fn queues(args: &ReceiveArgs, interface: &Interface) -> Range<u32> {
    let all = 0..interface.queues().unwrap_or(1);
    args.queue.map_or(all, |queue| queue..queue.saturating_add(1))
}

/// Opens a socket for each queue, in the memory of the target if packets are stored.
fn open(
    args: &ReceiveArgs,
    interface: &Interface,
    queues: Range<u32>,
    destination: Option<&Destination<'_>>,
) -> Result<Vec<Socket>, OpenError> {
    let chunk = if args.small_chunks { ChunkSize::HalfPage } else { ChunkSize::Page };
    let mut options = Socket::options().chunk(chunk).memory(args.memory.0);
    if args.busy_poll {
        options = options.busy_poll(BusyPoll::default());
    }
    let open = |queue| match destination {
        Some(destination) => options.queue(queue).open_in(interface, destination.memory().clone()),
        None => options.queue(queue).open(interface),
    };
    queues.map(open).collect()
}

/// Receives by a thread for each socket, and draws the live line.
fn receive(
    args: &ReceiveArgs,
    sockets: Vec<Socket>,
    Kept { capture, slots, targets }: Kept<'_>,
    shared: &Shared,
    published: &[Mutex<Option<Snapshot>>],
    began: Instant,
) -> Result<Vec<Socket>, Failure> {
    let line = Line::new(&args.interface);
    std::thread::scope(|scope| {
        let (mut threads, mut targets) = (Vec::new(), targets.into_iter());
        for (socket, published) in sockets.into_iter().zip(published) {
            let action = match (targets.next(), capture) {
                (Some(target), _) => {
                    let holder = socket.holder(STORING).unwrap_or_default();
                    Action::Store(Store::new(target, slots, holder, DEPTH))
                }
                (None, Some(capture)) => {
                    let holder = socket.holder(HOLDER).unwrap_or_default();
                    Action::Capture(capture.sender(), holder)
                }
                _ if args.reflect => Action::Reflect,
                _ => Action::Count,
            };
            let worker = Worker { socket, action, shared, published };
            let thread = std::thread::Builder::new().name("receive".into());
            let started = thread.spawn_scoped(scope, move || worker.run());
            threads.push(started.inspect_err(|_| shared.stop.raise()).map_err(Failure::Thread)?);
        }
        while !threads.iter().all(|thread| thread.is_finished()) {
            std::thread::sleep(TICK);
            if args.seconds.is_some_and(|limit| began.elapsed() >= limit.0) {
                shared.stop.raise();
            }
            let snapshots: Vec<_> = published.iter().filter_map(newest).collect();
            line.show(|| ReceiveReport::live(&snapshots, began.elapsed()));
        }
        let ended = threads.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        ended.collect()
    })
}

fn newest(published: &Mutex<Option<Snapshot>>) -> Option<Snapshot> {
    published.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Returns whether the interface has a default route of IPv4: without its packets the machine may be unreachable.
fn has_default_route(interface: &str) -> bool {
    let table = std::fs::read_to_string("/proc/thread-self/net/route").unwrap_or_default();
    table.lines().any(|line| {
        let mut fields = line.split_whitespace();
        fields.next() == Some(interface) && fields.next() == Some("00000000")
    })
}
