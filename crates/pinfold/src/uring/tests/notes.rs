//! Notices of missing features, and short transfers.

use super::super::slot::RETRIES;
use super::memory::{arena, create, pattern, without_ipc_lock};
use super::transfers::round_trip;
use super::*;
use crate::sys::kernel::{RingRefusal, RingRefusalCause};
use crate::sys::limits::MemlockRefusal;
use rustix::io::Errno;

#[test]
fn an_insufficient_memlock_is_a_note_with_the_command() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    // Pinning has to touch the pages, so a large limit is not worth its test.
    let Some(limit) = limit.filter(|limit| *limit <= 256 << 20) else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memlock");
    let asked = limit.next_multiple_of(4096) + (1 << 20);
    let memory = arena(usize::try_from(asked).unwrap());
    let fixed = [memory.into()];
    let notes = without_ipc_lock(|| {
        round_trip(
            &path,
            &pattern(50_000, 4),
            4096,
            memory,
            &Options { fixed: &fixed, ..Options::default() },
        )
    });
    let [.., Note::NotFixed { memlock: Some(refused), errno: Errno::NOMEM, .. }] = notes[..] else {
        // No ring at all, or none that counts.
        assert!(notes.iter().any(|note| matches!(note, Note::NoRing(_))), "{notes:?}");
        return;
    };
    assert_eq!((refused.requested, refused.limit), (asked, limit));
    let text = notes.last().unwrap().to_string();
    assert!(text.contains(&format!("{asked} bytes more")) && text.contains("; fix: "), "{text}");
}

#[test]
fn a_short_transfer_continues_and_one_without_progress_ends() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("parts");
    let file = create().open(&path).unwrap();
    let mut target = Target::new(file, &path, false, 512, &mut Vec::new()).unwrap();
    target.block = 512;
    let slot = |op, len, padded| Slot {
        buffer: (),
        tag: 0,
        op,
        offset: 0,
        len,
        padded,
        done: 0,
        retries: 0,
        since: Instant::now(),
    };
    let mut read = slot(Op::Read, 1000, 1024);
    assert_eq!(read.result_of(&target, Ok(512)), None);
    assert_eq!(read.result_of(&target, Err(Errno::INTR)), None);
    assert_eq!(read.result_of(&target, Ok(488)), Some(Ok(())));
    let mut short = slot(Op::Read, 1000, 1024);
    assert!(matches!(
        short.result_of(&target, Ok(999)),
        Some(Err(FileError::Short { done: 999, .. }))
    ));
    // A padded write has completed when the padding is written.
    let mut write = slot(Op::Write, 600, 1024);
    assert_eq!(write.result_of(&target, Ok(512)), None);
    assert!(matches!(
        write.result_of(&target, Ok(0)),
        Some(Err(FileError::Short { op: Op::Write, .. }))
    ));
    let mut busy = slot(Op::Write, 512, 512);
    for _ in 0..RETRIES {
        assert_eq!(busy.result_of(&target, Err(Errno::AGAIN)), None);
    }
    let gone = busy.result_of(&target, Err(Errno::AGAIN));
    assert!(matches!(gone, Some(Err(FileError::Transfer { errno: Errno::AGAIN, .. }))));
}

#[test]
fn notes_name_the_command_that_fixes_them() {
    let text = |note: Note| note.to_string();
    let refused =
        |errno: Errno, cause| text(Note::NoRing(RingRefusal { errno: errno.into(), cause }));
    assert!(
        refused(Errno::PERM, RingRefusalCause::Sysctl(2))
            .contains("; fix: sudo sysctl kernel.io_uring_disabled=0")
    );
    assert!(!refused(Errno::PERM, RingRefusalCause::Filter { seccomp: true }).contains("fix:"));
    let memlock = Some(MemlockRefusal { requested: 4096, limit: 8192 });
    let refused = RingRefusalCause::LockedMemory(MemlockRefusal { requested: 4096, limit: 8192 });
    for note in [
        Note::NotFixed { requested: 4096, errno: Errno::NOMEM, memlock },
        Note::NotPolled { errno: Errno::NOMEM, memlock },
        Note::NoRing(RingRefusal { errno: Errno::NOMEM.into(), cause: refused }),
    ] {
        assert_eq!(note.memlock(), memlock);
        assert!(note.to_string().contains("8192 bytes for all processes of this user"), "{note}");
        assert!(
            note.to_string().contains("; fix: ")
                && !note.without_fix().to_string().contains("fix:")
        );
    }
    assert!(
        text(Note::NotPolled { errno: Errno::OPNOTSUPP, memlock: None })
            .contains("the file does not support it")
    );
    assert!(!text(Note::NotPolled { errno: Errno::PERM, memlock: None }).contains("the file"));
    assert!(
        !text(Note::Buffered(BufferedReason::Refused(Errno::PERM))).contains("does not support")
    );
    let why = BufferedReason::Block { requested: 512, needed: 4096 };
    assert!(text(Note::Buffered(why)).contains("use blocks of 4096 bytes or more"));
}
