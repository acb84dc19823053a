//! What surrounds a server: the command of `--run`, the file of `--pidfile`, and a temporary
//! directory for a socket.

use super::error::ServeError;
use super::listener::Listener;
use crate::setup::staged::Staged;
use crate::signal::Interrupt;
use pinfold::Signals;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::fs::{DirBuilder, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::thread::JoinHandle;

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
        let failed = |error| ServeError::Run { command: line.to_owned(), error };
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
