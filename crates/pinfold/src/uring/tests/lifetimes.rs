//! The lifetimes of memory: of a queue that is dropped, and of a program's own ring with Pinfold's
//! table.

use super::super::index::BufferIndex;
use super::transfers::{Counted, Pages, arena, create, pattern, waiting};
use super::*;
use crate::folios::PLACE;
use crate::sys::ring_memory::tests::without_ipc_lock;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// Returns the completion of one transfer.
fn transfer(ring: &mut IoUring, entry: &squeue::Entry) -> cqueue::Entry {
    push(ring, entry);
    ring.submit_and_wait(1).unwrap();
    ring.completion().next().unwrap()
}

fn push(ring: &mut IoUring, entry: &squeue::Entry) {
    // SAFETY: the memory of all tests is leaked, and each waits for its transfers.
    unsafe { ring.submission().push(entry) }.unwrap();
}

fn read(file: &File, memory: DmaMemory<'_>, index: BufferIndex) -> squeue::Entry {
    let len = u32::try_from(memory.len()).unwrap();
    opcode::ReadFixed::new(types::Fd(file.as_raw_fd()), memory.as_ptr().as_ptr(), len, index.get())
        .build()
}

fn write(file: &File, memory: DmaMemory<'_>, index: BufferIndex) -> squeue::Entry {
    let len = u32::try_from(memory.len()).unwrap();
    opcode::WriteFixed::new(types::Fd(file.as_raw_fd()), memory.as_ptr().as_ptr(), len, index.get())
        .build()
}

/// Without rings there is no test.
fn rings<const N: usize>() -> Option<[IoUring; N]> {
    let rings: Vec<IoUring> = (0..N).map_while(|_| IoUring::new(8).ok()).collect();
    rings.try_into().ok()
}

fn index(number: u16) -> BufferIndex {
    BufferIndex::new(number)
}

/// 8 MiB of hugepages, as far as there are any, and 1 MiB of plain pages behind them.
fn mixture() -> DmaMemory<'static> {
    let memory = arena(12 << 20);
    let skip = memory.addr().next_multiple_of(2 << 20) - memory.addr();
    let memory = memory.part(skip, 9 << 20).unwrap();
    let huge = memory.part(0, 8 << 20).unwrap();
    let at = huge.as_ptr().as_ptr().cast();
    // SAFETY: mapped until exit; it is advice about page sizes only.
    unsafe { madvise(at, huge.len(), Advice::LinuxHugepage) }.unwrap();
    memory.fill(0, memory.len(), 0).unwrap();
    memory
}

#[test]
fn every_position_of_a_buffer_on_hugepages_round_trips() {
    let Some([mut ring]) = rings() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = create().open(folder.path().join("lies")).unwrap();
    let memory = mixture();
    let (huge, page) = (2 << 20, 4096);
    for (what, lies) in [
        ("one hugepage", &[(0, huge)][..]),
        ("begins within one", &[(page, huge - page)]),
        ("begins within a page", &[(page + 123, huge)]),
        ("ends within one", &[(0, huge + 5 * page)]),
        ("ends within a page", &[(0, huge + 77)]),
        ("several", &[(0, 4 * huge)]),
        ("several, and begins and ends within", &[(3 * page + 1, 3 * huge)]),
        ("with plain pages behind", &[(huge, 3 * huge + (1 << 20))]),
        ("several buffers on one", &[(0, 8 * page), (8 * page, page), (64 * page + 9, huge)]),
    ] {
        let parts: Vec<DmaMemory<'static>> =
            lies.iter().map(|&(at, len)| memory.part(at, len).unwrap()).collect();
        let fixed: Vec<Fixed<'static>> = parts.iter().map(|&part| part.into()).collect();
        let table = match RingBuffers::register(&ring, &fixed) {
            Err(refused @ RegisterError::Memlock { .. }) => {
                eprintln!("SKIPPED: {what}: {refused}");
                continue;
            }
            registered => registered.unwrap(),
        };
        let bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
        assert_eq!((table.len(), table.bytes()), (parts.len(), bytes), "{what}");
        for (number, part) in parts.iter().enumerate() {
            let place = table.index_of(*part).unwrap();
            assert_eq!(usize::from(place.get()), number);
            let content = pattern(part.len(), number as u64);
            part.copy_from_slice(0, &content).unwrap();
            assert_eq!(
                transfer(&mut ring, &write(&file, *part, place)).result(),
                i32::try_from(part.len()).unwrap()
            );
            part.fill(0, part.len(), 0xee).unwrap();
            assert_eq!(
                transfer(&mut ring, &read(&file, *part, place)).result(),
                i32::try_from(part.len()).unwrap()
            );
            let mut back = vec![0; part.len()];
            part.copy_to_slice(0, &mut back).unwrap();
            assert!(back == content, "{what}");
        }
        drop(table);
        // Gone is gone: a transfer with a number of it fails, and moves nothing.
        assert_eq!(transfer(&mut ring, &read(&file, parts[0], index(0))).result(), -libc::EFAULT);
    }
}

