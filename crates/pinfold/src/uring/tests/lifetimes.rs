//! Buffers of a queue that is dropped.

use super::memory::{Counted, Pages, create, pattern, waiting};
use super::*;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

#[test]
fn dropping_a_queue_frees_every_buffer_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("dropped");
    std::fs::write(&path, pattern(8 << 20, 0)).unwrap();
    for submit in [true, false] {
        let freed = Arc::new(AtomicUsize::new(0));
        let mut queue =
            FileQueue::open(&path, &create(), &Options { depth: 64, ..Options::default() })
                .unwrap();
        for i in 0..64u64 {
            let buffer = Counted(Pages::new(128 << 10), freed.clone());
            queue.read(buffer, i * (128 << 10), 128 << 10, i).unwrap();
        }
        if submit {
            assert_eq!(queue.submit().unwrap().transfers, 64);
        }
        drop(queue);
        assert_eq!(freed.load(Ordering::SeqCst), 64);
    }
}

#[test]
fn a_drop_waits_for_the_kernel_or_quarantines() {
    let options = Options { direct: false, ..Options::default() };
    for answered in [true, false] {
        let file = waiting();
        let mut other = file.try_clone().unwrap();
        let freed = Arc::new(AtomicUsize::new(0));
        let mut queue = FileQueue::new(file, Path::new("eventfd"), &options).unwrap();
        if queue.notes().iter().any(|note| matches!(note, Note::NoRing(_))) {
            return;
        }
        queue.last_wait = if answered { LAST_WAIT } else { Duration::from_millis(50) };
        queue.read(Counted(Pages::new(4096), freed.clone()), 0, 8, 0).unwrap();
        queue.submit().unwrap();
        let (before, start) = (quarantined_buffers(), Instant::now());
        std::thread::scope(|scope| {
            scope.spawn(|| drop(queue));
            std::thread::sleep(Duration::from_millis(30));
            assert_eq!(freed.load(Ordering::SeqCst), 0, "the kernel may still write to it");
            if answered {
                other.write_all(&1u64.to_ne_bytes()).unwrap();
            }
        });
        assert!(start.elapsed() < Duration::from_secs(10));
        assert_eq!(freed.load(Ordering::SeqCst), usize::from(answered));
        assert!(answered || quarantined_buffers() > before);
    }
}

/// Whether any process has the file open for writing: a read lease is refused then (`fcntl(2)`).
/// `None` where the file system has no leases.
fn is_being_written(path: &Path) -> Option<bool> {
    let reader = std::fs::File::open(path).unwrap();
    // SAFETY: the call takes no memory, and the descriptor is open.
    match unsafe { libc::fcntl(reader.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) } {
        0 => Some(false),
        _ => match std::io::Error::last_os_error().raw_os_error() {
            Some(libc::EAGAIN) => Some(true),
            _ => None,
        },
    }
}

#[test]
fn a_dropped_queue_holds_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("let go");
    std::fs::write(&path, pattern(1 << 20, 0)).unwrap();
    for one_thread in [true, false] {
        let options = Options { one_thread, ..Options::default() };
        let mut queue = FileQueue::<Pages>::open(&path, &create(), &options).unwrap();
        queue.read(Pages::new(4096), 0, 4096, 0).unwrap();
        queue.submit().unwrap();
        let Some(open) = is_being_written(&path) else {
            println!("not tried: the file system has no leases");
            return;
        };
        assert!(open);
        drop(queue);
        assert_eq!(is_being_written(&path), Some(false), "one thread: {one_thread}");
    }
}
