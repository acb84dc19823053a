//! The probe on machines made of files, and on this one.

use super::*;
use crate::memory::{Source, SourceUnavailable, UnavailableReason};
use crate::sys::Errno;
use crate::sys::limits::MemlockLimit;
use pinfold_core::addr::PageSize;
use proptest::prelude::*;
use std::path::Path;

fn root() -> Privileges {
    Privileges { user: 0, initial_user_namespace: true, seccomp: false }
}

/// Returns a source that the kernel refuses for this reason.
fn refused(
    source: Source,
    reason: UnavailableReason,
    fix: Option<&str>,
) -> Result<(), SourceUnavailable> {
    Err(SourceUnavailable { source, reason, fix: fix.map(str::to_owned) })
}

fn locked_down() -> Live {
    let none = |page| UnavailableReason::NoSuchPages { page };
    Live {
        hugetlb_2m: refused(Source::Hugetlb2M, none(PageSize::Size2M), None),
        hugetlb_1g: refused(Source::Hugetlb1G, none(PageSize::Size1G), None),
        transparent: refused(Source::Thp, none(PageSize::Size2M), None),
        io_uring: Err(RingRefusal {
            errno: Errno::new(libc::EPERM),
            cause: RingRefusalCause::Sysctl(2),
        }),
        pagemap: Answer::No(Errno::new(libc::EPERM)),
        privileges: root(),
        open_files: OpenFiles { soft: Some(1024), hard: Some(4096), open: Some(3) },
        read_only: Vec::new(),
        grub: true,
        map_limits: Vec::new(),
        thread_limits: Vec::new(),
    }
}

fn open() -> Live {
    Live {
        hugetlb_2m: Ok(()),
        hugetlb_1g: Ok(()),
        transparent: Ok(()),
        io_uring: Ok(IoUring {
            fixed: true,
            fsync: true,
            sparse_buffers: Answer::Yes,
            clone_buffers: Answer::No(Errno::new(libc::EINVAL)),
        }),
        pagemap: Answer::Yes,
        ..locked_down()
    }
}

const SMALL: MemlockLimit =
    MemlockLimit { soft: Some(8 << 20), hard: Some(8 << 20), used: Some(0), lifted: false };
const NO_LIMIT: MemlockLimit = MemlockLimit { soft: None, hard: None, used: Some(0), lifted: true };

/// Files of a machine that has everything: (root, path, content).
const EVERYTHING: &[(&str, &str, &[u8])] = &[
    ("proc", "sys/kernel/osrelease", b"6.12.0-1-amd64\n"),
    ("proc", "sys/kernel/io_uring_disabled", b"0\n"),
    ("proc", "meminfo", b"MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n"),
    ("sys", "kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", b"512\n"),
    ("sys", "kernel/mm/hugepages/hugepages-2048kB/free_hugepages", b"500\n"),
    ("sys", "kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", b"100\n"),
    ("sys", "kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", b"2\n"),
    ("sys", "kernel/mm/hugepages/hugepages-1048576kB/free_hugepages", b"0\n"),
    ("sys", "kernel/mm/transparent_hugepage/enabled", b"always [madvise] never\n"),
    ("sys", "devices/system/node/online", b"0-1\n"),
    (
        "sys",
        "devices/system/node/node0/meminfo",
        b"Node 0 MemTotal: 8388608 kB\nNode 0 MemFree: 1024 kB\n",
    ),
    ("sys", "devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", b"512\n"),
    ("sys", "devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages", b"500\n"),
    ("sys", "devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages", b"0\n"),
    ("sys", "devices/system/node/node1/hugepages/hugepages-2048kB/free_hugepages", b"0\n"),
    ("sys", "class/iommu/dmar0/intel-iommu/version", b"1:0\n"),
    ("sys", "kernel/iommu_groups/7/type", b"DMA-FQ\n"),
    ("sys", "kernel/iommu_groups/7/devices/0000:01:00.0/vendor", b"0x1b36\n"),
    ("sys", "kernel/iommu_groups/11/devices/0000:02:00.0/vendor", b"0x1b36\n"),
    ("sys", "module/vfio/parameters/enable_unsafe_noiommu_mode", b"N\n"),
    ("sys", "module/vfio_pci/version", b"0.2\n"),
    ("dev", "vfio/vfio", b""),
    ("dev", "vfio/7", b""),
    ("dev", "vfio/devices/vfio0", b""),
    ("dev", "iommu", b""),
];

