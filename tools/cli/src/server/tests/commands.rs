//! The effects of commands at the target.

use super::*;
use crate::targets::file::{FileOptions, FileTarget};
use pinfold::Source;
use pinfold_nbd::CommandFlags;
use std::fs::File;

/// Deallocation is advice: a controller may complete it without any effect, whatever DLFEAT says of
/// what it deallocates.
#[test]
fn zeroes_are_read_where_a_deallocation_was_ignored() {
    let ignored = Trigger::Matches(Box::new(|command| command.queue != 0 && command.opcode == 9));
    let (_, target) = serve(4 << 20, |[mut a, _b], faults| {
        faults.inject(ignored, Fault::Fail(Status::SUCCESS));
        assert_eq!(a.write(0, 0xaa, 64 << 10), None);
        assert_eq!(a.simple(Command::WRITE_ZEROES, 0, 64 << 10), None);
        assert_eq!(a.read(0, 64 << 10), Ok(vec![0; 64 << 10]));
    });
    assert_eq!(target.trims.requests, 0);
}

fn request(client: &mut Client, command: Command, flags: CommandFlags) -> Option<ErrorNumber> {
    let header = RequestHeader { command, flags, cookie: 5, offset: 0, length: 4096 };
    client.0.write_all(&header.to_bytes()).unwrap();
    if command == Command::WRITE {
        client.0.write_all(&[0x77; 4096]).unwrap();
    }
    client.reply().1
}

/// Each is answered after a flush of the target, and without the flag none is flushed.
#[test]
fn a_write_with_fua_is_flushed_once() {
    for (flags, flushes) in [(CommandFlags::FUA, 3), (CommandFlags::empty(), 0)] {
        let (_, target) = serve(4 << 20, |[mut a, _b], _| {
            for command in [Command::WRITE, Command::TRIM, Command::WRITE_ZEROES] {
                assert_eq!(request(&mut a, command, flags), None);
            }
        });
        assert_eq!(
            (target.flushes.requests, target.writes.requests, target.trims.requests),
            (flushes, 2, 1)
        );
    }
}

/// A file's holes read as zeroes, but a client may want the space to stay allocated.
#[test]
fn zeroes_without_holes_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let data = Arena::builder().size(8 << 20).source(Source::Plain).build_unmapped().unwrap();
    for (flags, writes) in [(CommandFlags::NO_HOLE, 2), (CommandFlags::empty(), 1)] {
        let file =
            File::options().create(true).truncate(true).read(true).write(true).open(&path).unwrap();
        file.set_len(BASE + SIZE).unwrap();
        let options =
            FileOptions { alignment: 512, depth: 8, direct: false, poll: false, one_thread: false };
        let mut target = FileTarget::new(file, &path, options, data.fixed()).unwrap();
        let (_, target) = run(&mut target, &data, 4 << 20, |[mut a, _b], _| {
            assert_eq!(request(&mut a, Command::WRITE, CommandFlags::empty()), None);
            assert_eq!(request(&mut a, Command::WRITE_ZEROES, flags), None);
        });
        assert_eq!((target.writes.requests, target.trims.requests), (writes, 2 - writes));
        assert_eq!(std::fs::read(&path).unwrap(), [0; 5 << 20]);
    }
}

// Behaviour at the target's limits: interrupts that no thread waits for, buffers that do not come
// back, clients that leave.

/// The controller's interrupt stays signalled after the last completion, and must not end every
/// wait.
#[test]
fn an_idle_loop_sleeps() {
    let (clients, _) = serve(4 << 20, |[mut a, _b], _| {
        assert_eq!(a.simple(Command::FLUSH, 0, 0), None);
        std::thread::sleep(Duration::from_millis(500));
    });
    assert!(clients.turns < 1000, "{clients:?}");
}

#[test]
fn a_last_flush_that_fails_is_counted() {
    for fails in [false, true] {
        let (stats, _) = serve(4 << 20, |[mut a, _b], faults| {
            assert_eq!(a.write(0, 1, 4096), None);
            if fails {
                let flush =
                    |command: &CommandInfo| command.opcode == pinfold_nvme::spec::nvm::FLUSH;
                let failure = Fault::Fail(Status::WRITE_FAULT.do_not_retry());
                faults.inject(Trigger::Matches(Box::new(flush)), failure);
            }
        });
        assert_eq!((stats.unflushed, stats.errors), (u64::from(fails), 0));
    }
}

/// Each tries when another has failed to get some, and at times without an event.
#[test]
fn clients_that_wait_for_memory_do_not_wake_each_other() {
    let (stats, _) = serve_at(2 * PAGE, |[mut a, mut b], faults, door| {
        let [mut c, mut d] = [(); 2].map(|()| door.client());
        let (seen, taken) = channel();
        faults.inject(Trigger::Matches(Box::new(move |_| seen.send(()).is_ok())), Fault::Hold);
        c.send(Command::READ, 1, 0, 4096);
        d.send(Command::READ, 1, 0, 4096);
        // Both pages are at the controller.
        (0..2).for_each(|_| taken.recv_timeout(Duration::from_secs(60)).unwrap());
        a.send(Command::READ, 1, 0, 4096);
        b.send(Command::READ, 1, 0, 4096);
        std::thread::sleep(Duration::from_millis(500));
        faults.clear();
        faults.release();
        for client in [&mut a, &mut b, &mut c, &mut d] {
            assert_eq!(client.reply(), (1, None));
            client.0.read_exact(&mut [0; 4096]).unwrap();
        }
    });
    assert!(stats.memory_waits > 0 && stats.memory_waits < 2000, "{stats:?}");
}

