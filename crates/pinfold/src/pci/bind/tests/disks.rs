//! Disks of this machine behind a device of the fake kernel: what uses them is found by asking for
//! them exclusively.

use super::*;
use crate::pci::claim::InUse;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A loop device on a file, gone with this. One at a time: between its start and its own program, a
/// process that another test starts has the descriptors of this one, among them that of a disk that
/// is claimed.
struct Disk {
    folder: tempfile::TempDir,
    node: String,
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

fn ran(command: &mut Command) -> Option<String> {
    let output = command.stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap().trim().to_owned())
}

fn skipped(what: &str) {
    use std::io::Write;
    // Not by `eprintln`, which the test harness keeps to itself.
    writeln!(std::io::stderr(), "skipped: {what}").unwrap();
}

impl Disk {
    fn new() -> Option<Self> {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("disk");
        std::fs::File::create(&file).unwrap().set_len(256 << 20).unwrap();
        let node = ran(Command::new("losetup").args(["--find", "--show", "--partscan"]).arg(&file));
        let disk = node.map(|node| Self { folder, node, _alone: alone });
        disk.or_else(|| {
            skipped("only root can make a loop device");
            None
        })
    }

    fn name(&self) -> String {
        self.node.trim_start_matches("/dev/").to_owned()
    }

    fn run(&self, command: &str, args: &[&str]) -> bool {
        ran(Command::new(command).args(args).arg(&self.node)).is_some()
    }

    /// Returns a device of the fake kernel with this disk, or with this and its first partition.
    fn kernel(&self, parts: bool) -> Kernel {
        let kernel = Kernel::new();
        let folder = kernel.device().join(self.name());
        let mut disks = vec![(self.name(), folder.clone())];
        if parts {
            disks.push((format!("{}p1", self.name()), folder.join(format!("{}p1", self.name()))));
        }
        for (name, folder) in disks {
            std::fs::create_dir_all(&folder).unwrap();
            let number = std::fs::read(format!("/sys/class/block/{name}/dev")).unwrap();
            std::fs::write(folder.join("dev"), number).unwrap();
            symlink(&folder, kernel.root.path().join("class/block").join(name)).unwrap();
        }
        kernel
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.run("losetup", &["--detach"]);
    }
}

/// Binds with the nodes and processes of this machine. It is refused, and nothing is changed: why.
fn refused(kernel: &Kernel) -> String {
    let before = kernel.state();
    let refused = kernel.of_this_machine().bind(bdf(), false).unwrap_err();
    assert!(matches!(refused, BindError::InUse { .. }), "{refused}");
    assert_eq!(kernel.state(), before);
    refused.to_string()
}

impl Kernel {
    fn of_this_machine(&self) -> Binder<&Self> {
        let mut binder = self.binder();
        binder.roots.dev = "/dev".into();
        binder.roots.proc = "/proc".into();
        binder
    }
}

/// The file system is mounted while this is there.
struct Mounted(PathBuf);

impl Mounted {
    fn new(disk: &Disk, node: &str) -> Option<Self> {
        let at = disk.folder.path().join("mnt");
        std::fs::create_dir_all(&at).unwrap();
        ran(Command::new("mount").arg(node).arg(&at)).map(|_| Self(at))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        assert!(ran(Command::new("umount").arg(&self.0)).is_some());
    }
}

#[test]
fn a_mounted_disk_is_in_use_whatever_its_file_system() {
    for (make, args) in [("mkfs.btrfs", &["-q", "-f"][..]), ("mkfs.ext4", &["-q", "-F"])] {
        let Some(disk) = Disk::new() else { return };
        let kernel = disk.kernel(false);
        let made = disk.run(make, args);
        let Some(mounted) = made.then(|| Mounted::new(&disk, &disk.node)).flatten() else {
            skipped(&format!("no {make}, or the kernel does not mount it"));
            continue;
        };
        assert!(refused(&kernel).contains("is mounted on /"), "{make}");
        // As from another mount namespace: not in mountinfo.
        let mut binder = kernel.of_this_machine();
        binder.roots.proc = kernel.root.path().join("proc");
        let hidden = binder.bind(bdf(), false).unwrap_err().to_string();
        assert!(hidden.contains(&format!("{} is claimed exclusively", disk.name())), "{hidden}");
        drop(mounted);
        kernel.of_this_machine().bind(bdf(), false).unwrap();
    }
}

