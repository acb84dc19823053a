//! One thread of the server: its connections, its queue at the target, its memory.
//!
//! An iteration of the loop takes the target's completions, serves the connections on its list
//! (replies first, then requests), and looks for events; it sleeps only when the list is empty and
//! the target has nothing to report.

use super::connection::Connection;
use super::error::{Ended, ServeError, WARNINGS};
use super::extents::{Answer, ExtentFinder};
use super::operation::{Issue, Issues, Operation, ServeStats};
use super::payload::{Key, Payloads, Slab};
use super::stream::Stream;
use crate::engine::worker::{Worker, WorkerStats};
use crate::signal::Interrupt;
use crate::targets::target::{Completion, Io, Target, TargetInfo};
use pinfold::Buffer;
use pinfold_nbd::Export;
use pinfold_nvme::EventFd;
use pinfold_nvme::driver::{Clock, SystemClock, Unpaused};
use rustix::event::{Timespec, epoll};
use rustls::ServerConfig;
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// The longest sleep of a server's event loop: how soon a signal is noticed, and nothing else.
pub(crate) const MAX_SLEEP: Duration = Duration::from_millis(100);
/// The interval at which a connection that waits for memory tries again: another event loop may
/// have returned some.
const MEMORY_RETRY: Duration = Duration::from_millis(5);
/// The time limit for the replies of the last requests after a signal.
const DRAIN: Duration = Duration::from_secs(5);
/// The pause of the loop after the target could not be polled.
const AFTER_FAILURE: Duration = Duration::from_millis(10);
/// The words of events that are no connection's.
const WAKE: u64 = u64::MAX;
const TARGET: u64 = u64::MAX - 1;

/// The state that all event loops share.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'s> {
    /// The export.
    pub(crate) export: &'s Export,
    /// The first byte of the target that is served.
    pub(crate) base: u64,
    /// Finds the extents of the target, if it is a file.
    pub(crate) extents: Option<&'s ExtentFinder>,
    /// The server's part of TLS, without which no client is served, if there is one.
    pub(crate) tls: Option<&'s Arc<ServerConfig>>,
    /// The number of clients connected to the server.
    pub(crate) connected: &'s AtomicUsize,
    /// Raised to end the server.
    pub(crate) interrupt: &'s Interrupt,
    /// The longest sleep, after which the interrupt is looked at.
    pub(crate) max_sleep: Duration,
}

/// New clients of an event loop.
pub(crate) struct Inbox {
    /// The clients.
    pub(crate) streams: Receiver<Stream>,
    /// Signalled when there are some.
    pub(crate) wake: Arc<EventFd>,
}

/// One thread of the server.
pub(crate) struct EventLoop<'s, 't> {
    worker: Worker<'t, Buffer>,
    epoll: OwnedFd,
    /// The clients. A key is looked up here, once for an event, a turn or a completion; what is done
    /// for the client gets the client.
    connections: Slab<Connection>,
    completed: Vec<Completion<Buffer>>,
    service: Service<'s>,
}

/// The resources of a thread for its clients: memory, operations, and the target's queue.
pub(super) struct Service<'s> {
    pub(super) shared: Shared<'s>,
    pub(super) info: TargetInfo,
    pub(super) depth: usize,
    pub(super) inbox: Inbox,
    /// The answers to clients that have asked for extents.
    pub(super) answers: (Sender<Answer>, Receiver<Answer>),
    pub(super) payloads: Payloads,
    pub(super) operations: Slab<Operation>,
    /// Requests for the target that wait until its queue has room.
    pub(super) issues: Issues,
    /// Connections to be served.
    ready: VecDeque<Key>,
    /// Whether a client may have departed from operations: one that takes no replies any more.
    pub(super) departed: bool,
    /// Connections that wait for memory, longest first; and those of them that are to try again.
    pub(super) starved: VecDeque<Key>,
    fed: VecDeque<Key>,
    /// The buffer for payloads of refused requests.
    pub(super) scratch: Box<[u8]>,
    pub(super) stats: ServeStats,
    /// The number of errors of the target logged as warnings.
    pub(super) warned: u64,
    /// The bytes that the connection being served may still move in this iteration.
    pub(super) budget: usize,
    /// Leaves out the pauses of the process (SIGSTOP, a debugger, a frozen cgroup), for which
    /// clients are not to blame.
    clock: Unpaused<SystemClock>,
}