fn machine(files: &[(&str, &str, &[u8])]) -> (tempfile::TempDir, Roots) {
    let top = tempfile::tempdir().unwrap();
    let [proc, sys, dev, modules] =
        ["proc", "sys", "dev", "modules"].map(|name| top.path().join(name));
    let installed = modules.join(crate::sys::release::release());
    std::fs::create_dir_all(&installed).unwrap();
    std::fs::write(installed.join("modules.dep"), "a/vfio-pci.ko:\nb/iommufd.ko.xz:\n").unwrap();
    let roots = Roots { proc, sys, dev, modules };
    for mounted in ["proc/self/ns", "sys/kernel/mm", "dev"] {
        std::fs::create_dir_all(top.path().join(mounted)).unwrap();
    }
    for (root, path, content) in files {
        let path = top.path().join(root).join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    (top, roots)
}

fn find<'f>(findings: &'f [Finding], what: &str) -> &'f Finding {
    findings
        .iter()
        .find(|finding| finding.what == what)
        .unwrap_or_else(|| panic!("nothing about {what}"))
}

#[test]
fn a_machine_with_nothing_lacks_everything_and_names_the_fixes() {
    let (_top, roots) = machine(&[]);
    let findings = Facts::gather(&roots, SMALL, locked_down()).findings();
    for what in
        ["hugepages 2 MiB", "transparent hugepages", "IOMMU groups", "VFIO", "iommufd", "io_uring"]
    {
        assert_eq!(find(&findings, what).state, State::Missing, "{what}");
    }
    assert_eq!(find(&findings, "VFIO").remedy.as_deref(), Some("sudo modprobe vfio-pci"));
    assert_eq!(find(&findings, "iommufd").remedy.as_deref(), Some("sudo modprobe iommufd"));
    let memlock = find(&findings, "MEMLOCK");
    assert_eq!(
        (
            memlock.state,
            memlock.detail.starts_with("soft 8 MiB, hard 8 MiB, 0 B used by this process")
        ),
        (State::Limited, true)
    );
    let command = SMALL.raise_for_user(1 << 30);
    assert_eq!(memlock.remedy, command.ok(), "beyond the hard limit");
}

#[test]
fn bound_devices_report_their_interface_and_reason() {
    use crate::backend::context::IommuInterface;
    let files = [
        EVERYTHING,
        &[
            ("sys", "bus/pci/devices/0000:01:00.0/vfio-dev/vfio0/dev", b"511:0\n".as_slice()),
            ("sys", "bus/pci/devices/0000:02:00.0/vendor", b"0x1b36\n"),
            ("sys", "module/vfio_iommu_type1/parameters/dma_entry_limit", b"65535\n"),
        ],
    ]
    .concat();
    let (_top, roots) = machine(&files);
    let link = roots.sys.join("bus/pci/devices/0000:01:00.0/driver");
    std::os::unix::fs::symlink("../../drivers/vfio-pci", link).unwrap();
    let facts = Facts::gather(&roots, NO_LIMIT, open());
    let ways: Vec<_> =
        facts.vfio.bound.iter().map(|bound| (bound.address.as_str(), bound.interface)).collect();
    assert_eq!(ways, [("0000:01:00.0", IommuInterface::Iommufd)], "the other one is not bound");
    // Without the device's own node it is type1, and without /dev/iommu too.
    for missing in ["vfio/devices/vfio0", "iommu"] {
        std::fs::remove_file(roots.dev.join(missing)).unwrap();
        let facts = Facts::gather(&roots, NO_LIMIT, open());
        let findings = facts.findings();
        let found = find(&findings, "0000:01:00.0");
        assert!(found.detail.starts_with("by type1, because there is no "), "{}", found.detail);
        assert!(
            found.detail.ends_with(&format!("{missing}; at most 65535 mappings")),
            "{}",
            found.detail
        );
    }
}