#[test]
fn a_transfer_keeps_the_memory_of_a_place_that_is_set() {
    let Some([mut ring]) = rings() else { return };
    let memory = arena(8192);
    let (first, second) = (memory.part(0, 4096).unwrap(), memory.part(4096, 4096).unwrap());
    // A table that the program has registered itself. Linux 5.19.
    if ring.submitter().register_buffers_sparse(4).is_err() {
        return;
    }
    let set = |ring: &IoUring, place, memory: Option<DmaMemory<'static>>| {
        set_place(ring, index(place), memory.map(Into::into))
    };
    set(&ring, 0, Some(first)).unwrap();
    let file = waiting();
    push(&mut ring, &read(&file, first.part(0, 8).unwrap(), index(0)));
    ring.submit().unwrap();
    // Replaced while a transfer is in flight with what was there.
    set(&ring, 0, Some(second)).unwrap();
    assert!(ring.completion().next().is_none());
    (&file).write_all(&0x1122_3344u64.to_ne_bytes()).unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().unwrap().result(), 8);
    assert_eq!(first.read_u64(0).unwrap(), 0x1122_3344);
    (&file).write_all(&5u64.to_ne_bytes()).unwrap();
    assert_eq!(transfer(&mut ring, &read(&file, second.part(0, 8).unwrap(), index(0))).result(), 8);
    assert_eq!((first.read_u64(0).unwrap(), second.read_u64(0).unwrap()), (0x1122_3344, 5));
    set(&ring, 0, None).unwrap();
    (&file).write_all(&5u64.to_ne_bytes()).unwrap();
    assert_eq!(
        transfer(&mut ring, &read(&file, second.part(0, 8).unwrap(), index(0))).result(),
        -libc::EFAULT
    );
    let beyond = set(&ring, 4, Some(first));
    assert_eq!(beyond, Err(RegisterError::NoPlace { index: index(4) }));
    let mut long: Fixed<'static> = first.into();
    long.len = PLACE + 1;
    let long = set_place(&ring, index(0), Some(long));
    assert!(matches!(long, Err(RegisterError::Length { limit: PLACE, .. })), "{long:?}");
}

#[test]
fn a_table_dropped_during_a_transfer_keeps_its_memory_pinned() {
    let Some([mut ring]) = rings() else { return };
    let memory = arena(4096);
    let table = RingBuffers::register(&ring, &[memory.into()]).unwrap();
    let file = waiting();
    push(&mut ring, &read(&file, memory.part(0, 8).unwrap(), index(0)));
    ring.submit().unwrap();
    // Before Linux 5.13 (and on some later ones) the kernel waits for the transfer here: it is
    // ended from elsewhere.
    let mut other = file.try_clone().unwrap();
    let answer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        other.write_all(&9u64.to_ne_bytes()).unwrap();
    });
    drop(table);
    ring.submit_and_wait(1).unwrap();
    assert_eq!((ring.completion().next().unwrap().result(), memory.read_u64(0).unwrap()), (8, 9));
    answer.join().unwrap();
}

