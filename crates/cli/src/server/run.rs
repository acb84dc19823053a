//! All threads of the server.

use super::error::ServeError;
use super::event_loop::{EventLoop, Inbox, Shared};
use super::listener::{Listener, Outbox, accept_all};
use super::payload::Payloads;
use super::stats::ServeStats;
use crate::engine::worker::WorkerStats;
use crate::signal::Interrupt;
use crate::targets::target::Target;
use pinfold::probe::threads;
use pinfold::{ArenaMemory, Buffer};
use pinfold_nbd::Export;
use pinfold_nvme::EventFd;
use rustls::ServerConfig;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::channel;

/// How clients are served.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServeOptions<'s> {
    /// What they see.
    pub(crate) export: &'s Export,
    /// Where it begins in the target.
    pub(crate) base: u64,
    /// The file behind it, if it is one.
    pub(crate) file: Option<&'s File>,
    /// The server's part of TLS, if clients have to use it.
    pub(crate) tls: Option<&'s Arc<ServerConfig>>,
    /// Whether they can write.
    pub(crate) writable: bool,
    /// The most clients.
    pub(crate) connections: usize,
    /// The requests in flight of each event loop.
    pub(crate) depth: usize,
    /// The payload memory of each event loop, bytes.
    pub(crate) budget: usize,
}

/// What the server has done.
#[derive(Debug, Default)]
pub(crate) struct Served {
    /// Clients and their requests.
    pub(crate) clients: ServeStats,
    /// Clients that were refused, because there were too many.
    pub(crate) refused: u64,
    /// The requests at the target.
    pub(crate) target: WorkerStats,
    /// What has ended the server, if that was no signal.
    pub(crate) failed: Option<ServeError>,
}

/// Serves clients of `listener` with an event loop for each of `targets` until `interrupt` is
/// raised, then answers the requests in flight. The first failure of an event loop ends the server,
/// as a signal does.
///
/// # Errors
/// The server did not start.
pub(crate) fn run(
    listener: Listener,
    targets: Vec<&mut (dyn Target<Buffer> + Send)>,
    memory: &ArenaMemory,
    options: ServeOptions<'_>,
    interrupt: &Interrupt,
) -> Result<Served, ServeError> {
    let ServeOptions { export, base, file, tls, writable, connections, depth, budget } = options;
    let connected = &AtomicUsize::new(0);
    let stop = &interrupt.child();
    let shared = Shared { export, base, file, tls, connected, interrupt: stop };
    let mut outboxes = Vec::with_capacity(targets.len());
    let mut loops = Vec::with_capacity(targets.len());
    for target in targets {
        let failed = |error| ServeError::EventLoop { call: "eventfd", error };
        let (wake, (sender, receiver)) = (Arc::new(EventFd::new().map_err(failed)?), channel());
        outboxes.push(Outbox { streams: sender, wake: wake.clone() });
        loops.push((target, Inbox { streams: receiver, wake }));
    }
    let run_loop = |(target, inbox): (&mut (dyn Target<Buffer> + Send), Inbox)| {
        // However it ends, the others have to.
        let _ended = RaisedOnDrop(stop);
        let payloads = Payloads::new(memory, budget);
        EventLoop::new(shared, target, depth, payloads, inbox)
            .map(|event_loop| event_loop.run(writable))
    };
    std::thread::scope(|scope| {
        let (run_loop, outboxes) = (&run_loop, &outboxes);
        let spawn = |name: String| std::thread::Builder::new().name(name);
        // The last one runs on this thread, to which a single queue may be bound.
        let last = loops.pop();
        let mut threads = Vec::with_capacity(loops.len());
        for (number, each) in (1..).zip(loops) {
            let thread =
                spawn(format!("serve {number}")).spawn_scoped(scope, move || run_loop(each));
            threads.push(thread.map_err(|error| {
                let error = ServeError::Thread(threads::refusal(&error));
                stop.raise();
                error
            })?);
        }
        let acceptor = spawn("accept".into()).spawn_scoped(scope, move || {
            let refused = accept_all(&listener, outboxes, connected, connections, stop);
            // Closed, and its file removed, before the last requests are answered.
            drop(listener);
            refused
        });
        let acceptor = acceptor.map_err(|error| {
            let error = ServeError::Thread(threads::refusal(&error));
            stop.raise();
            error
        })?;
        let last = last.map(run_loop);
        let mut served = Served::default();
        for result in threads.into_iter().map(joined).chain(last) {
            match result {
                Ok((clients, target, failed)) => {
                    served.clients.add(&clients);
                    served.target.add(&target);
                    served.failed = served.failed.or(failed);
                }
                Err(error) => served.failed = served.failed.or(Some(error)),
            }
        }
        served.refused = joined(acceptor);
        Ok(served)
    })
}

/// Ends the server with a thread of it, also with one that panics.
struct RaisedOnDrop<'i>(&'i Interrupt);

impl Drop for RaisedOnDrop<'_> {
    fn drop(&mut self) {
        self.0.raise();
    }
}

fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