#[test]
fn a_machine_with_every_facility_is_good() {
    let (_top, roots) = machine(EVERYTHING);
    let link = roots.sys.join("kernel/iommu_groups/7/devices/0000:01:00.0/driver");
    std::os::unix::fs::symlink("../../../bus/pci/drivers/vfio-pci", link).unwrap();
    let facts = Facts::gather(&roots, NO_LIMIT, open());
    assert_eq!(facts.groups.iter().map(|group| group.number).collect::<Vec<_>>(), [7, 11]);
    assert_eq!(facts.groups[0].kind.as_deref(), Some("DMA-FQ"));
    assert_eq!(facts.groups[0].devices[0].driver.as_deref(), Some("vfio-pci"));
    assert_eq!(facts.groups[1].devices[0].driver, None);
    assert_eq!(facts.vfio.modules, ["vfio", "vfio_pci"]);
    assert_eq!(facts.nodes[0].free_bytes, Some(1 << 20));
    let findings = facts.findings();
    let bad: Vec<_> = findings.iter().filter(|finding| finding.state != State::Good).collect();
    assert!(bad.is_empty(), "{bad:?}");
    let all_used = Live {
        hugetlb_1g: refused(
            Source::Hugetlb1G,
            UnavailableReason::FewHugepages {
                page: PageSize::Size1G,
                needed: 1,
                free: 0,
                total: 2,
            },
            None,
        ),
        ..open()
    };
    let findings = Facts::gather(&roots, NO_LIMIT, all_used).findings();
    let bad: Vec<_> = findings.iter().filter(|finding| finding.state != State::Good).collect();
    assert_eq!((bad.len(), &*bad[0].what), (1, "hugepages 1 GiB"), "{bad:?}");
    assert_eq!(
        find(&findings, "hugepages 2 MiB").detail,
        "400 free of 512 reserved (node 0: 500 of 512, node 1: 0 of 0)"
    );
    assert_eq!(find(&findings, "IOMMU groups").detail, "2 groups with 2 devices, dmar0");
}

#[test]
fn each_disabled_facility_names_its_switch() {
    let (_top, roots) = machine(&[
        ("proc", "meminfo", b"MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n"),
        ("proc", "sys/kernel/osrelease", b"5.10.0\n"),
        ("proc", "sys/kernel/io_uring_disabled", b"2\n"),
        ("sys", "kernel/mm/transparent_hugepage/enabled", b"always madvise [never]\n"),
        ("sys", "kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", b"0\n"),
        ("sys", "kernel/mm/hugepages/hugepages-2048kB/free_hugepages", b"0\n"),
        ("sys", "firmware/acpi/tables/DMAR", b"DMAR"),
        ("sys", "module/vfio/parameters/enable_unsafe_noiommu_mode", b"Y\n"),
        ("dev", "vfio/vfio", b""),
        ("dev", "vfio/noiommu-0", b""),
    ]);
    let findings = Facts::gather(&roots, SMALL, locked_down()).findings();
    let remedy = |what: &str| find(&findings, what).remedy.clone().unwrap_or_default();
    assert_eq!(remedy("io_uring"), "sudo sysctl kernel.io_uring_disabled=0");
    assert_eq!(remedy("hugepages 2 MiB"), "sudo sysctl vm.nr_hugepages=512");
    assert!(remedy("transparent hugepages").contains("echo madvise"));
    assert!(remedy("IOMMU groups").contains("intel_iommu=on"));
    assert_eq!(remedy("iommufd"), "", "no command fixes a kernel that is too old");
    assert_eq!(find(&findings, "kernel").state, State::Limited);
    assert!(find(&findings, "VFIO").detail.contains("unprotected"));
}

