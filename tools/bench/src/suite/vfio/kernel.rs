//! Runs fio on the kernel's NVMe driver.

use pinfold::pci::Bdf;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The time limit for the kernel's creation of a controller's disk.
const DISK_TIMEOUT: Duration = Duration::from_secs(30);
/// fio's options for more I/Os per second: batches, registered memory and file, no map of the
/// blocks it has read.
pub(crate) const BATCHED: &[&str] = &[
    "--iodepth_batch_submit=32",
    "--iodepth_batch_complete_max=64",
    "--fixedbufs",
    "--registerfiles",
    "--norandommap",
];

/// Why the kernel's driver was not measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KernelError {
    /// The driver created no disk.
    #[error("the kernel's driver created no disk for {0}: see dmesg")]
    NoDisk(Bdf),
    /// fio did not start.
    #[error("{} did not start: {error}", path.display())]
    Start {
        /// The program.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// fio failed.
    #[error("{} failed ({status}): {line}", path.display())]
    Failed {
        /// The program.
        path: PathBuf,
        /// Its exit status.
        status: std::process::ExitStatus,
        /// The last line of its output.
        line: String,
    },
    /// fio's output was not understood.
    #[error("{} printed no IOPS: {line:?}", path.display())]
    Answer {
        /// The program.
        path: PathBuf,
        /// The first line of its output.
        line: String,
    },
}

/// Returns whether the device is an NVMe controller.
pub(crate) fn is_nvme(bdf: Bdf) -> bool {
    let class = std::fs::read_to_string(device(bdf).join("class"));
    class.is_ok_and(|class| class.trim() == "0x010802")
}

/// Returns whether the kernel's driver is loaded.
pub(crate) fn has_driver() -> bool {
    Path::new("/sys/bus/pci/drivers/nvme").is_dir()
}

fn device(bdf: Bdf) -> PathBuf {
    Path::new("/sys/bus/pci/devices").join(bdf.to_string())
}

/// A namespace as the kernel's disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Disk {
    /// The namespace.
    pub(crate) nsid: u32,
    /// The block device.
    pub(crate) node: PathBuf,
}

