//! A transfer that is refused reports why, and returns its buffer.

use super::memory::{Pages, create, pattern};
use super::*;
use rustix::io::Errno;

#[test]
fn a_file_that_shrinks_is_a_typed_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shrinks");
    for direct in [true, false] {
        for (now, done) in [(0u64, 0), (4096, 4096), (5000, 5000)] {
            std::fs::write(&path, pattern(16384, 0)).unwrap();
            let options = Options { direct, ..Options::default() };
            let mut queue = FileQueue::open(&path, &create(), &options).unwrap();
            std::fs::File::options().write(true).open(&path).unwrap().set_len(now).unwrap();
            queue.read(Pages::new(16384), 0, 16384, 9).unwrap();
            let mut over = Vec::new();
            queue.wait(1, &mut over).unwrap();
            let short = FileError::Short {
                op: Op::Read,
                path: path.as_path().into(),
                offset: 0,
                len: 16384,
                done,
            };
            assert_eq!(over[0].result, Err(short), "direct: {direct}");
            assert_eq!(over[0].buffer.bytes(done), pattern(16384, 0)[..done]);
        }
    }
}

#[test]
fn rejected_transfers_return_their_buffer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad");
    std::fs::write(&path, pattern(16384, 0)).unwrap();
    let options = Options { depth: 2, ..Options::default() };
    let mut queue = FileQueue::open(&path, &create(), &options).unwrap();
    let pages = || Pages::new(8192);
    let room = |len, padded| FileError::Room { len, padded, size: 8192 };
    assert_eq!(queue.read(pages(), 0, 0, 0).unwrap_err().error, room(0, 0));
    let large = queue.read(pages(), 0, 8193, 0).unwrap_err().error;
    assert!(matches!(large, FileError::Room { len: 8193, size: 8192, .. }));
    let beyond = queue.write(pages(), u64::MAX - 4095, 4096, 0).unwrap_err().error;
    assert_eq!(beyond, FileError::Beyond { offset: u64::MAX - 4095, len: 4096 });
    if queue.is_direct() {
        let crooked = queue.read(pages(), 100, 4096, 0).unwrap_err();
        assert!(matches!(crooked.error, FileError::Misaligned { offset: 100, .. }));
        // Padding would overwrite what lies behind.
        let inside = queue.write(crooked.buffer, 4096, 100, 0).unwrap_err().error;
        assert!(matches!(
            inside,
            FileError::Misaligned { op: Op::Write, offset: 4096, len: 100, .. }
        ));
    }
    queue.read(pages(), 0, 4096, 0).unwrap();
    queue.read(pages(), 4096, 4096, 1).unwrap();
    assert_eq!(queue.read(pages(), 0, 1, 2).unwrap_err().error, FileError::Full { depth: 2 });
    assert_eq!(queue.set_len(0), Err(FileError::Busy { in_flight: 2 }));
    let mut done = Vec::new();
    assert_eq!(queue.wait(usize::MAX, &mut done).unwrap(), 2);
    assert_eq!(queue.wait(1, &mut done).unwrap(), 0);
    assert_eq!(std::fs::read(&path).unwrap(), pattern(16384, 0));
}

#[test]
fn impossible_queues_are_rejected_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let open = |path: &Path, how: &OpenOptions, depth, block| {
        FileQueue::<Pages>::open(path, how, &Options { depth, block, ..Options::default() })
            .unwrap_err()
    };
    let limit = 32_768;
    assert_eq!(open(&path, &create(), 0, 512), FileError::Depth { requested: 0, limit });
    assert_eq!(
        open(&path, &create(), 1_000_000_000, 512),
        FileError::Depth { requested: 1_000_000_000, limit }
    );
    assert_eq!(open(&path, &create(), 1, 3), FileError::Block { requested: 3 });
    assert_eq!(open(&path, &create(), 1, 0), FileError::Block { requested: 0 });
    let mut read = OpenOptions::new();
    read.read(true);
    let missing = open(&folder.path().join("none"), &read, 1, 512);
    assert!(missing.to_string().ends_with("no such file or folder; check the path"), "{missing}");
    assert!(matches!(
        open(folder.path(), &read, 1, 512),
        FileError::System { errno: Errno::ISDIR, .. }
    ));
}

#[test]
fn a_full_disk_is_named() {
    // A device that is always full, and refuses O_DIRECT.
    let mut how = OpenOptions::new();
    how.write(true);
    let Ok(mut queue) = FileQueue::open(Path::new("/dev/full"), &how, &Options::default()) else {
        return;
    };
    queue.write(Pages::new(4096), 0, 4096, 0).unwrap();
    let mut done = Vec::new();
    queue.wait(1, &mut done).unwrap();
    let error = done[0].result.clone().unwrap_err();
    assert!(matches!(error, FileError::Transfer { errno: Errno::NOSPC, done: 0, .. }), "{error}");
    assert!(error.to_string().contains("the disk is full"), "{error}");
}
