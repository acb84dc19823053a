//! `receive`: the packets of an interface, counted, written to a file, stored, or sent back.

use crate::args::{Memory, ReceiveArgs};
use crate::engine::worker::EngineError;
use crate::failure::Failure;
use crate::output;
use crate::packets::capture::Capture;
use crate::packets::store::{self, DEPTH, Destination, Slots, Store};
use crate::packets::worker::{Action, Budget, Shared, Snapshot, Worker};
use crate::progress::Line;
use crate::report::receive::{Merged, ReceiveReport, Run, notes_at_start};
use crate::setup::error::OpenError as TargetOpenError;
use crate::setup::open::OpenTarget;
use crate::setup::resolve::refuse_to_replace;
use crate::setup::stack::{self, BufferNeed, MemoryNeed};
use crate::signal::Interrupt;
use crate::targets::target::Target;
use crate::units::{ByteSize, counted};
use pinfold::probe::threads;
use pinfold_xdp::socket::BusyPoll;
use pinfold_xdp::system::default_route_over;
use pinfold_xdp::{
    Attached, ChunkSize, Interface, OpenError, Options, PacketPage, Redirect, RingSizes, Socket,
    redirect,
};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The interval at which the live line is drawn and the end is checked.
const TICK: Duration = Duration::from_millis(50);
/// The interval of checks for added queues.
const QUEUES: Duration = Duration::from_secs(1);
/// The holder of packets that wait to be written.
const HOLDER: &str = "capture";
/// The holder of packets that are being written to the target.
const STORING: &str = "store";

/// Receives until the end that was requested, a signal or a failure, completes the outputs, and
/// prints the report.
pub(crate) fn run(args: &ReceiveArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::catch().map_err(Failure::Signals)?;
    let interface = redirect::interface(&args.interface)?;
    if !args.force {
        check_routes(&interface)?;
    }
    let queues = queues(args, &interface)?;
    check_transmit(args, &interface)?;
    let budget = budget(args, queues.len())?;
    let tags = interface.vlan_tags();
    let notes = notes_at_start(args, &interface, queues.clone(), &tags);
    let prepare = |spec| Destination::prepare(spec, budget.bytes, queues.len());
    let destination = args.to.as_ref().map(prepare).transpose()?;
    let mut sockets = open(args, &interface, queues, budget, destination.as_ref())?;
    // Packets reach the kernel's stack until the sockets are entered below.
    let redirect = match args.xdp {
        Some(mode) => Redirect::attach_as(&interface, mode.into())?,
        None => Redirect::attach(&interface)?,
    };
    // After what can be refused, so that no file is created or emptied by a program that cannot
    // receive.
    if let (true, Some(path)) = (args.force, &args.pcap) {
        refuse_to_replace(path, &path.display())?;
    }
    let resolve = |destination: &Destination<'_>| destination.resolve(args.force);
    let (resolved, file) = destination.as_ref().map(resolve).transpose()?.unzip();
    let stored =
        destination.as_ref().zip(resolved).map(|(destination, target)| destination.open(target));
    let mut stored = stored.transpose()?;
    let slots = Slots::new(stored.as_mut().and_then(|target| target.target().info().capacity));
    let targets = stored.as_mut().map(OpenTarget::targets).unwrap_or_default();
    let start = |path: &PathBuf| {
        let capture = Capture::start(path, args.force, interface.link_type(), &interrupt)?;
        capture.ok_or(Failure::from(EngineError::Interrupted))
    };
    let capture = args.pcap.as_ref().map(start).transpose()?;
    notes.iter().for_each(|note| tracing::warn!("{note}"));
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
    let attached = redirect.attached();
    let Ended { sockets, queues_added, result } =
        receive(args, sockets, kept, (&shared, &interrupt), &published, attached, began);
    let elapsed = began.elapsed();
    // Before the files are finished: the network is the kernel's again.
    drop(redirect);
    drop(sockets);
    // However it ended, the received packets are in the files and in the report.
    let (written, captured) = capture.map(Capture::finish).unzip();
    let mut result = result.and(captured.unwrap_or(Ok(())).map_err(Failure::from));
    if let (Some(file), Some(spec)) = (file.flatten(), &args.to) {
        result =
            result.and(store::complete_file(spec, &file, slots.bytes()).map_err(Failure::from));
    }
    let snapshots: Vec<_> = published.iter().filter_map(newest).collect();
    let run = Run {
        interface: &interface,
        tags,
        notes,
        budget,
        attached,
        zero_copy,
        queues: &queues,
        queues_added,
        elapsed,
        failure: result.as_ref().err().map(Failure::line),
    };
    let report = ReceiveReport::new(run, &snapshots, written, args.to.as_ref());
    let printed = if args.json { output::json(&report) } else { output::text(&report.to_text()) };
    result.and(printed.map_err(Failure::from))?;
    if interrupt.is_raised() { Err(EngineError::Interrupted.into()) } else { Ok(()) }
}