/// Returns the first namespace, once it exists.
pub(crate) fn disk(bdf: Bdf) -> Result<Disk, KernelError> {
    let until = Instant::now() + DISK_TIMEOUT;
    loop {
        match first(&device(bdf).join("nvme")) {
            Some(disk) if disk.node.exists() => return Ok(disk),
            _ if Instant::now() >= until => return Err(KernelError::NoDisk(bdf)),
            _ => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Returns the lowest namespace of the controllers in this folder.
fn first(folder: &Path) -> Option<Disk> {
    let below = |path: PathBuf| std::fs::read_dir(path).into_iter().flatten().flatten();
    let namespaces = below(folder.to_owned()).flat_map(|controller| below(controller.path()));
    let disk = |entry: std::fs::DirEntry| {
        let nsid = std::fs::read_to_string(entry.path().join("nsid")).ok()?.trim().parse().ok()?;
        let name = entry.file_name().into_string().ok()?;
        Some(Disk { nsid, node: Path::new("/dev").join(node(&name)) })
    };
    namespaces.filter_map(disk).min_by_key(|disk| disk.nsid)
}

/// Returns the node of a namespace: with multipath, `nvme0c1n2` is a path to `nvme0n2`.
fn node(name: &str) -> String {
    match name.strip_prefix("nvme").and_then(|rest| rest.split_once('c')) {
        Some((controller, path)) => {
            let namespace = path.trim_start_matches(|digit: char| digit.is_ascii_digit());
            format!("nvme{controller}{namespace}")
        }
        None => name.to_owned(),
    }
}

/// The program fio.
#[derive(Debug)]
pub(crate) struct Fio(PathBuf);

impl Fio {
    /// Finds it.
    pub(crate) fn find() -> Option<Self> {
        crate::suite::find_program("fio").map(Self)
    }

    /// Returns the IOPS of random reads of `block` bytes on `disk`, `depth` in flight.
    pub(crate) fn reads(
        &self,
        disk: &Path,
        (block, depth): (u64, u32),
        runtime: Duration,
        options: &[&str],
    ) -> Result<f64, KernelError> {
        let mut filename = OsString::from("--filename=");
        filename.push(disk);
        let mut command = Command::new(&self.0);
        command
            .args(["--name=kernel", "--readonly", "--rw=randread", "--ioengine=io_uring"])
            .arg("--direct=1")
            .arg(filename)
            .args([format!("--bs={block}"), format!("--iodepth={depth}")])
            .args([format!("--runtime={}", runtime.as_secs()), "--time_based".to_owned()])
            .arg("--output-format=json")
            .args(options)
            .stdin(Stdio::null());
        rate_of(&self.0, &mut command, "/jobs/0/read/iops")
    }
}

/// Runs a client and returns the IOPS in its JSON.
pub(super) fn rate_of(
    path: &Path,
    command: &mut Command,
    member: &str,
) -> Result<f64, KernelError> {
    let path = || path.to_owned();
    let ran = command.output().map_err(|error| KernelError::Start { path: path(), error })?;
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    if !ran.status.success() {
        let line = err.lines().chain(out.lines()).last().unwrap_or_default().to_owned();
        return Err(KernelError::Failed { path: path(), status: ran.status, line });
    }
    rate(&out, member).ok_or_else(|| KernelError::Answer {
        path: path(),
        line: out.lines().next().unwrap_or_default().to_owned(),
    })
}

/// Returns a rate in a client's JSON, which notes may precede.
fn rate(out: &str, member: &str) -> Option<f64> {
    let object: serde_json::Value = serde_json::from_str(out.get(out.find('{')?..)?).ok()?;
    object.pointer(member)?.as_f64().filter(|rate| rate.is_finite() && *rate > 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_found_after_fios_notes() {
        let out = "note: something\n{\"fio version\": \"fio-3.33\", \"jobs\": [{\"read\": {\"iops\": 12345.678, \"x\": {}}}]}\n";
        assert_eq!(rate(out, "/jobs/0/read/iops"), Some(12345.678));
        for nothing in
            ["", "fio: no", "{}", "{\"jobs\":[]}", "{\"jobs\":[{\"read\":{\"iops\":0.0}}]}"]
        {
            assert_eq!(rate(nothing, "/jobs/0/read/iops"), None, "{nothing}");
        }
    }

    #[test]
    fn the_lowest_namespace_is_first_and_its_node_is_not_a_path() {
        let folder = tempfile::tempdir().unwrap();
        for (name, nsid) in [("nvme2n10", Some("10\n")), ("nvme2n3", Some("3\n")), ("power", None)]
        {
            let namespace = folder.path().join("nvme2").join(name);
            std::fs::create_dir_all(&namespace).unwrap();
            if let Some(nsid) = nsid {
                std::fs::write(namespace.join("nsid"), nsid).unwrap();
            }
        }
        assert_eq!(first(folder.path()), Some(Disk { nsid: 3, node: "/dev/nvme2n3".into() }));
        assert_eq!(first(&folder.path().join("no")), None);
        for (name, expected) in
            [("nvme0n1", "nvme0n1"), ("nvme0c12n3", "nvme0n3"), ("nvme10c0n1", "nvme10n1")]
        {
            assert_eq!(node(name), expected);
        }
    }

    #[test]
    fn a_failure_of_fio_is_reported_with_its_last_line() {
        let fio = |script: &str| {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("fio");
            std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755))
                .unwrap();
            let ran = Fio(path).reads(
                Path::new("/dev/null"),
                (4096, 64),
                Duration::from_secs(1),
                &["--x"],
            );
            ran.map_err(|error| error.to_string())
        };
        let failed = fio("echo one >&2; echo the last >&2; exit 3").unwrap_err();
        assert!(failed.contains("exit status: 3): the last"), "{failed}");
        let silent = fio("echo what").unwrap_err();
        assert!(silent.contains("\"what\""), "{silent}");
        let right =
            "case \"$*\" in *--readonly*--filename=/dev/null*--bs=4096*--x) ;; *) exit 9 ;; esac
            echo '{\"jobs\":[{\"read\":{\"iops\":7.5}}]}'";
        assert_eq!(fio(right), Ok(7.5));
    }
}