#[test]
fn vectored_fixed_transfers_work_where_the_kernel_has_them() {
    let Some([mut ring]) = rings() else { return };
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe).unwrap();
    if !probe.is_supported(opcode::WritevFixed::CODE) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = create().open(folder.path().join("parts")).unwrap();
    let memory = arena(64 << 10);
    memory.copy_from_slice(0, &pattern(64 << 10, 3)).unwrap();
    let table = RingBuffers::register(&ring, &[memory.into()]).unwrap();
    let part = |at: usize, len: usize| {
        let part = memory.part(at, len).unwrap();
        assert_eq!(table.index_of(part), Some(index(0)));
        libc::iovec { iov_base: part.as_ptr().as_ptr().cast(), iov_len: len }
    };
    let parts = [part(40_000, 1000), part(5, 70), part(20_000, 4096)];
    let entry = opcode::WritevFixed::new(types::Fd(file.as_raw_fd()), parts.as_ptr(), 3, 0).build();
    assert_eq!(transfer(&mut ring, &entry).result(), 5166);
    let all = pattern(64 << 10, 3);
    let expected = [&all[40_000..41_000], &all[5..75], &all[20_000..24_096]].concat();
    assert!(std::fs::read(folder.path().join("parts")).unwrap() == expected);
}

#[test]
fn impossible_registrations_are_errors_and_change_nothing() {
    let Some([ring]) = rings() else { return };
    let memory = arena(16384);
    let part = |at, len| -> Fixed<'static> { memory.part(at, len).unwrap().into() };
    let no_ring =
        RingBuffers::register(File::open("/dev/null").unwrap(), &[part(0, 4096)]).unwrap_err();
    assert!(matches!(no_ring, RegisterError::NoRing { .. }), "{no_ring}");
    let none = RingBuffers::register(&ring, &[]).unwrap_err();
    assert_eq!(none, RegisterError::Capacity { requested: 0, limit: 16_384 });
    let many = vec![part(0, 4096); 16_385];
    assert!(matches!(
        RingBuffers::register(&ring, &many),
        Err(RegisterError::Capacity { requested: 16_385, .. })
    ));
    let twice = RingBuffers::register(&ring, &[part(0, 8192), part(4096, 8192)]).unwrap_err();
    assert!(matches!(twice, RegisterError::Overlaps { len: 8192, .. }));

    let table = RingBuffers::register(&ring, &[part(0, 4096), part(4096, 1)]).unwrap();
    assert_eq!(
        RingBuffers::register(&ring, &[part(0, 4096)]).unwrap_err(),
        RegisterError::HasTable
    );
    assert_eq!((table.len(), table.bytes()), (2, 4097));
    drop(table);

    // Memory that is there, but may only be read.
    let page = arena(4096);
    let at = page.as_ptr().as_ptr().cast();
    // SAFETY: a page of its own, which is not accessed from here on.
    unsafe { rustix::mm::mprotect(at, 4096, rustix::mm::MprotectFlags::READ) }.unwrap();
    let refused = RingBuffers::register(&ring, &[page.into()]).unwrap_err();
    assert!(matches!(refused, RegisterError::Memory { .. }), "{refused}");
    drop(RingBuffers::register(&ring, &[part(0, 4096)]).unwrap());
    drop(RingBuffers::register(&ring, &[part(0, 4096)]).unwrap());
}

#[test]
fn a_ring_of_another_thread_keeps_its_table() {
    let mut builder = IoUring::<squeue::Entry, cqueue::Entry>::builder();
    builder.setup_single_issuer().setup_defer_taskrun();
    let Ok(ring) = builder.build(8) else { return };
    let memory = arena(4096);
    let register = || RingBuffers::register(&ring, &[memory.into()]);
    let table = register().unwrap();
    std::thread::scope(|scope| scope.spawn(|| drop(table)).join().unwrap());
    let refused = std::thread::scope(|scope| scope.spawn(|| register().map(drop)).join().unwrap());
    assert_eq!(refused, Err(RegisterError::OtherThread));
    assert_eq!(register().unwrap_err(), RegisterError::HasTable);
    // This thread, which submits, unregisters it.
    ring.submitter().unregister_buffers().unwrap();
    drop(register().unwrap());
    drop(register().unwrap());
}

