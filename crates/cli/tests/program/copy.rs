//! Copies return the same bytes, for all sizes, protections, block sizes, depths, memories and routes.

use crate::common::{Folder, assert_same, bytes, pinfold, skipped, words};
use std::time::{Duration, Instant};

fn round_trip(folder: &Folder, source: &str, options: &str) -> serde_json::Value {
    let line = format!("copy {source} {} {options} --json", folder.arg("out"));
    let report = pinfold(&words(&line)).json();
    assert_same(source.as_ref(), &folder.path("out"));
    std::fs::remove_file(folder.path("out")).unwrap();
    report
}

const SIZES: [usize; 12] = [0, 1, 511, 512, 513, 4095, 4096, 4097, 65_537, 1_048_575, 1_048_577, 3_000_001];

#[test]
fn every_size_under_every_protection() {
    let folder = Folder::new();
    for size in SIZES {
        let source = folder.file("in", &bytes(size));
        for protect in ["static", "revoke", "strict"] {
            let options = format!("--via soft:8M --protect {protect} --bs 64k --iodepth 8");
            let report = round_trip(&folder, &source, &options);
            assert_eq!(report["bytes"], size);
            let maps = report["stack"]["domain"]["maps"].as_u64().unwrap();
            assert_eq!(maps, 2 * size.div_ceil(65_536) as u64, "{size} {protect}");
        }
        round_trip(&folder, &source, "--bs 64k");
    }
    assert_eq!(folder.names(), ["in"]);
}

#[test]
fn every_block_size_and_depth() {
    let folder = Folder::new();
    let small = folder.file("small", &bytes(300_001));
    let medium = folder.file("medium", &bytes(1_700_001));
    let large = folder.file("large", &bytes(17_000_001));
    for (bs, depth) in [("512", 1), ("512", 256), ("1536", 16), ("4k", 1), ("4k", 256)] {
        round_trip(&folder, &small, &format!("--via soft:32M --bs {bs} --iodepth {depth}"));
    }
    // More blocks than fit at the depth, or all of the file in a few.
    let sizes = [
        ("4k", &medium),
        ("64k", &medium),
        ("160k", &medium),
        ("1M", &large),
        ("3M", &large),
        ("8M", &large),
        ("16M", &large),
    ];
    for (bs, file) in sizes {
        for depth in [1, 3, 256] {
            round_trip(&folder, file, &format!("--via soft:32M --bs {bs} --iodepth {depth}"));
        }
    }
    for protect in ["static", "revoke", "strict"] {
        for bs in ["512", "8M"] {
            round_trip(&folder, &small, &format!("--via soft:1M --bs {bs} --protect {protect}"));
        }
    }
}

#[test]
fn a_larger_file_with_its_report() {
    let folder = Folder::new();
    let size = (64 << 20) + 1;
    let source = folder.file("in", &bytes(size));
    let report = round_trip(&folder, &source, "--via soft:65M --protect revoke --verify");
    assert_eq!(report["sha256"]["source"], report["sha256"]["destination"]);
    let phases = report["phases"].as_array().unwrap();
    assert_eq!(phases.len(), 2);
    for phase in phases {
        for way in ["reads", "writes"] {
            assert_eq!(phase[way]["requests"], 65);
            assert_eq!(phase[way]["bytes"], size);
            assert_eq!(phase[way]["queueing"]["count"], 65);
        }
        assert!(phase["bytes_per_second"].as_f64().unwrap() > 0.0);
    }
    let domain = &report["stack"]["domain"];
    assert_eq!((&domain["maps"], &domain["maps_fixed"]), (&130.into(), &0.into()));
    assert_eq!(domain["quarantined"], 0);
    // Those of neighbours that are revoked together are one.
    assert!((2..=130).contains(&domain["invalidations_asked"].as_u64().unwrap()), "{domain}");
    let device = &report["stack"]["devices"][0];
    // 65 there and 65 back; a flush is one command more.
    assert_eq!((&device["requests"], &device["commands"]), (&130.into(), &131.into()));
    assert_eq!(device["segments"], 130);
    assert_eq!(device["prp_pages_in_use"], 0);
    assert!(device["prp_pages"].as_u64().unwrap() >= 128);
    let memory = &report["stack"]["memory"][0];
    assert_eq!(memory["frames_quarantined"], 0);
}

#[test]
fn static_buffers_are_mapped_once() {
    let folder = Folder::new();
    let source = folder.file("in", &bytes(1 << 20));
    let report = round_trip(&folder, &source, "--via soft:1M --protect static --bs 4k");
    let domain = &report["stack"]["domain"];
    assert_eq!(domain["maps"], domain["maps_fixed"]);
    assert_eq!(domain["invalidations_asked"], 0);
}

#[test]
fn every_memory_of_this_machine() {
    let folder = Folder::new();
    let source = folder.file("in", &bytes(5_000_000));
    for memory in ["auto", "plain", "memfd"] {
        round_trip(&folder, &source, &format!("--via soft:8M --memory {memory}"));
    }
    for memory in ["thp", "hugetlb-2m", "hugetlb-1g"] {
        let line = format!("copy {source} {} --via soft:8M --memory {memory}", folder.arg("out"));
        let ended = pinfold(&words(&line));
        if ended.code == Some(0) {
            assert_same(source.as_ref(), &folder.path("out"));
            std::fs::remove_file(folder.path("out")).unwrap();
        } else {
            skipped(&format!("no {memory} on this machine"));
            ended.failed(1, &["no DMA memory for the data"]);
            assert_eq!(folder.names(), ["in"]);
        }
    }
}