// Requests with a payload that are refused: answered once the payload has been received, wherever
// the stream is cut.

/// The payload of a refused write: short, so that every boundary can be tried.
const PAYLOAD: usize = 64;

/// Returns a read of one block, a refused write, and a read again, as one stream; and where the
/// write's payload ends.
fn stream(refused: RequestHeader) -> (Vec<u8>, usize) {
    let read = |cookie, offset| RequestHeader {
        command: Command::READ,
        cookie,
        offset,
        length: 512,
        ..Default::default()
    };
    let mut bytes = read(1, 0).to_bytes().to_vec();
    bytes.extend(refused.to_bytes());
    bytes.extend([0xdd; PAYLOAD]);
    let end = bytes.len();
    bytes.extend(read(3, 512).to_bytes());
    (bytes, end)
}

/// Returns what has arrived, without waiting.
fn arrived(client: &mut Client) -> Vec<u8> {
    client.0.set_nonblocking(true).unwrap();
    let mut bytes = Vec::new();
    let error = client.0.read_to_end(&mut bytes).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    client.0.set_nonblocking(false).unwrap();
    bytes
}

/// Each answer shows that another iteration of the loop is over: earlier requests have been handled
/// in the second at the latest.
fn let_the_loop_turn(client: &mut Client) {
    for _ in 0..2 {
        assert_eq!(client.simple(Command(77), 0, 0), Some(ErrorNumber::Invalid));
    }
}

#[test]
fn a_refusal_follows_its_payload_wherever_it_is_cut() {
    let length = u32::try_from(PAYLOAD).unwrap();
    let beyond = RequestHeader {
        command: Command::WRITE,
        cookie: 2,
        offset: SIZE,
        length,
        ..Default::default()
    };
    // The replies are told apart by their cookies, since a read may be answered behind the refusal.
    let has = |bytes: &[u8], cookie: u8| {
        bytes.windows(8).any(|window| window == [0, 0, 0, 0, 0, 0, 0, cookie])
    };
    serve(4 << 20, |[mut a, mut b], _| {
        assert_eq!(a.write(0, 0xaa, 1024), None);
        let (bytes, end) = stream(beyond);
        for cut in 1..bytes.len() {
            a.0.write_all(&bytes[..cut]).unwrap();
            let_the_loop_turn(&mut b);
            let early = arrived(&mut a);
            assert!(
                cut >= end || !has(&early, 2),
                "answered {} bytes before its payload's end",
                end - cut
            );
            a.0.write_all(&bytes[cut..]).unwrap();
            let mut rest = vec![0; 16 + 512 + 16 + 16 + 512 - early.len()];
            a.0.read_exact(&mut rest).unwrap();
            let all = [early, rest].concat();
            assert!((1..=3).all(|cookie| has(&all, cookie)), "cut at {cut}");
            assert_eq!(all.iter().filter(|byte| **byte == 0xaa).count(), 1024, "cut at {cut}");
        }
    });
}

/// Nothing can be said to a client while it sends its payload, and to receive without end is no
/// answer either.
#[test]
fn a_payload_beyond_the_limit_ends_the_connection() {
    let (clients, _) = serve(4 << 20, |[mut a, mut b], _| {
        let most = pinfold_nbd::RequestReader::MAX_PAYLOAD;
        a.send(Command::WRITE, 1, SIZE, most);
        let piece = vec![0; 1 << 20];
        (0..most >> 20).for_each(|_| a.0.write_all(&piece).unwrap());
        assert_eq!(a.reply(), (1, Some(ErrorNumber::NoSpace)), "the longest payload is discarded");
        b.send(Command::WRITE, 1, SIZE, most + 1);
        assert_eq!(b.0.read(&mut [0]).unwrap(), 0, "closed without a reply");
    });
    assert_eq!(clients.dropped, 1);
}

/// The payload of a write fails at the target, and the rest of it is still on its way.
#[test]
fn an_error_of_the_target_follows_the_payload() {
    serve(4 << 20, |[mut a, mut b], faults| {
        faults.inject(Trigger::Nth(1), Fault::Fail(Status::WRITE_FAULT.do_not_retry()));
        a.send_payload(Command::WRITE, 1, 0, 1 << 20, &[0x55; PIECE]);
        let_the_loop_turn(&mut b);
        assert_eq!(arrived(&mut a), b"");
        a.0.write_all(&[0x55; (1 << 20) - PIECE]).unwrap();
        assert_eq!(a.reply(), (1, Some(ErrorNumber::Io)));
        assert_eq!(a.write(0, 0x66, 512), None);
    });
}

/// Also at the end of the server: the client may finish a payload that it has begun.
#[test]
fn a_payload_that_has_begun_is_written_after_the_signal() {
    let (clients, _) = serve_at(4 << 20, |[mut a, mut b], _, door| {
        a.send_payload(Command::WRITE, 1, 0, 1 << 20, &[0x55; 1 << 19]);
        b.send_payload(Command::WRITE, 2, SIZE, 1 << 20, &[0x55; 1 << 19]);
        let mut c = door.client();
        let_the_loop_turn(&mut c);
        door.close();
        assert_eq!(c.0.read(&mut [0]).unwrap(), 0, "it has nothing to finish");
        for client in [&mut a, &mut b] {
            assert_eq!(arrived(client), b"");
            client.0.write_all(&[0x55; 1 << 19]).unwrap();
        }
        assert_eq!(a.reply(), (1, None));
        assert_eq!(b.reply(), (2, Some(ErrorNumber::NoSpace)));
    });
    assert_eq!(clients.cut, 0);
}
