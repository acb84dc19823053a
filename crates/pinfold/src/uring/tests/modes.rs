//! Queues that stay with their thread, and queues that poll.

use super::memory::{Counted, Pages, arena, create, pattern, waiting};
use super::transfers::round_trip;
use super::*;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

fn without_ring(notes: &[Note]) -> bool {
    notes.iter().any(|note| matches!(note, Note::NoRing(_)))
}

#[test]
fn one_thread_and_polling_move_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let memory = arena(1 << 20);
    let fixed = [memory.into()];
    for (one_thread, poll, fixed) in [
        (true, false, &fixed[..]),
        (true, true, &fixed[..]),
        (false, true, &[]),
        (true, false, &[]),
    ] {
        let options = Options { one_thread, poll, fixed, depth: 16, ..Options::default() };
        let path = folder.path().join("modes");
        let notes = round_trip(&path, &pattern(777_777, 1), 16_384, memory, &options);
        if !poll {
            assert!(!notes.iter().any(|note| matches!(note, Note::NotPolled { .. })), "{notes:?}");
        }
    }
}

#[test]
fn polling_without_a_device_that_polls_is_a_note() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return };
    let options = Options { poll: true, ..Options::default() };
    let queue: FileQueue<Pages> =
        FileQueue::open(&folder.path().join("shm"), &create(), &options).unwrap();
    let said = queue.notes().iter().any(|note| matches!(note, Note::NotPolled { .. }));
    assert!(said || without_ring(queue.notes()), "{:?}", queue.notes());
}

#[test]
fn a_queue_of_one_thread_is_refused_to_others() {
    let options = Options { direct: false, one_thread: true, ..Options::default() };
    let freed = Arc::new(AtomicUsize::new(0));
    let file = waiting();
    let mut queue =
        FileQueue::new(file.try_clone().unwrap(), Path::new("eventfd"), &options).unwrap();
    if without_ring(queue.notes())
        || queue.notes().iter().any(|note| matches!(note, Note::NotDeferred { .. }))
    {
        return;
    }
    queue.read(Counted(Pages::new(4096), freed.clone()), 0, 8, 0).unwrap();
    queue.submit().unwrap();
    let mut queue = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let mut done = Vec::new();
            assert_eq!(queue.submit(), Err(FileError::OtherThread));
            assert_eq!(queue.wait(1, &mut done), Err(FileError::OtherThread));
            assert_eq!(queue.poll(&mut done), Err(FileError::OtherThread));
            queue
        });
        other.join().unwrap()
    });
    // Nothing is lost by it.
    std::io::Write::write_all(&mut &file, &7u64.to_ne_bytes()).unwrap();
    let mut done = Vec::new();
    assert_eq!(queue.wait(1, &mut done).unwrap(), 1);
    assert!(done[0].result.is_ok() && done[0].buffer.0.bytes(8) == 7u64.to_ne_bytes());

    // Dropped on another thread it cannot wait for the kernel: the buffer is quarantined at once,
    // and counted.
    queue.read(Counted(Pages::new(4096), freed.clone()), 0, 8, 0).unwrap();
    queue.submit().unwrap();
    let (before, start) = (quarantined_buffers(), Instant::now());
    std::thread::scope(|scope| scope.spawn(|| drop(queue)).join().unwrap());
    assert!(start.elapsed() < Duration::from_secs(10) && quarantined_buffers() > before);
    assert_eq!(freed.load(Ordering::SeqCst), 0);
}

#[test]
fn polling_finds_completions_that_need_a_system_call() {
    let folder = tempfile::tempdir().unwrap();
    for poll in [false, true] {
        let options = Options { one_thread: true, poll, ..Options::default() };
        let mut queue = FileQueue::open(&folder.path().join("poll"), &create(), &options).unwrap();
        let mut done = Vec::new();
        queue.write(Pages::new(4096), 0, 4096, 5).unwrap();
        assert_eq!(queue.poll(&mut done).unwrap(), 0, "nothing goes before it is submitted");
        queue.submit().unwrap();
        while queue.poll(&mut done).unwrap() == 0 {
            std::thread::yield_now();
        }
        assert!(done[0].tag == 5 && done[0].result.is_ok() && !done[0].latency.is_zero());
    }
}
