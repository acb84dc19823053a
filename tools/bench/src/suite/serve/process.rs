//! The servers, and the data that they serve.

use crate::error::BenchError;
use crate::suite::handle::Rng;
use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The programs that are needed besides this one, and their packages in Debian.
const PROGRAMS: [(&str, &str); 4] =
    [("fio", "fio"), ("nbdcopy", "libnbd-bin"), ("nbdkit", "nbdkit"), ("qemu-nbd", "qemu-utils")];
/// The program whose command `serve` is measured.
const OWN: &str = "pinfold";
/// How long a server may take until clients can connect.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the error that names the programs which are missing, if any is.
pub(super) fn missing() -> Option<BenchError> {
    let is_there = |name: &str| crate::suite::program(name).is_some();
    let lacking: Vec<_> = PROGRAMS.iter().filter(|(name, _)| !is_there(name)).collect();
    if !lacking.is_empty() {
        let join = |part: fn(&(&'static str, &'static str)) -> &'static str| {
            lacking.iter().map(|each| part(each)).collect::<Vec<_>>()
        };
        return Some(BenchError::NoServers {
            missing: join(|(name, _)| name).join(", "),
            fix: format!("sudo apt-get install {}", join(|(_, package)| package).join(" ")),
        });
    }
    own().err()
}

/// Returns the program `pinfold`: beside this one, else the first on PATH.
fn own() -> Result<PathBuf, BenchError> {
    crate::suite::program(OWN).ok_or_else(|| BenchError::NoServers {
        missing: "`pinfold`".to_owned(),
        fix: "cargo build --release -p pinfold-cli, or add its folder to PATH".to_owned(),
    })
}

/// The data: a file in memory where there is `/dev/shm`, removed when this is dropped. It has a
/// name, because nbdkit resolves the links of `/proc/pid/fd` and opens the file again for each
/// client.
#[derive(Debug)]
pub(super) struct Data {
    path: PathBuf,
    bytes: usize,
}

impl Data {
    /// Creates `bytes` bytes of data that cannot be compressed.
    pub(super) fn create(bytes: usize) -> Result<Self, BenchError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let shared = Path::new("/dev/shm");
        let is_usable = rustix::fs::access(shared, rustix::fs::Access::WRITE_OK).is_ok();
        let folder = if is_usable { shared.to_owned() } else { std::env::temp_dir() };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("pinfold-bench-{}-{number}.data", std::process::id()));
        let mut file = File::create_new(&path).map_err(BenchError::Scratch)?;
        let data = Self { path, bytes };
        let mut rng = Rng::new();
        let mut block = vec![0; 1 << 20];
        for _ in 0..bytes.div_ceil(block.len()) {
            for word in block.chunks_exact_mut(4) {
                let random = u32::try_from(rng.below(1 << 32)).unwrap_or_default();
                word.copy_from_slice(&random.to_le_bytes());
            }
            file.write_all(&block).map_err(BenchError::Scratch)?;
        }
        Ok(data)
    }

    /// Returns its path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        // An error means that someone else has removed it.
        let _ = std::fs::remove_file(&self.path);
    }
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
        let own = own()?;
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
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("pinfold-bench-{}-{number}.sock", std::process::id()))
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
    fn data_is_a_file_for_other_processes_and_not_compressible() {
        let data = Data::create(2 << 20).unwrap();
        let read = std::fs::read(data.path()).unwrap();
        assert_eq!(read.len(), data.bytes());
        assert_ne!(read[..4096], read[4096..8192]);
        let path = data.path().to_owned();
        let zeroes = read.iter().filter(|byte| **byte == 0).count();
        assert!(zeroes < read.len() / 128, "{zeroes} zeroes");
        drop(data);
        assert!(!path.exists());
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
