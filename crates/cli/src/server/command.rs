//! What surrounds a server: the command of `--run`, the file of `--pidfile`, and a temporary directory for a socket.

use super::error::ServeError;
use super::listener::Listener;
use crate::setup::staged::Staged;
use crate::signal::Interrupt;
use pinfold::Signals;
use rustix::fs::Mode;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
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
pub(crate) struct PidFile(PathBuf);

impl PidFile {
    /// Writes the file at once, so that no reader finds a part of it; an existing one is replaced.
    pub(crate) fn write(path: &Path) -> Result<Self, ServeError> {
        let number = format!("{}\n", std::process::id());
        let staged =
            Staged::create(path, true, Mode::from_raw_mode(0o644), None).map_err(ServeError::PidFile)?;
        let written = io::Write::write_all(&mut staged.file(), number.as_bytes());
        written.map_err(|error| ServeError::PidFileWrite { path: path.to_owned(), error })?;
        staged.commit(number.len() as u64).map_err(ServeError::PidFile)?;
        Ok(Self(path.to_owned()))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // Another server may have replaced it meanwhile.
        if std::fs::read_to_string(&self.0).is_ok_and(|text| text.trim() == std::process::id().to_string()) {
            let _ = std::fs::remove_file(&self.0);
        }
    }
}

/// A folder that only its owner can open, for a socket whose name no one else needs. It is removed when this is dropped.
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
