//! All threads of the server.

use super::error::ServeError;
use super::event_loop::{EventLoop, Inbox, MAX_SLEEP, Shared};
use super::extents::ExtentFinder;
use super::listener::{Listener, Outbox, accept_all};
use super::operation::ServeStats;
use super::payload::Payloads;
use super::watch::Watch;
use crate::engine::worker::WorkerStats;
use crate::setup::staged::Staged;
use crate::signal::Interrupt;
use crate::targets::target::Target;
use pinfold::probe::threads;
use pinfold::{ArenaMemory, Buffer, Signals};
use pinfold_nbd::Export;
use pinfold_nvme::EventFd;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use rustls::ServerConfig;
use std::fs::{DirBuilder, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

/// The options of a server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServeOptions<'s> {
    /// The export that they see.
    pub(crate) export: &'s Export,
    /// The start of the export in the target.
    pub(crate) base: u64,
    /// The file behind it, if it is one: for its extents.
    pub(crate) file: Option<&'s File>,
    /// The watch on changes by others.
    pub(crate) watch: Option<&'s Watch>,
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

/// The outcome of a server.
#[derive(Debug, Default)]
pub(crate) struct Served {
    /// Clients and their requests.
    pub(crate) clients: ServeStats,
    /// Clients that were refused, because there were too many.
    pub(crate) refused: u64,
    /// The requests at the target.
    pub(crate) target: WorkerStats,
    /// The error that has ended the server, if that was no signal.
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
    let ServeOptions { export, base, file, watch, tls, writable, connections, depth, budget } =
        options;
    let connected = &AtomicUsize::new(0);
    let stop = &interrupt.child();
    let max_sleep = MAX_SLEEP;
    // Without it everything counts as allocated.
    let extents = file.map(ExtentFinder::of_file).and_then(|finder| {
        finder.inspect_err(|error| tracing::debug!("extents are not looked for: {error}")).ok()
    });
    let extents = extents.as_ref();
    let shared = Shared { export, base, extents, tls, connected, interrupt: stop, max_sleep };
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
            let refused = accept_all(&listener, outboxes, (connected, connections), watch, stop);
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

// The surroundings of a server: the command of `--run`, the file of `--pidfile`, and a temporary
// directory for a socket.

/// The command of `--run`, which ends the server when it ends.
#[derive(Debug)]
pub(crate) struct Captive {
    child: Child,
    watcher: JoinHandle<()>,
}

impl Captive {
    /// Starts `line` in a shell that knows where `listener` is, as nbdkit does.
    pub(crate) fn start(
        line: &str,
        listener: &Listener,
        uris: &[String],
        interrupt: &Interrupt,
    ) -> Result<Self, ServeError> {
        let failed = |error: io::Error| {
            let error = io::Error::new(error.kind(), threads::refusal(&error));
            ServeError::Run { command: line.to_owned(), error }
        };
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", line])
            .env("uri", uris.first().map_or("", String::as_str))
            .env("nbd", listener.legacy_uri());
        command.env("unixsocket", listener.path().unwrap_or(Path::new("")));
        command.env("port", listener.port().map(|port| port.to_string()).unwrap_or_default());
        for passed in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
            command.env_remove(passed);
        }
        let mut child = Signals::unblock_in(&mut command).spawn().map_err(failed)?;
        let (pid, interrupt) = (Pid::from_child(&child), interrupt.clone());
        let watcher = std::thread::Builder::new().name("run".into()).spawn(move || {
            // The child is waited for by `end`, so its number stays its own.
            while waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
                .is_err_and(|errno| errno == rustix::io::Errno::INTR)
            {}
            interrupt.raise();
        });
        match watcher {
            Ok(watcher) => Ok(Self { child, watcher }),
            Err(error) => {
                let _ = child.kill().and_then(|()| child.wait());
                Err(failed(error))
            }
        }
    }

    /// Ends the command, if it runs, and returns its outcome.
    ///
    /// # Errors
    /// [`ServeError::Command`] with the exit code that a shell would report.
    pub(crate) fn end(mut self, line: &str) -> Result<(), ServeError> {
        let failed = |error| ServeError::Run { command: line.to_owned(), error };
        if self.child.try_wait().map_err(failed)?.is_none() {
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        }
        let status = self.child.wait().map_err(failed)?;
        let _ = self.watcher.join();
        if status.success() {
            return Ok(());
        }
        Err(ServeError::Command { command: line.to_owned(), status, code: code(status) })
    }
}

fn code(status: ExitStatus) -> u8 {
    let signal = || status.signal().map(|signal| 128 + signal);
    status.code().or_else(signal).and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// A file with the process ID, which is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct PidFile {
    path: PathBuf,
    /// Open, so that no other file gets its inode.
    file: File,
}

impl PidFile {
    /// Writes the file at once, so that no reader finds a part of it. One that is empty or holds a
    /// number, as a server that was killed leaves it, is replaced; any other file is not, nor is
    /// `target`, and a link is not followed.
    pub(crate) fn write(path: &Path, target: Option<&File>) -> Result<Self, ServeError> {
        let number = format!("{}\n", std::process::id());
        remove_old(path, target)
            .map_err(|reason| ServeError::PidFileTaken { path: path.to_owned(), reason })?;
        let staged = Staged::create(path, false, Mode::from_raw_mode(0o644), None)
            .map_err(ServeError::PidFile)?;
        let written =
            staged.file().write_all(number.as_bytes()).and_then(|()| staged.file().try_clone());
        let file =
            written.map_err(|error| ServeError::PidFileWrite { path: path.to_owned(), error })?;
        staged.commit(number.len() as u64).map_err(ServeError::PidFile)?;
        Ok(Self { path: path.to_owned(), file })
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // Another server may have replaced it meanwhile, or written its own number into it.
        let is_own = match (self.path.symlink_metadata(), self.file.metadata()) {
            (Ok(there), Ok(own)) => is_same(&there, &own),
            _ => false,
        };
        let text = || std::fs::read_to_string(&self.path);
        if is_own && text().is_ok_and(|text| text.trim() == std::process::id().to_string()) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes what a server that was killed has left at the path of a pid file. Says why if it is
/// something else; what is no file at all is left to the caller.
fn remove_old(path: &Path, target: Option<&File>) -> Result<(), String> {
    /// More than any number of a process has.
    const DIGITS: u64 = 32;
    let Ok(there) = path.symlink_metadata() else { return Ok(()) };
    if there.is_symlink() {
        return Err("it is a symbolic link".into());
    }
    if !there.is_file() {
        return Ok(());
    }
    if target
        .and_then(|target| target.metadata().ok())
        .is_some_and(|target| is_same(&there, &target))
    {
        return Err("it is the target that is served".into());
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut text = String::new();
    let read = rustix::fs::open(path, flags, Mode::empty())
        .map_err(io::Error::from)
        .and_then(|file| File::from(file).take(DIGITS).read_to_string(&mut text));
    match read {
        Err(error) if error.kind() != io::ErrorKind::InvalidData => {
            return Err(format!("it exists, and cannot be read: {error}"));
        }
        Ok(len)
            if (len as u64) < DIGITS && (text.is_empty() || text.trim().parse::<u32>().is_ok()) => {
        }
        _ => return Err("it exists, and holds something other than the number of a process".into()),
    }
    std::fs::remove_file(path).map_err(|error| format!("it exists, and cannot be removed: {error}"))
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// A folder that only its owner can open, for a socket whose name no one else needs. It is removed
/// when this is dropped.
#[derive(Debug)]
pub(crate) struct PrivateFolder(PathBuf);

impl PrivateFolder {
    /// Creates one.
    pub(crate) fn new() -> Result<Self, ServeError> {
        let failed = |path: &Path, error| ServeError::Folder { path: path.to_owned(), error };
        let temporary = std::env::temp_dir();
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(|errno| failed(&temporary, errno.into()))?;
        let path = temporary.join(format!("pinfold-{:016x}", u64::from_ne_bytes(random)));
        DirBuilder::new().mode(0o700).create(&path).map_err(|error| failed(&path, error))?;
        Ok(Self(path))
    }

    /// Returns the path of the socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.0.join("nbd.sock")
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}