#[test]
fn a_partition_that_is_held_is_named() {
    let Some(disk) = Disk::new() else { return };
    let part = format!("{}p1", disk.node);
    let table =
        format!("echo ,,L | sfdisk -q {0} && partx -u {0}; mkfs.ext4 -q -F {0}p1", disk.node);
    let Some(mounted) =
        ran(Command::new("sh").args(["-c", &table])).and_then(|_| Mounted::new(&disk, &part))
    else {
        return skipped("no partitions on loop devices");
    };
    let kernel = disk.kernel(true);
    let mut binder = kernel.of_this_machine();
    binder.roots.proc = kernel.root.path().join("proc");
    let Err(BindError::InUse { uses, .. }) = binder.bind(bdf(), false) else {
        panic!("it is in use")
    };
    assert_eq!(uses, [InUse::Claimed { disk: format!("{}p1", disk.name()), by: vec![] }]);
    drop(mounted);
    binder.bind(bdf(), false).unwrap();
}

/// Returns a program with `node` as its standard input.
fn opened_by_a_program(node: &str) -> Child {
    let input = std::fs::File::open(node).unwrap();
    Command::new("sleep").arg("100").stdin(input).spawn().unwrap()
}

#[test]
fn programs_that_have_a_disk_open_are_named() {
    let Some(disk) = Disk::new() else { return };
    let mut program = opened_by_a_program(&disk.node);
    let words = refused(&disk.kernel(false));
    program.kill().unwrap();
    program.wait().unwrap();
    assert!(
        words.contains(&format!("{} is open in sleep (pid {})", disk.name(), program.id())),
        "{words}"
    );
    let exclusive = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::EXCL;
    let held = rustix::fs::open(&disk.node, exclusive, rustix::fs::Mode::empty()).unwrap();
    assert!(refused(&disk.kernel(false)).contains("is claimed exclusively"));
    drop(held);
    disk.kernel(false).of_this_machine().bind(bdf(), false).unwrap();
}

#[test]
fn a_disk_is_claimed_exactly_until_its_driver_releases_it() {
    let Some(disk) = Disk::new() else { return };
    let exclusive = || {
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::EXCL;
        rustix::fs::open(&disk.node, flags, rustix::fs::Mode::empty()).is_ok()
    };
    let kernel = disk.kernel(false);
    let seen = std::cell::RefCell::new(Vec::new());
    struct Watched<'a>(&'a Kernel, &'a dyn Fn(&Path));
    impl SysfsWrite for Watched<'_> {
        fn write(&self, path: &Path, text: &str) -> Result<(), Errno> {
            (self.1)(path);
            self.0.write(path, text)
        }
    }
    let watch = |path: &Path| {
        seen.borrow_mut()
            .push((path.file_name().unwrap().to_str().unwrap().to_owned(), exclusive()));
    };
    let Binder { roots, records, .. } = kernel.of_this_machine();
    let sysfs = Watched(&kernel, &watch);
    Binder { roots, records, sysfs }.bind(bdf(), false).unwrap();
    let expected = [("driver_override", false), ("unbind", false), ("drivers_probe", true)];
    assert_eq!(*seen.borrow(), expected.map(|(name, free)| (name.to_owned(), free)));
}

#[test]
fn a_disk_that_cannot_be_checked_is_bound_by_force_only() {
    let kernel = Kernel::new();
    let folder = kernel.device().join("nvme/nvme0/nvme0n1");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("dev"), "259:0").unwrap();
    symlink(&folder, kernel.root.path().join("class/block/nvme0n1")).unwrap();
    let words = kernel.binder().bind(bdf(), false).unwrap_err().to_string();
    assert!(words.contains("cannot check whether nvme0n1 is in use: No such file"), "{words}");
    // A file of that name that is not a node of this device.
    std::fs::create_dir_all(kernel.root.path().join("dev")).unwrap();
    symlink("/dev/null", kernel.root.path().join("dev/nvme0n1")).unwrap();
    let words = kernel.binder().bind(bdf(), false).unwrap_err().to_string();
    assert!(words.contains("cannot check whether nvme0n1 is in use: No such device"), "{words}");
    kernel.binder().bind(bdf(), true).unwrap();
}