impl<'s, 't> EventLoop<'s, 't> {
    /// Creates a loop over `target`, whose queue holds `depth` requests.
    pub(crate) fn new(
        shared: Shared<'s>,
        target: &'t mut (dyn Target<Buffer> + Send),
        depth: usize,
        payloads: Payloads,
        inbox: Inbox,
    ) -> Result<Self, ServeError> {
        let failed = |call| {
            move |errno: rustix::io::Errno| ServeError::EventLoop { call, error: errno.into() }
        };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed("epoll_create1"))?;
        let info = target.info().clone();
        target.work_in_background(&inbox.wake);
        let mut worker = Worker::new(target, depth);
        let edges = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, inbox.wake.as_fd(), epoll::EventData::new_u64(WAKE), edges)
            .map_err(failed("epoll_ctl"))?;
        if let Some(fd) = worker.completion_fd() {
            let data = epoll::EventData::new_u64(TARGET);
            epoll::add(&epoll, fd, data, epoll::EventFlags::IN).map_err(failed("epoll_ctl"))?;
        }
        if let Some(fd) = worker.flush_fd() {
            let data = epoll::EventData::new_u64(TARGET);
            epoll::add(&epoll, fd, data, epoll::EventFlags::IN).map_err(failed("epoll_ctl"))?;
        }
        let service = Service {
            shared,
            info,
            depth,
            inbox,
            answers: channel(),
            payloads,
            operations: Slab::default(),
            issues: Issues::default(),
            ready: VecDeque::new(),
            departed: false,
            starved: VecDeque::new(),
            fed: VecDeque::new(),
            scratch: vec![0; 64 << 10].into_boxed_slice(),
            stats: ServeStats::default(),
            warned: 0,
            budget: 0,
            clock: Unpaused::new(SystemClock::default()),
        };
        Ok(Self { worker, epoll, connections: Slab::default(), completed: Vec::new(), service })
    }

    /// Serves until the interrupt is raised and the last requests are answered. Returns what was
    /// done, and the error that has ended it earlier, if one has: what clients have written is
    /// flushed then, too.
    pub(crate) fn run(mut self, writable: bool) -> (ServeStats, WorkerStats, Option<ServeError>) {
        let mut events = Vec::with_capacity(256);
        let mut swept = self.service.now();
        let mut draining: Option<Duration> = None;
        let failed = loop {
            self.take_completions();
            self.take_answers();
            self.serve_ready();
            self.issue();
            // A request to cached pages is complete once it is submitted: it is answered before the
            // loop looks for events.
            if self.take_completions() {
                self.serve_ready();
                self.issue();
            }
            self.give_up_departed();
            let now = self.service.now();
            if draining.is_none() && self.service.shared.interrupt.is_raised() {
                draining = Some(now);
                self.end_all();
                continue;
            }
            if let Some(since) = draining
                && (self.connections.len() == 0 || now.saturating_sub(since) > DRAIN)
            {
                break None;
            }
            // Before the wait: without an event, that lets those that wait for memory try again,
            // and then none seems to wait.
            if now.saturating_sub(swept) > Duration::from_secs(1) {
                swept = now;
                self.sweep(now);
            }
            if let Err(error) = self.wait(&mut events) {
                break Some(error);
            }
        };
        for key in self.connections.keys() {
            self.service.stats.cut += 1;
            self.close(key);
        }
        let mut buffers = Vec::new();
        self.worker.drain(&mut buffers);
        let stats = self.worker.stats();
        // Otherwise nothing is lost without the flush.
        let wrote = stats.writes.requests > 0 || stats.trims.requests > 0;
        if writable
            && let Err(error) = self.worker.sync(self.service.shared.interrupt)
            && wrote
        {
            tracing::warn!("{error}");
            self.service.stats.unflushed += 1;
        }
        (self.service.stats, self.worker.stats().clone(), failed)
    }

    /// Waits for events, and notes which connections they belong to.
    fn wait(&mut self, events: &mut Vec<epoll::Event>) -> Result<(), ServeError> {
        let service = &mut self.service;
        let mut limit = if service.has_ready() { Duration::ZERO } else { service.shared.max_sleep };
        if !service.starved.is_empty() {
            limit = limit.min(MEMORY_RETRY);
        }
        if !limit.is_zero()
            && let Some(wait) = self.worker.arm()
        {
            limit = limit.min(wait);
        }
        service.stats.turns += 1;
        events.clear();
        let limit = Timespec::try_from(limit).unwrap_or_default();
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => {
                return Err(ServeError::EventLoop { call: "epoll_wait", error: errno.into() });
            }
        }
        for event in &*events {
            match event.data.u64() {
                WAKE => self.accept(),
                TARGET => {}
                word => {
                    let client = self.connections.get_mut(Key::from_word(word));
                    let Some(client) = client else { continue };
                    let flags = event.flags;
                    let broken = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR);
                    client.hung_up |= flags.contains(epoll::EventFlags::RDHUP);
                    client.readable |= flags.contains(epoll::EventFlags::IN);
                    client.writable |= flags.contains(epoll::EventFlags::OUT);
                    if broken {
                        client.note_gone();
                    }
                    self.service.list(client);
                }
            }
        }
        if events.is_empty() {
            self.service.feed();
        }
        Ok(())
    }

    /// Takes over new clients. Clients that come after the signal are refused, or each would keep
    /// the loop from its end.
    fn accept(&mut self) {
        while let Ok(stream) = self.service.inbox.streams.try_recv() {
            let Shared { interrupt, connected, tls, .. } = self.service.shared;
            if interrupt.is_raised() {
                connected.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            self.service.stats.connections += 1;
            let now = self.service.now();
            let key = self
                .connections
                .insert_with(|key| Connection::new(key, stream, tls.is_some(), now));
            let Some(client) = self.connections.get_mut(key) else { continue };
            let flags = epoll::EventFlags::IN
                | epoll::EventFlags::OUT
                | epoll::EventFlags::RDHUP
                | epoll::EventFlags::ET;
            let data = epoll::EventData::new_u64(key.to_word());
            match epoll::add(&self.epoll, &client.stream, data, flags) {
                Ok(()) => self.service.list(client),
                Err(errno) => {
                    tracing::warn!("a client cannot be served: epoll_ctl: {errno}");
                    self.close(key);
                }
            }
        }
    }

    /// Serves all connections on the list once; those with more to do are on it again.
    fn serve_ready(&mut self) {
        while let Some(key) = self.service.fed.pop_front() {
            if let Some(client) = self.connections.get_mut(key) {
                self.service.list(client);
            }
        }
        for _ in 0..self.service.ready.len() {
            let Some(key) = self.service.ready.pop_front() else { break };
            let Some(client) = self.connections.get_mut(key) else { continue };
            client.listed = false;
            let closes = match self.service.serve(client) {
                Ok(()) => client.is_done(),
                Err(Ended::Closed) => {
                    self.service.abandon_receiving(client);
                    // It may still read the replies to its requests.
                    self.service.end(client);
                    client.is_done()
                }
                Err(error) => {
                    if error.is_violation() {
                        self.service.stats.dropped += 1;
                        match self.service.stats.dropped {
                            ..=WARNINGS => tracing::warn!("a client is disconnected: {error}"),
                            _ => tracing::info!("a client is disconnected: {error}"),
                        }
                    }
                    true
                }
            };
            if closes {
                self.close(key);
            }
        }
    }

    /// Processes the target's completions, and submits requests queued there. Returns whether
    /// anything has completed.
    fn take_completions(&mut self) -> bool {
        let completed = &mut self.completed;
        let polled = self.worker.collect(false, |completion| completed.push(completion));
        if let Err(error) = polled {
            // Its requests have completed with errors, which their clients receive.
            tracing::warn!("{error}");
            std::thread::sleep(AFTER_FAILURE);
        }
        let any = !self.completed.is_empty();
        // Its memory is kept: it is as large as the largest batch.
        let mut completed = std::mem::take(&mut self.completed);
        completed.drain(..).for_each(|completion| self.take_completed(completion));
        self.completed = completed;
        any
    }

    /// Abandons the retries of requests whose clients have departed: they could be carried out
    /// seconds later, and others would wait for them.
    fn give_up_departed(&mut self) {
        if !std::mem::take(&mut self.service.departed) {
            return;
        }
        let (connections, operations) = (&mut self.connections, &mut self.service.operations);
        let keys = operations.keys();
        let mut is_departed = |key| {
            let client = operations.get_mut(key).map(|operation| operation.connection);
            client.is_some_and(|key| connections.get_mut(key).is_none_or(|client| client.gone))
        };
        self.worker.abandon_retries_of(&mut |io| is_departed(Key::from_word(io.tag)));
        // Others of their requests may not be at the target yet, or fail later.
        self.service.departed = keys.into_iter().any(is_departed);
    }

    /// Handles a completion of the target, at the offset in the export.
    fn take_completed(&mut self, completion: Completion<Buffer>) {
        let base = self.service.shared.base;
        let io = Io { offset: completion.io.offset.saturating_sub(base), ..completion.io };
        let operation = self.service.operations.get_mut(Key::from_word(io.tag));
        let client = operation.and_then(|operation| self.connections.get_mut(operation.connection));
        self.service.complete(client, Completion { io, ..completion });
    }

    /// Replies to the clients whose extents were found.
    fn take_answers(&mut self) {
        while let Ok(answer) = self.service.answers.1.try_recv() {
            let Some(client) = self.connections.get_mut(answer.client) else { continue };
            self.service.answer(client, answer);
            // It may have asked again.
            self.service.list(client);
        }
    }

    /// Passes as many requests to the target as its queue holds.
    fn issue(&mut self) {
        while let Some((key, Issue { io, buffer })) =
            self.service.issues.pop(self.service.depth.saturating_sub(self.worker.in_flight()))
        {
            let client = self.connections.get_mut(key);
            let Some(buffer) = self.service.lend(client, io.tag, buffer) else {
                self.service.issues.note_returned(key);
                continue;
            };
            let io = Io { offset: self.service.shared.base + io.offset, ..io };
            if let Err(rejected) = self.worker.submit_io(io, buffer) {
                self.take_completed(Completion {
                    io,
                    buffer: rejected.buffer,
                    result: Err(rejected.error),
                });
            }
        }
    }

    /// Receives no more requests: those that have begun are answered, then the connections are
    /// closed.
    fn end_all(&mut self) {
        while self.service.inbox.streams.try_recv().is_ok() {
            self.service.shared.connected.fetch_sub(1, Ordering::Relaxed);
        }
        for key in self.connections.keys() {
            if let Some(client) = self.connections.get_mut(key) {
                self.service.end(client);
            }
        }
    }

    /// Closes connections that take too long for their handshake, or hold memory that others wait
    /// for without progress.
    fn sweep(&mut self, now: Duration) {
        let keys = self.connections.keys();
        let waits_since = |key: &Key| Some((self.connections.get_mut(*key)?.waits_since?, *key));
        let mut waiting: Vec<_> = keys.iter().filter_map(waits_since).collect();
        waiting.sort_unstable_by_key(|(since, _)| *since);
        for key in keys {
            // A client does not wait for itself.
            let others = waiting.iter().find(|(_, other)| *other != key).map(|(since, _)| *since);
            let Some(client) = self.connections.get_mut(key) else { continue };
            client.note_waiting(now);
            if client.is_stalled(others, now) {
                self.service.stats.dropped += 1;
                tracing::info!("a client is disconnected: it makes no progress");
                self.close(key);
            }
        }
    }

    /// Closes a connection. Its requests at the target complete without it.
    fn close(&mut self, key: Key) {
        let Some(mut client) = self.connections.remove(key) else { return };
        self.service.abandon_receiving(&mut client);
        self.service.discard_replies(&mut client);
        if let Some(buffer) = client.asking.take() {
            self.service.payloads.put(buffer);
        }
        client.stream.end(&mut self.service.scratch);
        self.service.shared.connected.fetch_sub(1, Ordering::Relaxed);
        self.service.feed();
    }
}

impl Service<'_> {
    /// Returns the time that clients are measured by.
    pub(super) fn now(&self) -> Duration {
        Duration::from_nanos(self.clock.now_ns())
    }

    fn has_ready(&self) -> bool {
        !self.ready.is_empty() || !self.fed.is_empty()
    }

    /// Schedules a client for the next iteration.
    pub(super) fn list(&mut self, client: &mut Connection) {
        if !std::mem::replace(&mut client.listed, true) {
            self.ready.push_back(client.key);
        }
    }

    /// Makes the clients that wait for memory try again.
    pub(super) fn feed(&mut self) {
        self.fed.append(&mut self.starved);
    }
}
