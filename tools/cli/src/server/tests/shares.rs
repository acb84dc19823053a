//! The share of a client while others keep theirs: memory, places in the queue, and reads that
//! are larger than both.

use super::*;
use crate::targets::file::{FileOptions, FileTarget};
use crate::targets::target::Durability;
use pinfold::Source;
use pinfold_nbd::CommandFlags;
use pinfold_nbd::reply::{CHUNK_BYTES, ReplyHeader, chunk};
use std::collections::BTreeMap;
use std::fs::File;

/// Three clients read no reply, with flushes that do not end, and one waits for 64 KiB. A queue of
/// 8 has a place for no more that come one after the other: 4, 2 and 1 are taken.
#[test]
fn a_client_that_reads_no_reply_delays_no_other() {
    let (stats, _) = serve_at(4 << 20, |[hog, mut victim], faults, door| {
        assert_eq!(victim.write(0, 0x33, 64 << 10), None);
        let flush = |command: &CommandInfo| command.opcode == pinfold_nvme::spec::nvm::FLUSH;
        faults.inject(Trigger::Matches(Box::new(flush)), Fault::Hold);
        let mut hogs = vec![hog, door.client(), door.client()];
        for (cookie, hog) in (0..).zip(&mut hogs) {
            (0..8).for_each(|_| hog.send(Command::FLUSH, cookie, 0, 0));
            // Requests that do not fit are followed by requests that do.
            for length in [1 << 20, 512 << 10, 256 << 10].into_iter().chain([64 << 10; 8]) {
                hog.send(Command::READ, cookie, 0, length);
            }
            // Each has taken its share before the next one comes.
            assert_eq!(victim.read(0, 64 << 10), Ok(vec![0x33; 64 << 10]));
        }
        // The loop goes on with each answer, and the others take all that they can get.
        for _ in 0..100 {
            assert_eq!(victim.read(0, 64 << 10), Ok(vec![0x33; 64 << 10]));
        }
        // One that comes later, too.
        assert_eq!(door.client().read(0, 64 << 10), Ok(vec![0x33; 64 << 10]));
        faults.clear();
        faults.release();
    });
    assert_eq!(stats.errors, 0, "{stats:?}");
}

/// A flush of a file that does not end keeps its own client waiting, and what comes meanwhile
/// shares the next one.
#[test]
fn a_slow_flush_of_a_file_delays_no_other_client() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let data = Arena::builder().size(8 << 20).source(Source::Plain).build_unmapped().unwrap();
    let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
    file.set_len(BASE + SIZE).unwrap();
    let options =
        FileOptions { alignment: 512, depth: 8, direct: false, poll: false, one_thread: false };
    let durability = Durability::default();
    let target = FileTarget::new(file, &path, options, data.fixed()).unwrap();
    let mut target = target.sharing(&durability);
    let (_, target) = run(&mut target, &data, 4 << 20, |[mut slow, mut victim], _| {
        let (begun, begins) = channel();
        let (ends, end) = channel::<()>();
        std::thread::scope(|scope| {
            // Another queue of the file flushes, and none other can meanwhile.
            scope.spawn(move || {
                durability.flush(|| {
                    begun.send(()).unwrap();
                    let _ = end.recv();
                    Ok(())
                })
            });
            begins.recv().unwrap();
            (0..4).for_each(|cookie| slow.send(Command::FLUSH, cookie, 0, 0));
            for _ in 0..100 {
                assert_eq!(victim.read(0, 64 << 10), Ok(vec![0; 64 << 10]));
            }
            drop(ends);
            (0..4).for_each(|_| assert_eq!(slow.reply().1, None));
        });
    });
    assert_eq!(target.flushes.requests, 4);
}

/// A read of all of the target, by clients with and without chunks, with memory for a page, a
/// piece, or half of it.
#[test]
fn a_read_larger_than_the_memory_is_answered_in_parts() {
    for budget in [PAGE, 3 * PAGE, PIECE, 2 << 20] {
        serve_at(budget, |[mut a, mut b], _, door| {
            for (byte, offset) in (1..).zip((0..SIZE).step_by(256 << 10)) {
                assert_eq!(b.write(offset, byte, 256 << 10), None);
            }
            let whole: Vec<u8> = (1..=16).flat_map(|byte| vec![byte; 256 << 10]).collect();
            // Others are answered behind it, in order or not.
            let length = u32::try_from(SIZE).unwrap();
            a.send(Command::READ, 1, 0, length);
            a.send(Command::READ, 2, 1 << 20, 512);
            a.send(Command::READ, 3, 0, length);
            let mut seen = BTreeMap::new();
            for _ in 0..3 {
                let (cookie, error) = a.reply();
                assert_eq!(error, None);
                let mut bytes = vec![0; if cookie == 2 { 512 } else { whole.len() }];
                a.0.read_exact(&mut bytes).unwrap();
                seen.insert(cookie, bytes);
            }
            assert!(seen[&1] == whole && seen[&3] == whole && seen[&2] == [5; 512]);
            let mut chunks = structured(door.connect());
            for flags in [CommandFlags::empty(), CommandFlags::DF] {
                let (bytes, error, count) = read_chunks(&mut chunks, flags, length);
                assert!(bytes == whole && error.is_none());
                assert!(flags.is_empty() || count == 1, "{count} chunks");
            }
        });
    }
}

