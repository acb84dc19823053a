//! What commands do at the target.

use super::*;
use crate::targets::file::{FileOptions, FileTarget};
use pinfold::Source;
use pinfold_nbd::CommandFlags;
use std::fs::File;

/// Deallocation is advice: a controller may complete it without any effect, whatever DLFEAT says of
/// what it deallocates.
#[test]
fn zeroes_are_read_after_a_controller_has_ignored_a_deallocation() {
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