/// A reservation alone is not enough: a pool that shrinks takes reserved pages, too. Before pages were faulted in at
/// allocation, one run in sixty ended with a `SIGBUS` here.
#[test]
fn a_shrinking_pool_of_hugepages_raises_no_signal() {
    const POOL: &str = "/proc/sys/vm/nr_hugepages";
    let before = std::fs::read_to_string(POOL).unwrap();
    if std::fs::write(POOL, &before).is_err() {
        return skipped("may not change the pool of hugepages");
    }
    let until = Instant::now() + Duration::from_secs(4);
    let copies = || {
        let folder = Folder::new();
        let source = folder.file("in", &bytes(5_000_000));
        while Instant::now() < until {
            round_trip(&folder, &source, "--via soft:8M");
        }
    };
    std::thread::scope(|scope| {
        let copying = [scope.spawn(copies), scope.spawn(copies), scope.spawn(copies)];
        while Instant::now() < until {
            for pages in ["0", "7"] {
                std::fs::write(POOL, pages).unwrap();
                std::thread::sleep(Duration::from_millis(12));
            }
        }
        std::fs::write(POOL, &before).unwrap();
        for thread in copying {
            thread.join().unwrap();
        }
    });
}

#[test]
fn holes_read_as_zeroes() {
    let folder = Folder::new();
    let source = folder.sparse("in", 10_000_001);
    round_trip(&folder, &source, "--via soft:10M --verify");
    round_trip(&folder, &source, "");
}

#[test]
fn to_an_image_and_back() {
    let folder = Folder::new();
    let source = folder.file("in", &bytes(1_000_000));
    let image = folder.arg("disk.img");
    pinfold(&words(&format!("copy {source} soft:{image} --verify"))).ok();
    let padded = std::fs::read(&image).unwrap();
    assert_eq!(padded.len(), 1_000_448);
    assert!(padded[..1_000_000] == bytes(1_000_000) && padded[1_000_000..].iter().all(|&byte| byte == 0));
    let out = folder.arg("out");
    pinfold(&words(&format!("copy soft:{image} {out} --bs 64k"))).ok();
    assert_same(image.as_ref(), out.as_ref());
    // An image is replaced, not written into.
    let tiny = folder.file("tiny", b"tiny");
    pinfold(&words(&format!("copy {tiny} soft:{image}"))).failed(1, &["exists", "--force"]);
    pinfold(&words(&format!("copy {tiny} soft:{image} --force"))).ok();
    assert_eq!(std::fs::read(&image).unwrap().len(), 512);
    let empty = folder.file("empty", b"");
    pinfold(&words(&format!("copy {empty} soft:{image} --force"))).ok();
    // An image has at least one block; an empty one could not be opened again.
    assert_eq!(std::fs::read(&image).unwrap(), [0; 512]);
    pinfold(&words(&format!("copy soft:{image} {out} --force"))).ok();
    assert_eq!(folder.names(), ["disk.img", "empty", "in", "out", "tiny"]);
}

#[test]
fn through_an_image_or_a_file() {
    let folder = Folder::new();
    let source = folder.file("in", &bytes(1_000_000));
    let image = folder.sparse("disk.img", 2 << 20);
    round_trip(&folder, &source, &format!("--via soft:{image}"));
    let line = format!("copy {source} {} --via soft:{image}", folder.arg("out"));
    pinfold(&words(&line)).failed(1, &["holds data", "--force"]);
    round_trip(&folder, &source, &format!("--via soft:{image} --force --verify"));
    round_trip(&folder, &source, &format!("--via {}", folder.arg("between")));
    assert_eq!(folder.names(), ["disk.img", "in"]);
}

#[test]
fn a_read_only_source_is_only_read() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new();
    let source = folder.file("in", &bytes(4096));
    std::fs::set_permissions(&source, std::fs::Permissions::from_mode(0o440)).unwrap();
    let out = folder.path("out");
    pinfold(&words(&format!("copy soft:{source} {}", out.display()))).ok();
    assert_same(source.as_ref(), &out);
    assert_eq!(std::fs::metadata(&out).unwrap().permissions().mode() & 0o777, 0o440);
}

#[test]
fn a_controller_with_memory_as_a_destination_can_be_verified() {
    let folder = Folder::new();
    let source = folder.file("in", &bytes(700_001));
    let report = pinfold(&words(&format!("copy {source} soft:1M --verify --json"))).json();
    assert_eq!(report["sha256"]["source"], report["sha256"]["destination"]);
}

/// The full size; `make test-all` runs it.
#[test]
fn a_size_that_is_no_multiple_of_the_block_round_trips() {
    if std::env::var_os("PINFOLD_BIG").is_none() {
        skipped("set PINFOLD_BIG=1 to copy 1 GiB + 513 bytes three times");
        return;
    }
    let folder = Folder::new();
    let source = folder.arg("in");
    let piece = bytes(64 << 20);
    let mut file = std::fs::File::create(&source).unwrap();
    for turn in 0..16u8 {
        let turned: Vec<u8> = piece.iter().map(|byte| byte ^ turn).collect();
        std::io::Write::write_all(&mut file, &turned).unwrap();
    }
    std::io::Write::write_all(&mut file, &piece[..513]).unwrap();
    drop(file);
    for protect in ["static", "revoke", "strict"] {
        let options = format!("--via soft:1025M --protect {protect}");
        let report = round_trip(&folder, &source, &options);
        assert_eq!(report["bytes"], (1u64 << 30) + 513);
    }
}
