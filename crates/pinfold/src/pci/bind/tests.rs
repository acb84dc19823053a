//! Binding in a tree of files that behaves as the kernel does; each write can be made to fail.

use super::*;
use std::cell::Cell;
use std::os::unix::fs::symlink;

mod disks;

/// A tree of files that behaves as the kernel does, for one device; a write can be made to fail.
struct Kernel {
    root: tempfile::TempDir,
    /// The write that fails, counted from 0.
    fails: Cell<Option<usize>>,
    writes: Cell<usize>,
    /// The driver that takes the device where nothing is forced.
    usual: &'static str,
    /// Drivers that refuse it.
    refuses: &'static str,
}

const BDF: &str = "0000:01:00.0";

impl Kernel {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path();
        for folder in [
            "bus/pci/drivers/nvme",
            "bus/pci/drivers/vfio-pci",
            "class/block",
            "kernel/iommu_groups/7/devices",
        ] {
            std::fs::create_dir_all(sys.join(folder)).unwrap();
        }
        let device = sys.join("bus/pci/devices").join(BDF);
        std::fs::create_dir_all(&device).unwrap();
        std::fs::write(device.join("driver_override"), "(null)\n").unwrap();
        symlink(sys.join("kernel/iommu_groups/7"), device.join("iommu_group")).unwrap();
        symlink(&device, sys.join("kernel/iommu_groups/7/devices").join(BDF)).unwrap();
        let kernel =
            Self { root, fails: Cell::new(None), writes: Cell::new(0), usual: "nvme", refuses: "" };
        kernel.probe();
        kernel
    }

    fn device(&self) -> PathBuf {
        self.root.path().join("bus/pci/devices").join(BDF)
    }

    fn driver(&self) -> Option<String> {
        lookup::link_name(&self.device().join("driver"))
    }

    fn probe(&self) {
        let forced = std::fs::read_to_string(self.device().join("driver_override")).unwrap();
        let driver = if forced.trim() == "(null)" { self.usual } else { forced.trim() };
        if self.driver().is_none() && driver != self.refuses {
            symlink(
                self.root.path().join("bus/pci/drivers").join(driver),
                self.device().join("driver"),
            )
            .unwrap();
        }
    }

    /// Returns all that a bind can change.
    fn state(&self) -> (Option<String>, String, bool) {
        let forced = std::fs::read_to_string(self.device().join("driver_override")).unwrap();
        (self.driver(), forced, self.root.path().join("records").join(BDF).exists())
    }

    fn binder(&self) -> Binder<&Self> {
        let sys = self.root.path().to_owned();
        Binder {
            roots: Roots {
                proc: sys.join("proc"),
                dev: sys.join("dev"),
                modules: sys.join("modules"),
                sys,
            },
            records: self.root.path().join("records"),
            sysfs: self,
        }
    }
}

impl SysfsWrite for &Kernel {
    fn write(&self, path: &Path, text: &str) -> Result<(), Errno> {
        let number = self.writes.replace(self.writes.get() + 1);
        if self.fails.get() == Some(number) {
            return Err(Errno::new(libc::EIO));
        }
        match path.file_name().unwrap().to_str().unwrap() {
            "driver_override" => {
                let forced = if text.trim().is_empty() { "(null)\n" } else { text };
                std::fs::write(path, forced).unwrap();
            }
            "unbind" => std::fs::remove_file(self.device().join("driver")).unwrap(),
            "drivers_probe" => self.probe(),
            other => panic!("{other}"),
        }
        Ok(())
    }
}

fn bdf() -> Bdf {
    BDF.parse().unwrap()
}

#[test]
fn disks_that_cannot_be_listed_are_not_unused() {
    let kernel = Kernel::new();
    let before = kernel.state();
    for class in ["class/block", "class/net"] {
        let folder = kernel.root.path().join(class);
        let _ = std::fs::remove_dir(&folder);
        std::fs::write(&folder, "").unwrap();
        let refused = kernel.binder().bind(bdf(), false).unwrap_err();
        assert!(matches!(refused, BindError::InUse { .. }), "{refused}");
        let words = refused.to_string();
        assert!(words.contains(&format!("cannot check whether {}", folder.display())), "{words}");
        assert_eq!(kernel.state(), before, "nothing is changed");
        std::fs::remove_file(&folder).unwrap();
    }
    kernel.binder().bind(bdf(), false).unwrap();
}

#[test]
fn unbind_restores_the_previous_driver() {
    let kernel = Kernel::new();
    let before = kernel.state();
    let change = kernel.binder().bind(bdf(), false).unwrap();
    assert_eq!((change.from.as_deref(), change.to.as_deref()), (Some("nvme"), Some(VFIO_PCI)));
    assert_eq!((change.group, change.others), (Some(7), vec![]));
    let bound = kernel.state();
    kernel.binder().bind(bdf(), false).unwrap();
    assert_eq!(kernel.state(), bound, "the second time nothing is changed, nor what was recorded");
    let change = kernel.binder().unbind(bdf()).unwrap();
    assert_eq!((change.to.as_deref(), change.others), (Some("nvme"), vec![]));
    assert_eq!(kernel.state(), before);
    let again = kernel.binder().unbind(bdf());
    assert_eq!(again, Err(BindError::NotBound { bdf: bdf(), driver: Some("nvme".into()) }));
}

#[test]
fn unbind_restores_a_previous_override() {
    let kernel = Kernel::new();
    std::fs::write(kernel.device().join("driver_override"), "nvme\n").unwrap();
    let before = kernel.state();
    kernel.binder().bind(bdf(), false).unwrap();
    kernel.binder().unbind(bdf()).unwrap();
    assert_eq!(kernel.state(), before);
}

