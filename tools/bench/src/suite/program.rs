//! Programs that are measured: where they are, a run of one, its processor time, its data.

use super::handle::Rng;
use super::{find_program, folder_of_this};
use crate::error::BenchError;
use pinfold::CpuTime;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Returns the error that names those of `programs`, each with its package in Debian, which are
/// missing, if any is.
pub(super) fn missing(programs: &[(&str, &str)]) -> Option<BenchError> {
    let lacking: Vec<_> =
        programs.iter().filter(|(name, _)| find_program(name).is_none()).collect();
    if lacking.is_empty() {
        return own().err();
    }
    let names: Vec<_> = lacking.iter().map(|(name, _)| *name).collect();
    let packages: Vec<_> = lacking.iter().map(|(_, package)| *package).collect();
    Some(BenchError::NoPrograms {
        missing: names.join(", "),
        fix: format!("sudo apt-get install {}", packages.join(" ")),
    })
}

/// Returns the program `pinfold`.
pub(super) fn own() -> Result<PathBuf, BenchError> {
    find_program("pinfold").ok_or_else(|| BenchError::NoPrograms {
        missing: "`pinfold`".to_owned(),
        fix: "cargo build --release -p pinfold-cli, or add its folder to PATH".to_owned(),
    })
}

/// Runs a program to its end. Returns what it has printed, and the processor time of all its
/// threads, those of the kernel for its rings included.
pub(super) fn run(command: &mut Command) -> Result<(String, Duration, Duration), BenchError> {
    let name = name_of(command);
    let failed = |reason: String| BenchError::Client { client: name.clone(), reason };
    let before = CpuTime::of_children();
    let ran = command.stdin(Stdio::null()).output().map_err(|error| failed(error.to_string()))?;
    let CpuTime { user, system } = CpuTime::of_children().since(before);
    let error = String::from_utf8_lossy(&ran.stderr);
    if !ran.status.success() {
        return Err(failed(format!(
            "{}: {}",
            ran.status,
            error.lines().last().unwrap_or_default()
        )));
    }
    Ok((String::from_utf8_lossy(&ran.stdout).into_owned(), user, system))
}

/// Waits for a program that was started, however it ends, and returns its processor time.
pub(super) fn end(child: &mut Child) -> Result<Duration, BenchError> {
    let before = CpuTime::of_children();
    child.wait().map_err(BenchError::Scratch)?;
    let CpuTime { user, system } = CpuTime::of_children().since(before);
    Ok(user + system)
}

fn name_of(command: &Command) -> String {
    let name = Path::new(command.get_program()).file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Parses a program's JSON, which notes may precede.
pub(super) fn json(out: &str) -> Option<serde_json::Value> {
    serde_json::from_str(out.get(out.find('{')?..)?).ok()
}

/// Returns a positive figure of a program's JSON, or the error that shows its first line.
pub(super) fn figure(name: &str, out: &str, member: &str) -> Result<f64, BenchError> {
    let value = json(out).and_then(|object| object.pointer(member)?.as_f64());
    value.filter(|figure| figure.is_finite() && *figure > 0.0).ok_or_else(|| BenchError::Client {
        client: name.to_owned(),
        reason: format!("no {member} in {:?}", out.lines().next().unwrap_or_default()),
    })
}

/// Returns the folder of this program, which is on a disk where programs are built, or else that of
/// temporary files.
pub(super) fn on_disk() -> PathBuf {
    folder_of_this().filter(|folder| is_writable(folder)).unwrap_or_else(std::env::temp_dir)
}

/// Returns a folder in memory where there is one.
pub(super) fn in_memory() -> PathBuf {
    let shared = PathBuf::from("/dev/shm");
    if is_writable(&shared) { shared } else { std::env::temp_dir() }
}

fn is_writable(folder: &Path) -> bool {
    rustix::fs::access(folder, rustix::fs::Access::WRITE_OK).is_ok()
}

/// Data in a file that is removed when this is dropped. It has a name, because nbdkit resolves the
/// links of `/proc/pid/fd` and opens the file again for each client.
#[derive(Debug)]
pub(super) struct Data {
    path: PathBuf,
    bytes: usize,
}

impl Data {
    /// Creates `bytes` bytes of data that cannot be compressed, on the disk if `folder` is on one.
    pub(super) fn create(folder: &Path, bytes: usize) -> Result<Self, BenchError> {
        let path = unique(folder, "data");
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
        file.sync_all().map_err(BenchError::Scratch)?;
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

/// Returns a path that no other run has.
pub(super) fn unique(folder: &Path, extension: &str) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    folder.join(format!("pinfold-bench-{}-{number}.{extension}", std::process::id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_a_file_for_other_processes_and_not_compressible() {
        let data = Data::create(&in_memory(), 2 << 20).unwrap();
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
    fn a_program_that_fails_is_reported_with_its_last_line() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo first >&2; echo last >&2; exit 3"]);
        let error = run(&mut shell).unwrap_err().to_string();
        assert!(error.contains("sh failed: exit status: 3: last"), "{error}");
    }

    #[test]
    fn a_figure_follows_the_notes_and_is_positive() {
        let out = "a note\n{\"read\":{\"iops\":5.5,\"none\":0}}";
        assert!((figure("x", out, "/read/iops").unwrap() - 5.5).abs() < 1e-9);
        for member in ["/read/none", "/write/iops"] {
            assert!(figure("x", out, member).unwrap_err().to_string().contains(member));
        }
    }

    #[test]
    fn the_processor_time_of_a_program_is_its_own() {
        let (_, user, system) = run(Command::new("sh").args(["-c", "sleep 0.3"])).unwrap();
        assert!(user + system < Duration::from_millis(300), "{user:?} {system:?}");
        let busy = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done";
        let (_, user, _) = run(Command::new("sh").args(["-c", busy])).unwrap();
        assert!(user > Duration::ZERO, "{user:?}");
    }
}