#[test]
fn the_memlock_error_has_the_figures_and_the_command() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    // Pinning has to touch the pages, so a large limit is not worth its test.
    let Some(limit) = limit.filter(|limit| *limit <= 256 << 20) else { return };
    let asked = limit.next_multiple_of(4096) + (1 << 20);
    let memory = arena(usize::try_from(asked).unwrap());
    let small = memory.part(0, 4096).unwrap();
    without_ipc_lock(move || {
        let Some([ring]) = rings() else { return };
        let error = match RingBuffers::register(&ring, &[memory.into()]) {
            // A kernel before 5.12 counts by user, and root's is not limited.
            Ok(_) => return,
            Err(error) => error,
        };
        let text = error.to_string();
        assert!(
            matches!(error, RegisterError::Memlock { requested: said, .. } if said == asked),
            "{error}"
        );
        assert!(
            text.contains(&format!("{asked} bytes more")) && text.contains("memlock"),
            "{text}"
        );
        // Nothing stays pinned: the same registration still fits.
        drop(RingBuffers::register(&ring, &[small.into()]).unwrap());
    });
}

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

/// Returns whether any process has the file open for writing: a read lease is refused then
/// (`fcntl(2)`). `None` where the file system has no leases.
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
        let mut is_held = true;
        // A child that another test starts has all files of this process until it executes its
        // program: one drop after which the file is free is enough.
        for _ in 0..20 {
            let mut queue = FileQueue::<Pages>::open(&path, &create(), &options).unwrap();
            queue.read(Pages::new(4096), 0, 4096, 0).unwrap();
            queue.submit().unwrap();
            let Some(open) = is_being_written(&path) else {
                println!("not tried: the file system has no leases");
                return;
            };
            assert!(open);
            drop(queue);
            is_held = is_being_written(&path) != Some(false);
            if !is_held {
                break;
            }
        }
        assert!(!is_held, "one thread: {one_thread}");
    }
}

/// Waits until the descriptor is readable, and returns how long that took.
fn wait_at(fd: BorrowedFd<'_>) -> Duration {
    let start = Instant::now();
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    while poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&limit)) == Err(Errno::INTR)
        && start.elapsed() < Duration::from_secs(60)
    {}
    start.elapsed()
}

/// Waits on the submitting thread, or on another one while that sleeps; the transfer completes
/// meanwhile. With deferred completions nothing would be readable, and there is nothing to wait
/// for.
#[test]
fn a_completion_wakes_who_waits_at_the_descriptor() {
    for (one_thread, elsewhere) in [(false, false), (false, true), (true, false)] {
        let options = Options { direct: false, one_thread, ..Options::default() };
        let file = waiting();
        let mut queue =
            FileQueue::new(file.try_clone().unwrap(), Path::new("eventfd"), &options).unwrap();
        let deferred =
            one_thread && !queue.notes().iter().any(|n| matches!(n, Note::NotDeferred { .. }));
        if queue.notes().iter().any(|note| matches!(note, Note::NoRing(_))) {
            assert!(queue.completion_fd().is_none(), "nothing is announced");
            return;
        }
        assert_eq!(queue.completion_fd().is_none(), deferred);
        for round in 0..50 {
            queue.read(Pages::new(4096), 0, 8, round).unwrap();
            queue.submit().unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(2));
                    std::io::Write::write_all(&mut &file, &7u64.to_ne_bytes()).unwrap();
                });
                let Some(fd) = queue.completion_fd() else { return };
                let slept = match elsewhere {
                    true => scope.spawn(move || wait_at(fd)).join().unwrap(),
                    false => wait_at(fd),
                };
                assert!(slept < Duration::from_secs(30), "{round}: {slept:?}");
            });
            let mut done = Vec::new();
            // One call, where the descriptor has announced it.
            while queue.poll(&mut done).unwrap() == 0 {
                assert!(deferred, "{round}");
            }
            assert!(done.len() == 1 && done[0].tag == round && done[0].result.is_ok());
        }
    }
}