#[test]
fn a_device_without_a_driver_is_bound_and_unbound() {
    let mut kernel = Kernel::new();
    kernel.refuses = "nvme";
    std::fs::remove_file(kernel.device().join("driver")).unwrap();
    let before = kernel.state();
    kernel.binder().bind(bdf(), false).unwrap();
    assert_eq!(kernel.driver().as_deref(), Some(VFIO_PCI));
    kernel.binder().unbind(bdf()).unwrap();
    assert_eq!(kernel.state(), before);
}

#[test]
fn a_failed_write_leaves_the_state_as_before() {
    for unbind in [false, true] {
        for number in 0.. {
            let kernel = Kernel::new();
            if unbind {
                kernel.binder().bind(bdf(), false).unwrap();
            }
            let before = kernel.state();
            kernel.writes.set(0);
            kernel.fails.set(Some(number));
            let done = if unbind {
                kernel.binder().unbind(bdf())
            } else {
                kernel.binder().bind(bdf(), false)
            };
            if done.is_ok() {
                assert_eq!(number, 3, "a write for each of: override, unbind, probe");
                break;
            }
            assert!(
                matches!(done, Err(BindError::Write { rollback: Rollback::Complete, .. })),
                "{number}: {done:?}"
            );
            assert_eq!(kernel.state(), before, "write {number}");
        }
    }
}

#[test]
fn a_device_without_iommu_is_bound_only_if_the_kernel_allows() {
    let kernel = Kernel::new();
    std::fs::remove_file(kernel.device().join("iommu_group")).unwrap();
    assert_eq!(kernel.binder().bind(bdf(), false), Err(BindError::NoIommu(bdf())));
    assert_eq!(kernel.writes.get(), 0);
    let parameters = kernel.root.path().join("module/vfio/parameters");
    std::fs::create_dir_all(&parameters).unwrap();
    std::fs::write(parameters.join("enable_unsafe_noiommu_mode"), "Y\n").unwrap();
    assert_eq!(kernel.binder().bind(bdf(), false).unwrap().group, None);
}

#[test]
fn a_driver_that_refuses_the_device_is_an_error() {
    let mut kernel = Kernel::new();
    kernel.refuses = VFIO_PCI;
    let before = kernel.state();
    let refused = kernel.binder().bind(bdf(), false);
    let rollback = Rollback::Complete;
    assert_eq!(
        refused,
        Err(BindError::DriverRefused { bdf: bdf(), wanted: VFIO_PCI.into(), rollback })
    );
    assert_eq!(kernel.state(), before);
}

#[test]
fn an_incomplete_rollback_names_the_next_command() {
    let words = Rollback::Incomplete(bdf()).to_string();
    assert!(words.contains("`echo 0000:01:00.0 | sudo tee /sys/bus/pci/drivers_probe`"), "{words}");
}

#[test]
fn a_device_with_a_mounted_file_system_is_in_use() {
    let kernel = Kernel::new();
    let sys = kernel.root.path();
    // One namespace below the controller, and a partition of one below its subsystem.
    let own = kernel.device().join("nvme/nvme0/nvme0n1");
    let shared = sys.join("devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n2/nvme0n2p1");
    for (folder, number) in [(&own, "259:0"), (&shared, "259:1")] {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join("dev"), number).unwrap();
        symlink(folder, sys.join("class/block").join(folder.file_name().unwrap())).unwrap();
    }
    symlink(
        kernel.device().join("nvme/nvme0"),
        sys.join("devices/virtual/nvme-subsystem/nvme-subsys0/nvme0"),
    )
    .unwrap();
    std::fs::create_dir_all(own.join("holders/dm-0")).unwrap();
    std::fs::create_dir_all(sys.join("proc/self")).unwrap();
    std::fs::write(
        sys.join("proc/self/mountinfo"),
        "36 35 259:1 / /home rw - ext4 /dev/nvme0n2p1 rw\n",
    )
    .unwrap();
    std::fs::write(sys.join("proc/swaps"), "Filename Type Size\n/dev/nvme0n1 partition 1 0 -2\n")
        .unwrap();
    let before = kernel.state();
    let Err(BindError::InUse { uses, .. }) = kernel.binder().bind(bdf(), false) else {
        panic!("it is in use")
    };
    let words: Vec<String> = uses.iter().map(ToString::to_string).collect();
    assert_eq!(
        words,
        ["nvme0n1 is part of dm-0", "nvme0n1 is swap space", "nvme0n2p1 is mounted on /home"]
    );
    assert_eq!(kernel.state(), before);
    kernel.binder().bind(bdf(), true).unwrap();
    assert_eq!(kernel.driver().as_deref(), Some(VFIO_PCI));
}

#[test]
fn a_change_prints_as_one_line_and_a_warning() {
    let mut change = DriverChange {
        bdf: bdf(),
        from: Some("nvme".into()),
        to: Some("vfio-pci".into()),
        group: Some(7),
        others: vec![],
    };
    assert_eq!(change.to_string(), "0000:01:00.0: nvme -> vfio-pci, group 7");
    change.from = change.to.clone();
    change.others = vec![GroupMember { address: "0000:01:00.1".into(), driver: "ahci".into() }];
    let text = change.to_string();
    assert!(text.starts_with("0000:01:00.0: vfio-pci has it already, group 7\n"), "{text}");
    assert!(text.contains("0000:01:00.1 (ahci)"), "{text}");
    change.to = None;
    change.group = None;
    assert!(
        change.to_string().starts_with("0000:01:00.0: vfio-pci -> no driver, in no IOMMU group")
    );
}
