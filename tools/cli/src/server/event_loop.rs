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
/// How often a connection that waits for memory tries again: another event loop may have returned
/// some.
const MEMORY_RETRY: Duration = Duration::from_millis(5);
/// How long the replies of the last requests may take after a signal.
const DRAIN: Duration = Duration::from_secs(5);
/// How long the loop rests after the target could not be polled.
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
    /// How many clients are connected to the server.
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
    pub(super) shared: Shared<'s>,
    pub(super) info: TargetInfo,
    worker: Worker<'t, Buffer>,
    pub(super) depth: usize,
    epoll: OwnedFd,
    pub(super) inbox: Inbox,
    /// The answers to clients that have asked for extents.
    pub(super) answers: (Sender<Answer>, Receiver<Answer>),
    pub(super) payloads: Payloads,
    pub(super) connections: Slab<Connection>,
    pub(super) operations: Slab<Operation>,
    /// Requests for the target that wait until its queue has room.
    pub(super) issues: Issues,
    /// Connections to be served.
    ready: VecDeque<Key>,
    /// Whether a client may have departed from operations: one that takes no replies any more.
    pub(super) departed: bool,
    /// Connections that wait for memory, longest first.
    pub(super) starved: VecDeque<Key>,
    pub(super) completed: Vec<Completion<Buffer>>,
    /// Where payloads of refused requests go.
    pub(super) scratch: Box<[u8]>,
    pub(super) stats: ServeStats,
    /// How many errors of the target were logged as warnings.
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
        Ok(Self {
            shared,
            info,
            worker,
            depth,
            epoll,
            inbox,
            answers: channel(),
            payloads,
            connections: Slab::default(),
            operations: Slab::default(),
            issues: Issues::default(),
            ready: VecDeque::new(),
            departed: false,
            starved: VecDeque::new(),
            completed: Vec::new(),
            scratch: vec![0; 64 << 10].into_boxed_slice(),
            stats: ServeStats::default(),
            warned: 0,
            budget: 0,
            clock: Unpaused::new(SystemClock::default()),
        })
    }

    /// Returns the time that clients are measured by.
    pub(super) fn now(&self) -> Duration {
        Duration::from_nanos(self.clock.now_ns())
    }

    /// Serves until the interrupt is raised and the last requests are answered. Returns what was
    /// done, and the error that has ended it earlier, if one has: what clients have written is
    /// flushed then, too.
    pub(crate) fn run(mut self, writable: bool) -> (ServeStats, WorkerStats, Option<ServeError>) {
        let mut events = Vec::with_capacity(256);
        let mut swept = self.now();
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
            let now = self.now();
            if draining.is_none() && self.shared.interrupt.is_raised() {
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
            self.stats.cut += 1;
            self.close(key);
        }
        let mut buffers = Vec::new();
        self.worker.drain(&mut buffers);
        let stats = self.worker.stats();
        // Otherwise nothing is lost without the flush.
        let wrote = stats.writes.requests > 0 || stats.trims.requests > 0;
        if writable
            && let Err(error) = self.worker.sync(self.shared.interrupt)
            && wrote
        {
            tracing::warn!("{error}");
            self.stats.unflushed += 1;
        }
        (self.stats, self.worker.stats().clone(), failed)
    }

    /// Waits for events, and notes which connections they belong to.
    fn wait(&mut self, events: &mut Vec<epoll::Event>) -> Result<(), ServeError> {
        let mut limit = if self.ready.is_empty() { self.shared.max_sleep } else { Duration::ZERO };
        if !self.starved.is_empty() {
            limit = limit.min(MEMORY_RETRY);
        }
        if !limit.is_zero()
            && let Some(wait) = self.worker.arm()
        {
            limit = limit.min(wait);
        }
        self.stats.turns += 1;
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
                    let key = Key::from_word(word);
                    let Some(connection) = self.connections.get_mut(key) else { continue };
                    let flags = event.flags;
                    let broken = flags.intersects(epoll::EventFlags::HUP | epoll::EventFlags::ERR);
                    connection.hung_up |= flags.contains(epoll::EventFlags::RDHUP);
                    connection.readable |= flags.contains(epoll::EventFlags::IN);
                    connection.writable |= flags.contains(epoll::EventFlags::OUT);
                    if broken {
                        connection.note_gone();
                    }
                    self.list(key);
                }
            }
        }
        if events.is_empty() {
            self.feed();
        }
        Ok(())
    }

    /// Takes over new clients. Clients that come after the signal are refused, or each would keep
    /// the loop from its end.
    fn accept(&mut self) {
        while let Ok(stream) = self.inbox.streams.try_recv() {
            if self.shared.interrupt.is_raised() {
                self.shared.connected.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            self.stats.connections += 1;
            let connection = Connection::new(stream, self.shared.tls.is_some(), self.now());
            let key = self.connections.insert(connection);
            let Some(connection) = self.connections.get_mut(key) else { continue };
            let flags = epoll::EventFlags::IN
                | epoll::EventFlags::OUT
                | epoll::EventFlags::RDHUP
                | epoll::EventFlags::ET;
            let data = epoll::EventData::new_u64(key.to_word());
            match epoll::add(&self.epoll, &connection.stream, data, flags) {
                Ok(()) => self.list(key),
                Err(errno) => {
                    tracing::warn!("a client cannot be served: epoll_ctl: {errno}");
                    self.close(key);
                }
            }
        }
    }

    /// Has a connection served in the next iteration.
    pub(super) fn list(&mut self, key: Key) {
        if let Some(connection) = self.connections.get_mut(key)
            && !std::mem::replace(&mut connection.listed, true)
        {
            self.ready.push_back(key);
        }
    }

    /// Serves all connections on the list once; those with more to do are on it again.
    fn serve_ready(&mut self) {
        for _ in 0..self.ready.len() {
            let Some(key) = self.ready.pop_front() else { break };
            let Some(connection) = self.connections.get_mut(key) else { continue };
            connection.listed = false;
            let served = self.serve(key);
            if matches!(served, Err(Ended::Closed)) {
                self.abandon_receiving(key);
                // It may still read the replies to what it has requested.
                self.end(key);
            } else if let Err(error) = served {
                if error.is_violation() {
                    self.stats.dropped += 1;
                    match self.stats.dropped {
                        ..=WARNINGS => tracing::warn!("a client is disconnected: {error}"),
                        _ => tracing::info!("a client is disconnected: {error}"),
                    }
                }
                self.close(key);
            }
            if self.connections.get_mut(key).is_some_and(|connection| connection.is_done()) {
                self.close(key);
            }
        }
    }

    /// Takes what the target has completed, and submits what is queued there. Returns whether
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

    /// Has nothing sent again that clients have departed from: it could be carried out seconds after
    /// they left, and others would wait for it.
    fn give_up_departed(&mut self) {
        if !std::mem::take(&mut self.departed) {
            return;
        }
        let (connections, operations) = (&mut self.connections, &mut self.operations);
        let mut is_departed = |key| {
            let client = operations.get_mut(key).map(|operation| operation.connection);
            client.is_some_and(|key| connections.get_mut(key).is_none_or(|client| client.gone))
        };
        self.worker.abandon_retries_of(&mut |io| is_departed(Key::from_word(io.tag)));
        // Others of their requests may not be at the target yet, or fail later.
        let keys = self.operations.keys();
        let mut clients =
            keys.into_iter().filter_map(|key| Some(self.operations.get_mut(key)?.connection));
        self.departed =
            clients.any(|key| self.connections.get_mut(key).is_none_or(|client| client.gone));
    }

    /// Handles what the target has completed, at the offset in the export.
    fn take_completed(&mut self, completion: Completion<Buffer>) {
        let io =
            Io { offset: completion.io.offset.saturating_sub(self.shared.base), ..completion.io };
        self.complete(Completion { io, ..completion });
    }

    /// Passes as many requests to the target as its queue holds.
    fn issue(&mut self) {
        while let Some((client, Issue { io, buffer })) =
            self.issues.pop(self.depth.saturating_sub(self.worker.in_flight()))
        {
            let Some(buffer) = self.lend(io.tag, buffer) else {
                self.issues.note_returned(client);
                continue;
            };
            let io = Io { offset: self.shared.base + io.offset, ..io };
            if let Err(rejected) = self.worker.submit_io(io, buffer) {
                self.take_completed(Completion {
                    io,
                    buffer: rejected.buffer,
                    result: Err(rejected.error),
                });
            }
        }
    }

    /// Lets the connections try again that wait for memory.
    pub(super) fn feed(&mut self) {
        while let Some(key) = self.starved.pop_front() {
            self.list(key);
        }
    }

    /// Receives no more requests: those that have begun are answered, then the connections are
    /// closed.
    fn end_all(&mut self) {
        while self.inbox.streams.try_recv().is_ok() {
            self.shared.connected.fetch_sub(1, Ordering::Relaxed);
        }
        for key in self.connections.keys() {
            self.end(key);
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
            let Some(connection) = self.connections.get_mut(key) else { continue };
            connection.note_waiting(now);
            if connection.is_stalled(others, now) {
                self.stats.dropped += 1;
                tracing::info!("a client is disconnected: it makes no progress");
                self.close(key);
            }
        }
    }

    /// Closes a connection. Its requests at the target complete without it.
    pub(super) fn close(&mut self, key: Key) {
        self.abandon_receiving(key);
        self.discard_replies(key);
        let Some(mut connection) = self.connections.remove(key) else { return };
        if let Some(buffer) = connection.asking.take() {
            self.payloads.put(buffer);
        }
        connection.stream.end(&mut self.scratch);
        self.shared.connected.fetch_sub(1, Ordering::Relaxed);
        self.feed();
    }
}
