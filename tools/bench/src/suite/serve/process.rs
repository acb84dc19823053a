//! The servers, and the data that they serve.

use crate::error::BenchError;
use crate::suite::program::{self, Data};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The programs that are needed besides this one, and their packages in Debian.
const PROGRAMS: [(&str, &str); 4] =
    [("fio", "fio"), ("nbdcopy", "libnbd-bin"), ("nbdkit", "nbdkit"), ("qemu-nbd", "qemu-utils")];
/// The time limit for a server until clients can connect.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the error that names the programs which are missing, if any is.
pub(super) fn missing() -> Option<BenchError> {
    program::missing(&PROGRAMS)
}

/// A server that runs until it is dropped.
#[derive(Debug)]
pub(super) struct Server {
    name: &'static str,
    child: Child,
    socket: PathBuf,
}

impl Server {
    /// Starts all servers. Each takes connections when this returns.
    pub(super) fn start_all(data: &Data) -> Result<Vec<Self>, BenchError> {
        let own = program::own()?;
        let (file, bytes) = (&*data.path().to_string_lossy(), data.bytes());
        let command = |name: &'static str, program: &Path, args: &[&str]| {
            let socket = socket();
            let mut command = Command::new(program);
            for arg in args {
                command.arg(arg.replace("SOCKET", &socket.to_string_lossy()));
            }
            Self::start(name, command, socket)
        };
        let soft = format!("soft:{bytes}");
        // Several servers write one file, which a lock would keep from the second.
        let image = |aio: &str| {
            format!(
                "driver=raw,file.driver=file,file.locking=off,file.aio={aio},file.filename={file}"
            )
        };
        let (threads, io_uring) = (image("threads"), image("io_uring"));
        let memory = bytes.to_string();
        Ok(vec![
            command("pinfold", &own, &["serve", file, "--cached", "--nbd", "unix:SOCKET"])?,
            command("nbdkit-file", Path::new("nbdkit"), &["-f", "-U", "SOCKET", "file", file])?,
            command(
                "qemu-nbd",
                Path::new("qemu-nbd"),
                &["-t", "-e", "64", "-k", "SOCKET", "--image-opts", &threads],
            )?,
            command(
                "qemu-nbd-uring",
                Path::new("qemu-nbd"),
                &["-t", "-e", "64", "-k", "SOCKET", "--image-opts", &io_uring],
            )?,
            command(
                "nbdkit-memory",
                Path::new("nbdkit"),
                &["-f", "-U", "SOCKET", "memory", &memory],
            )?,
            command("pinfold-soft", &own, &["serve", &soft, "--nbd", "unix:SOCKET"])?,
        ])
    }

    fn start(
        name: &'static str,
        mut command: Command,
        socket: PathBuf,
    ) -> Result<Self, BenchError> {
        let line = format!("{command:?}");
        let failed = |reason: String| BenchError::Server { command: line.clone(), reason };
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(|error| failed(error.to_string()))?;
        let mut server = Self { name, child, socket };
        let until = Instant::now() + PATIENCE;
        while UnixStream::connect(&server.socket).is_err() {
            if let Some(status) =
                server.child.try_wait().map_err(|error| failed(error.to_string()))?
            {
                return Err(failed(format!("it ends at once: {status}")));
            }
            if Instant::now() > until {
                return Err(failed(format!(
                    "no client can connect within {} s",
                    PATIENCE.as_secs()
                )));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// Returns whether it has data of its own.
    pub(super) fn has_memory(&self) -> bool {
        matches!(self.name, "nbdkit-memory" | "pinfold-soft")
    }

    /// Returns whether its figures contain those of a model.
    pub(super) fn is_model(&self) -> bool {
        self.name == "pinfold-soft"
    }

    /// Returns its address, as clients take it.
    pub(super) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// Returns the processor time of all its threads, those that have ended included (proc(5),
    /// `/proc/pid/stat`).
    pub(super) fn cpu_time(&self) -> Result<Duration, BenchError> {
        let path = format!("/proc/{}/stat", self.child.id());
        let stat = std::fs::read_to_string(&path).map_err(BenchError::Scratch)?;
        let ticks = ticks(&stat).ok_or_else(|| BenchError::Server {
            command: self.name.to_owned(),
            reason: format!("{path} has no processor times"),
        })?;
        let per_second = rustix::param::clock_ticks_per_second().max(1);
        Ok(Duration::from_millis(ticks * 1000 / per_second))
    }
}

/// Returns utime and stime together: fields 14 and 15, counted behind the name, which may contain
/// blanks.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

/// Returns a path for a socket that no other server has.
fn socket() -> PathBuf {
    program::unique(&std::env::temp_dir(), "sock")
}

impl Drop for Server {
    fn drop(&mut self) {
        // The served data is gone with this process in any case. An error means that it has ended
        // already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.socket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_counted_behind_any_name() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 100 0 0 0 12 30 5 6 20 0 1 0";
        assert_eq!(ticks(stat), Some(42));
        assert_eq!(ticks("7 (a) S 1"), None);
        assert_eq!(ticks(""), None);
    }

    #[test]
    fn a_server_that_ends_is_reported_and_one_that_is_dropped_ends() {
        let error = Server::start("x", Command::new("false"), socket()).unwrap_err();
        assert!(
            error.to_string().contains("false") && error.to_string().contains("exit status: 1"),
            "{error}"
        );
        let socket = socket();
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let mut sleep = Command::new("sleep");
        sleep.arg("60");
        let server = Server::start("sleep", sleep, socket.clone()).unwrap();
        assert!(server.cpu_time().is_ok());
        let stat = format!("/proc/{}", server.child.id());
        drop((server, listener));
        assert!(!socket.exists() && !Path::new(&stat).exists());
    }
}
