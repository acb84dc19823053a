//! `nvme`, and real controllers as targets, as far as this can be tested without one.

use crate::common::{Folder, bytes, pinfold, words};

#[test]
fn a_controller_is_identified() {
    let report = pinfold(&["nvme", "soft:64M", "--json"]).json();
    assert_eq!(report["controller"]["model"], "Pinfold model controller");
    assert_eq!(report["controller"]["queues"], 16);
    let namespace = &report["namespaces"][0];
    assert_eq!((&namespace["nsid"], &namespace["bytes"]), (&1.into(), &(64u64 << 20).into()));
    assert_eq!((&namespace["block_bytes"], &namespace["usable"]), (&512.into(), &true.into()));
    assert_eq!(
        (&report["smart"]["temperature_kelvin"], &report["smart"]["critical_warning"]),
        (&300.into(), &0.into())
    );
    let text = pinfold(&["nvme", "soft:64M"]).ok();
    for part in [
        "controller soft:64M\n  model         Pinfold model controller, firmware",
        "version       NVMe 2.0.0",
        "transfers     1 MiB at most; 1 MiB are used",
        "queues        16 queues granted, of up to 1,024 entries",
        "  1                  64 MiB        131,072            512        131,072              0\n",
        "warnings      none",
        "temperature   300 K (27 °C)",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[test]
fn an_image_is_not_changed() {
    let folder = Folder::new();
    let file = folder.file("disk.img", &bytes(65_536));
    let report = pinfold(&["nvme", &format!("soft:{file}"), "--json"]).json();
    assert_eq!(report["namespaces"][0]["blocks"], 128);
    assert!(std::fs::read(&file).unwrap() == bytes(65_536));
    pinfold(&["nvme", &file]).failed(1, &["is not a controller", "vfio:BDF"]);
}

#[test]
fn a_missing_real_controller_is_reported() {
    for line in ["nvme ffff:ff:1f.7", "nvme vfio:ffff:ff:1f.7", "io vfio:ffff:ff:1f.7 --rw randread"] {
        pinfold(&words(line)).failed(1, &["ffff:ff:1f.7", "lspci"]);
    }
    let folder = Folder::new();
    let file = folder.file("a", b"a");
    pinfold(&["copy", "vfio:ffff:ff:1f.7", &folder.arg("b")]).failed(1, &["ffff:ff:1f.7"]);
    assert_eq!(folder.names(), ["a"]);
    for text in ["vfio:1", "vfio:01:00.0/0", "vfio:"] {
        pinfold(&["io", text]).failed(2, &[text]);
    }
    // Without --force, a controller that would be overwritten is not even opened.
    pinfold(&["copy", &file, "vfio:ffff:ff:1f.7"]).failed(1, &["holds data", "--force"]);
    pinfold(&["copy", &file, &folder.arg("b"), "--via", "vfio:ffff:ff:1f.7/2"]).failed(1, &["--force"]);
    pinfold(&words("io vfio:ffff:ff:1f.7 --rw randwrite")).failed(1, &["--force"]);
    pinfold(&words("io vfio:ffff:ff:1f.7 --rw randrw --verify")).failed(1, &["--force"]);
    assert_eq!(folder.names(), ["a"]);
}

#[test]
fn a_part_of_a_source_is_copied() {
    let folder = Folder::new();
    let file = folder.file("a", &bytes(100_000));
    let size = |size: &str, to: &str| pinfold(&["copy", &file, &folder.arg(to), "--size", size, "--verify"]);
    for (len, to) in [(0, "b"), (1, "c"), (4096, "d"), (99_999, "e"), (100_000, "f")] {
        size(&len.to_string(), to).ok();
        assert!(std::fs::read(folder.path(to)).unwrap() == bytes(100_000)[..len]);
    }
    size("100001", "g").failed(2, &["--size 100001", "only 100000"]);
    assert!(!folder.path("g").exists());
}