#[test]
fn a_node_that_may_not_be_opened_is_limited_not_missing() {
    if rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: root may open everything");
        return;
    }
    use std::os::unix::fs::PermissionsExt;
    let (_top, roots) = machine(EVERYTHING);
    std::fs::set_permissions(roots.dev.join("iommu"), PermissionsExt::from_mode(0o000)).unwrap();
    let findings = Facts::gather(&roots, NO_LIMIT, open()).findings();
    assert_eq!(find(&findings, "iommufd").state, State::Limited);
    assert!(find(&findings, "iommufd").remedy.as_ref().unwrap().starts_with("sudo chown $USER "));
}

/// Returns the machine that has everything, with changes.
fn findings_with(change: impl Fn(&Roots), live: Live) -> Vec<Finding> {
    let (_top, roots) = machine(EVERYTHING);
    change(&roots);
    Facts::gather(&roots, SMALL, live).findings()
}

#[test]
fn unlistable_facilities_are_unknown_and_have_no_fix() {
    let hide = |roots: &Roots| {
        for folder in [
            roots.sys.join("kernel/mm/hugepages"),
            roots.sys.join("kernel/mm/transparent_hugepage"),
            roots.sys.join("kernel/iommu_groups"),
            roots.sys.join("devices/system/node"),
        ] {
            std::fs::remove_dir_all(&folder).unwrap();
            std::fs::write(&folder, "").unwrap();
        }
    };
    let unmounted = |roots: &Roots| std::fs::remove_dir_all(&roots.sys).unwrap();
    let refused_pages = || {
        let reason = UnavailableReason::Kernel { call: "mmap", errno: Errno::new(libc::ENOMEM) };
        Live { hugetlb_2m: refused(Source::Hugetlb2M, reason, None), ..open() }
    };
    for change in [&hide as &dyn Fn(&Roots), &unmounted] {
        let findings = findings_with(change, refused_pages());
        for what in ["hugepages 2 MiB", "IOMMU groups", "NUMA"] {
            let found = find(&findings, what);
            assert_eq!((found.state, &found.remedy), (State::Limited, &None), "{found}");
            assert!(
                !found.detail.contains("switch on") && !found.detail.contains("has no pages"),
                "{found}"
            );
        }
        // An attempt that succeeded decides, whatever can be read about it.
        assert_eq!(find(&findings, "transparent hugepages").state, State::Good);
        assert_eq!(find(&findings, "hugepages 1 GiB").state, State::Good);
    }
}

#[test]
fn a_fix_is_not_what_is_so_already() {
    let command_line = |text: &'static str| {
        move |roots: &Roots| {
            std::fs::remove_dir_all(roots.sys.join("kernel/iommu_groups")).unwrap();
            std::fs::create_dir_all(roots.sys.join("firmware/acpi/tables/DMAR")).unwrap();
            std::fs::write(roots.proc.join("cmdline"), text).unwrap();
        }
    };
    for (text, live, fix) in [
        ("quiet", open(), true),
        ("quiet", Live { grub: false, ..open() }, false),
        ("intel_iommu=on quiet", open(), false),
        ("intel_iommu=off", open(), false),
        ("iommu=off", open(), false),
    ] {
        let findings = findings_with(command_line(text), live);
        let found = find(&findings, "IOMMU groups");
        assert_eq!((found.state, found.remedy.is_some()), (State::Missing, fix), "{text}: {found}");
    }
    // Loaded, and no node: the machine's container has it.
    let no_node = |roots: &Roots| {
        std::fs::remove_dir_all(roots.dev.join("vfio")).unwrap();
        std::fs::remove_file(roots.dev.join("iommu")).unwrap();
    };
    let findings = findings_with(no_node, open());
    assert_eq!(find(&findings, "VFIO").remedy, None);
    assert!(find(&findings, "VFIO").detail.contains("--device"));
    assert_eq!(find(&findings, "iommufd").remedy.as_deref(), Some("sudo modprobe iommufd"));
}