/// The memory or file that packets are kept in.
struct Kept<'k> {
    capture: Option<&'k Capture>,
    slots: &'k Slots,
    /// A queue at the target of each socket, if packets are stored.
    targets: Vec<&'k mut (dyn Target<PacketPage> + Send)>,
}

/// Returns the size of a chunk, which receives one packet.
fn chunk(args: &ReceiveArgs) -> ChunkSize {
    if args.small_chunks { ChunkSize::HalfPage } else { ChunkSize::Page }
}

/// Checks that the one queue that is chosen can send replies.
fn check_transmit(args: &ReceiveArgs, interface: &Interface) -> Result<(), Failure> {
    let Some(queue) = args.queue.filter(|queue| args.reflect && !interface.can_transmit(*queue))
    else {
        return Ok(());
    };
    // One that does not exist is refused when it is opened.
    if interface.queues().is_some_and(|queues| queue >= queues) {
        return Ok(());
    }
    let (name, queues) = (interface.name(), interface.transmit_queues().unwrap_or(0));
    let reason = format!(
        "{name} has {}, so no reply could be sent: name a queue below {queues}, or `sudo ethtool --set-channels {name} tx {}` \
         where the driver has more",
        counted(queues.into(), "transmit queue"),
        u64::from(queue) + 1
    );
    Err(TargetOpenError::Unsupported { option: "queue", value: queue.to_string(), reason }.into())
}

/// Returns the memory of each queue: what was requested, if the fill ring has its chunks there, or
/// a share of what is available. Checks that the machine has it for all of them.
fn budget(args: &ReceiveArgs, queues: usize) -> Result<Budget, Failure> {
    let chunk_bytes = chunk(args).bytes();
    let (budget, lower) = match args.memory {
        Some(ByteSize(each)) => {
            let least = u64::from(Options::DEFAULT_RING) * u64::from(chunk_bytes);
            if each < least {
                let (option, value) = ("memory", ByteSize(each).to_string());
                let reason = format!("each queue needs at least {}", ByteSize(least));
                return Err(TargetOpenError::Unsupported { option, value, reason }.into());
            }
            let lower = match (each > least, queues > 1) {
                (true, true) => "--memory, or name one --queue",
                (true, false) => "--memory",
                (false, true) => "the number of queues, or name one --queue",
                (false, false) => "",
            };
            (Budget::explicit(each), lower)
        }
        None => (
            if stack::fits_hugepages(Budget::MOST.saturating_mul(queues as u64)) {
                Budget::explicit(Budget::MOST)
            } else {
                Budget::shared(queues, chunk_bytes, stack::allowed())
            },
            match queues {
                1 => "",
                _ => "the number of queues (`ethtool --set-channels`), or name one --queue",
            },
        ),
    };
    let bytes = usize::try_from(budget.bytes).unwrap_or(usize::MAX);
    let buffers = BufferNeed { count: queues, bytes, threads: queues + 1, lower };
    let arenas = budget.bytes.saturating_mul(queues as u64);
    stack::check(MemoryNeed { buffers, arenas, targets: 0 }, Memory::Auto)
        .map_err(TargetOpenError::from)?;
    Ok(budget)
}

/// Returns the queues that are requested: at least one, so that a run receives from something or is
/// refused.
fn queues(args: &ReceiveArgs, interface: &Interface) -> Result<Range<u32>, OpenError> {
    let Some(queue) = args.queue else { return Ok(0..interface.queues().unwrap_or(1).max(1)) };
    match queue.checked_add(1) {
        Some(end) => Ok(queue..end),
        None => Err(OpenError::NoQueue {
            interface: interface.name().to_owned(),
            queue,
            queues: interface.queues(),
        }),
    }
}

/// Opens a socket for each queue, in the memory of the target if packets are stored.
fn open(
    args: &ReceiveArgs,
    interface: &Interface,
    queues: Range<u32>,
    Budget { bytes, ring }: Budget,
    destination: Option<&Destination<'_>>,
) -> Result<Vec<Socket>, OpenError> {
    let rings = RingSizes { fill: ring, completion: ring, receive: ring, transmit: ring };
    let mut options = Socket::options().chunk(chunk(args)).memory(bytes).rings(rings);
    if args.busy_poll {
        options = options.busy_poll(BusyPoll::default());
    }
    let open = |queue| match destination {
        Some(destination) => options.queue(queue).open_in(interface, destination.memory().clone()),
        None => options.queue(queue).open(interface),
    };
    queues.map(open).collect()
}