/// Reads, and returns the data, the error, and the number of chunks with data.
fn read_chunks(
    stream: &mut UnixStream,
    flags: CommandFlags,
    length: u32,
) -> (Vec<u8>, Option<ErrorNumber>, usize) {
    let header = RequestHeader { flags, command: Command::READ, cookie: 7, offset: 0, length };
    stream.write_all(&header.to_bytes()).unwrap();
    let (mut bytes, mut error, mut count) = (vec![0; length as usize], None, 0);
    loop {
        let mut header = [0; CHUNK_BYTES];
        stream.read_exact(&mut header).unwrap();
        let (header, _) = ReplyHeader::parse(&header).unwrap().unwrap();
        let ReplyHeader::Chunk { done, kind, cookie: 7, length } = header else {
            panic!("{header:?}")
        };
        let mut payload = vec![0; length as usize];
        stream.read_exact(&mut payload).unwrap();
        match kind {
            chunk::OFFSET_DATA => {
                let (at, data) = payload.split_first_chunk().unwrap();
                let at = usize::try_from(u64::from_be_bytes(*at)).unwrap();
                bytes[at..at + data.len()].copy_from_slice(data);
                count += 1;
            }
            chunk::ERROR => {
                let number = u32::from_be_bytes(*payload.first_chunk().unwrap());
                error = ErrorNumber::from_number(number);
            }
            kind => assert_eq!(kind, chunk::NONE),
        }
        if done {
            return (bytes, error, count);
        }
    }
}

/// With chunks an error is reported behind the data; without, the end of the connection says that
/// data is missing.
#[test]
fn an_error_within_a_read_in_parts_is_no_data() {
    let fail = || Fault::Fail(Status::WRITE_FAULT.do_not_retry());
    let (stats, _) = serve_at(PIECE, |[mut a, mut b], faults, door| {
        let length = u32::try_from(SIZE).unwrap();
        let mut chunks = structured(door.connect());
        faults.inject(Trigger::Nth(9), fail());
        assert_eq!(
            read_chunks(&mut chunks, CommandFlags::empty(), length).1,
            Some(ErrorNumber::Io)
        );
        assert_eq!(read_chunks(&mut chunks, CommandFlags::empty(), length).1, None);
        faults.inject(Trigger::Nth(1), fail());
        assert_eq!(a.read(0, length), Err(ErrorNumber::Io), "its reply had not begun");
        faults.inject(Trigger::Nth(9), fail());
        a.send(Command::READ, 1, 0, length);
        a.send(Command::READ, 2, 0, 512);
        assert_eq!(a.reply(), (1, None));
        let mut bytes = Vec::new();
        a.0.read_to_end(&mut bytes).unwrap();
        assert!(bytes.len() < length as usize, "{} bytes", bytes.len());
        assert_eq!(b.read(0, 512), Ok(vec![0; 512]));
    });
    assert_eq!((stats.cut, stats.errors), (1, 3));
}

/// Its operation, its buffers and its places in the queue are returned.
#[test]
fn a_client_that_leaves_within_a_read_in_parts_leaves_nothing() {
    let (stats, _) = serve_at(PIECE, |[_a, mut b], _, door| {
        let length = u32::try_from(SIZE).unwrap();
        for chunks in [false, true] {
            let mut c = if chunks { structured(door.connect()) } else { door.client().0 };
            let header =
                RequestHeader { command: Command::READ, cookie: 7, length, ..Default::default() };
            c.write_all(&header.to_bytes()).unwrap();
            c.read_exact(&mut [0; 16 + 8192]).unwrap();
        }
        assert_eq!(b.read(0, length), Ok(vec![0; 4 << 20]));
    });
    assert_eq!(stats.cut, 0);
}