#[test]
fn a_fix_that_cannot_work_here_says_where() {
    let none = |_: &Roots| {};
    let used = || Live { hugetlb_1g: locked_down().hugetlb_1g, ..open() };
    let remedy = |live| find(&findings_with(none, live), "hugepages 1 GiB").clone();
    assert!(remedy(used()).remedy.is_some());
    for (live, place) in [
        (
            Live { read_only: vec!["/sys"], ..used() },
            "on the host (/sys is read-only here): sudo sh -c",
        ),
        (
            Live { privileges: Privileges { initial_user_namespace: false, ..root() }, ..used() },
            "outside of this user namespace: sudo sh -c",
        ),
    ] {
        let found = remedy(live);
        assert!(found.remedy.is_none() && found.detail.contains(place), "{found}");
    }
}

/// Returns a change that gives the machine this much available memory, and a pool of 2 MiB pages.
fn memory(available_mib: u64, total: u64, free: u64) -> impl Fn(&Roots) {
    move |roots| {
        let meminfo = format!("MemTotal: 786432 kB\nMemAvailable: {} kB\n", available_mib * 1024);
        std::fs::write(roots.proc.join("meminfo"), meminfo).unwrap();
        let pool = roots.sys.join("kernel/mm/hugepages/hugepages-2048kB");
        std::fs::write(pool.join("nr_hugepages"), total.to_string()).unwrap();
        std::fs::write(pool.join("free_hugepages"), free.to_string()).unwrap();
        std::fs::write(pool.join("resv_hugepages"), "0").unwrap();
    }
}

#[test]
fn advice_leaves_memory_to_the_machine() {
    let few = || {
        let none = |page| UnavailableReason::FewHugepages { page, needed: 1, free: 0, total: 0 };
        Live {
            hugetlb_2m: refused(Source::Hugetlb2M, none(PageSize::Size2M), None),
            hugetlb_1g: refused(Source::Hugetlb1G, none(PageSize::Size1G), None),
            ..open()
        }
    };
    // Half of what is left beside 256 MiB, and at most 1 GiB.
    for (available, pages) in [(600, Some(86)), (270, Some(3)), (257, None), (100, None)] {
        let findings = findings_with(memory(available, 0, 0), few());
        let found = find(&findings, "hugepages 2 MiB");
        let fix = pages.map(|pages| format!("sudo sysctl vm.nr_hugepages={pages}"));
        assert_eq!((found.state, &found.remedy), (State::Missing, &fix), "{available}: {found}");
        assert_eq!(found.detail.contains("too little of the"), pages.is_none(), "{found}");
        // Its two pages are in use, and a third does not fit.
        let found = find(&findings, "hugepages 1 GiB");
        assert!(found.remedy.is_none() && found.detail.contains("too little of the"), "{found}");
    }
    // After too many hugepages were reserved, the remedy gives pages back.
    let findings = findings_with(memory(0, 300, 290), open());
    let found = find(&findings, "memory");
    assert_eq!(found.state, State::Limited);
    assert_eq!(found.remedy.as_deref(), Some("sudo sysctl vm.nr_hugepages=44"), "{found}");
    let findings = findings_with(memory(0, 300, 10), open());
    let found = find(&findings, "memory");
    assert_eq!(found.remedy.as_deref(), Some("sudo sysctl vm.nr_hugepages=290"), "{found}");
    let findings = findings_with(memory(0, 300, 0), open());
    assert_eq!(find(&findings, "memory").remedy, None, "all of them are in use");
    assert_eq!(find(&findings_with(memory(300, 300, 290), open()), "memory").state, State::Good);
}

#[test]
fn each_limit_of_what_is_mapped_has_a_line_and_its_fix() {
    let limit = |setting, left| MapLimit { setting, left, limit: 1 << 30 };
    let live = Live {
        map_limits: vec![
            limit(MapSetting::AddressSpace, 1 << 29),
            limit(MapSetting::Data, (256 << 20) - 1),
            limit(MapSetting::Commit, 0),
        ],
        ..open()
    };
    let findings = findings_with(|_| {}, live);
    assert_eq!(find(&findings, "address space").state, State::Good);
    let data = find(&findings, "data segment");
    assert_eq!(data.state, State::Limited);
    assert!(data.detail.contains("RLIMIT_DATA") && data.to_string().contains("data"), "{data}");
    let commit = find(&findings, "commit limit");
    let fix = commit.remedy.as_deref().unwrap_or_default();
    assert!(fix.starts_with("sudo sysctl vm.overcommit_kbytes="), "{commit}");
}