/// The end of reception.
struct Ended {
    sockets: Vec<Socket>,
    /// Queues that the interface got meanwhile, from which nothing was received.
    queues_added: u32,
    /// The first failure.
    result: Result<(), Failure>,
}

/// Receives by a thread for each socket, and draws the live line.
fn receive(
    args: &ReceiveArgs,
    sockets: Vec<Socket>,
    Kept { capture, slots, targets }: Kept<'_>,
    (shared, interrupt): (&Shared, &Interrupt),
    published: &[Mutex<Option<Snapshot>>],
    attached: Attached,
    began: Instant,
) -> Ended {
    let mut merged = Merged::new(&args.interface, attached);
    let line = Line::new(&args.interface);
    let mut queues = AllQueues::new(args, sockets.len());
    let mut ended =
        Ended { sockets: Vec::with_capacity(sockets.len()), queues_added: 0, result: Ok(()) };
    std::thread::scope(|scope| {
        let (mut threads, mut targets) = (Vec::new(), targets.into_iter());
        for (socket, published) in sockets.into_iter().zip(published) {
            let action = match (targets.next(), capture) {
                (Some(target), _) => {
                    let holder = socket.holder(STORING).unwrap_or_default();
                    Action::Store(Store::new(target, slots, holder, DEPTH, interrupt))
                }
                (None, Some(capture)) => {
                    let holder = socket.holder(HOLDER).unwrap_or_default();
                    Action::Capture(capture.sender(), holder)
                }
                _ if args.reflect => Action::Reflect,
                _ => Action::Count,
            };
            let worker = Worker::new(socket, action, shared, published);
            let thread = std::thread::Builder::new().name("receive".into());
            match thread.spawn_scoped(scope, move || worker.run()) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    shared.stop.raise();
                    ended.result = Err(Failure::Thread(threads::refusal(&error)));
                    break;
                }
            }
        }
        while !threads.iter().all(|thread| thread.is_finished()) {
            std::thread::sleep(TICK);
            if args.seconds.is_some_and(|limit| began.elapsed() >= limit.0) {
                shared.stop.raise();
            }
            queues.look(&args.interface);
            let snapshots: Vec<_> = published.iter().filter_map(newest).collect();
            merged.look(&snapshots);
            line.show(|| ReceiveReport::live(&snapshots, began.elapsed()));
        }
        for thread in threads {
            match thread.join() {
                Ok((socket, result)) => {
                    ended.sockets.push(socket);
                    if ended.result.is_ok() {
                        ended.result = result;
                    }
                }
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
    ended.queues_added = queues.added;
    ended
}

/// Whether the interface gets queues while all of them are received: a driver spreads packets over
/// all that it has.
struct AllQueues {
    /// The number of queues received; `None` if one was chosen.
    received: Option<u32>,
    added: u32,
    next: Instant,
}

impl AllQueues {
    fn new(args: &ReceiveArgs, received: usize) -> Self {
        let received = if args.queue.is_some() { None } else { u32::try_from(received).ok() };
        Self { received, added: 0, next: Instant::now() }
    }

    /// Looks now and then, and says so once.
    fn look(&mut self, name: &str) {
        let Some(received) = self.received.filter(|_| Instant::now() >= self.next) else { return };
        self.next = Instant::now() + QUEUES;
        // An interface that is gone is noticed by its sockets.
        let queues =
            redirect::interface(name).ok().and_then(|interface| interface.queues()).unwrap_or(0);
        let added = queues.saturating_sub(received);
        if added > 0 && self.added == 0 {
            tracing::warn!(
                "{name} has {queues} queues now and {received} are received: the kernel gets the packets of the others; start \
                 again to receive them"
            );
        }
        self.added = self.added.max(added);
    }
}

fn newest(published: &Mutex<Option<Snapshot>>) -> Option<Snapshot> {
    published.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Refuses an interface that the default route depends on, or of which that is not known.
fn check_routes(interface: &Interface) -> Result<(), Failure> {
    let name = || interface.name().to_owned();
    match default_route_over(interface) {
        Ok(None) => Ok(()),
        Ok(Some(over)) => Err(Failure::DefaultRoute { interface: name(), over }),
        Err(error) => Err(Failure::RoutesUnknown { interface: name(), error }),
    }
}