#[test]
fn a_device_that_is_bound_without_its_node_is_not_good() {
    let unbound = |roots: &Roots| {
        std::fs::remove_dir_all(roots.dev.join("vfio/devices")).unwrap();
        std::fs::remove_file(roots.dev.join("vfio/7")).unwrap();
    };
    let bound = |roots: &Roots| {
        unbound(roots);
        let device = roots.sys.join("bus/pci/devices/0000:01:00.0");
        std::fs::create_dir_all(&device).unwrap();
        std::os::unix::fs::symlink("../../drivers/vfio-pci", device.join("driver")).unwrap();
        std::os::unix::fs::symlink("../../../kernel/iommu_groups/7", device.join("iommu_group"))
            .unwrap();
    };
    let findings = findings_with(bound, open());
    let found = find(&findings, "0000:01:00.0");
    assert!(found.state == State::Missing && found.detail.contains("vfio/7 here"), "{found}");
    let found = find(&findings, "VFIO");
    assert!(found.remedy.is_none() && found.detail.starts_with("1 devices are bound"), "{found}");
    // None is bound: one can be, where there is an IOMMU.
    let findings = findings_with(unbound, open());
    assert_eq!(find(&findings, "VFIO").remedy.as_deref(), Some("sudo pinfold bind $BDF"));
    let off = |roots: &Roots| {
        unbound(roots);
        std::fs::remove_dir_all(roots.sys.join("kernel/iommu_groups")).unwrap();
    };
    let found = find(&findings_with(off, open()), "VFIO").clone();
    assert!(found.remedy.is_none() && found.detail.contains("without an IOMMU"), "{found}");
}

#[test]
fn this_machine_has_a_finding_for_each_facility() {
    let facts = Facts::here();
    let findings = facts.findings();
    for what in [
        "kernel",
        "memory",
        "hugepages 2 MiB",
        "hugepages 1 GiB",
        "transparent hugepages",
        "MEMLOCK",
        "open files",
        "threads",
        "NUMA",
        "IOMMU groups",
        "VFIO",
        "iommufd",
        "privileges",
        "io_uring",
        "pagemap",
    ] {
        let finding = find(&findings, what);
        assert!(!finding.detail.is_empty() && !finding.detail.contains('\n'), "{finding:?}");
        eprintln!("{:8} {what}: {} {:?}", finding.state.name(), finding.detail, finding.remedy);
    }
    let set = facts.live.map_limits.len();
    assert_eq!(findings.len(), 15 + set, "one line per facility, and per limit that is set");
    assert!(facts.memory.total > 0);
}

/// Removes a file, or replaces it by a directory, half of it, or garbage.
fn corrupt(path: &Path, content: &[u8], how: u8, garbage: &[u8]) {
    std::fs::remove_file(path).unwrap();
    match how % 4 {
        0 => {}
        1 => std::fs::create_dir(path).unwrap(),
        2 => std::fs::write(path, &content[..content.len() / 2]).unwrap(),
        _ => std::fs::write(path, garbage).unwrap(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn malformed_files_still_give_findings(
        hows in proptest::collection::vec(any::<u8>(), EVERYTHING.len()),
        garbage in proptest::collection::vec(any::<u8>(), 0..64),
    ) {
        let (top, roots) = machine(EVERYTHING);
        for ((root, path, content), how) in EVERYTHING.iter().zip(hows) {
                corrupt(&top.path().join(root).join(path), content, how, &garbage);
        }
        prop_assert_eq!(Facts::gather(&roots, SMALL, open()).findings().len(), 15);
    }
}
