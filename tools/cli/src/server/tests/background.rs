//! Work that may block its caller runs beside the event loop, and wakes it: a sleep here lasts a
//! minute.

use super::*;
use crate::server::extents::{Extents, Span};
use crate::targets::file::{FileOptions, FileTarget};
use crate::targets::trimmer::punch;
use pinfold::Source;
use pinfold_nbd::protocol::ExtentFlags;
use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A file of the served size, and memory for its target.
struct Disk {
    folder: tempfile::TempDir,
    file: File,
    data: ArenaMemory,
}

impl Disk {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(folder.path().join("disk"))
            .unwrap();
        file.set_len(BASE + SIZE).unwrap();
        let data = Arena::builder().size(8 << 20).source(Source::Plain).build_unmapped().unwrap();
        Self { folder, file, data }
    }

    fn target(&self, direct: bool) -> FileTarget<'_, Buffer> {
        let options =
            FileOptions { alignment: 512, depth: 8, direct, poll: false, one_thread: false };
        let path = self.folder.path().join("disk");
        FileTarget::new(self.file.try_clone().unwrap(), &path, options, self.data.fixed()).unwrap()
    }
}

/// Returns a question about extents.
fn question(cookie: u64, length: u32) -> [u8; RequestHeader::BYTES] {
    let command = Command::BLOCK_STATUS;
    RequestHeader { command, cookie, offset: 0, length, ..Default::default() }.to_bytes()
}

fn ask(stream: &mut UnixStream, cookie: u64, length: u32) {
    stream.write_all(&question(cookie, length)).unwrap();
}

/// Returns the cookie of an answer, and the length of its extent.
fn answer(stream: &mut UnixStream) -> (u64, u32) {
    let mut reply = [0; 32];
    stream.read_exact(&mut reply).unwrap();
    let length = u32::from_be_bytes(*reply[24..].first_chunk().unwrap());
    (u64::from_be_bytes(*reply[8..].first_chunk().unwrap()), length)
}

/// Pages that are not in the cache are read by the device, holes are punched and data is flushed by
/// other threads: none of them waits for the end of a sleep.
#[test]
fn each_completion_wakes_a_loop_that_sleeps_for_long() {
    for direct in [false, true] {
        let disk = Disk::new();
        disk.file.write_all_at(&[0x44; 1 << 20], BASE).unwrap();
        disk.file.sync_all().unwrap();
        let finder = ExtentFinder::of_file(&disk.file).unwrap();
        let mut target = disk.target(direct);
        let start = Instant::now();
        run_finding(&mut target, &disk.data, 4 << 20, Some(&finder), |[mut a, _b], door| {
            let mut asks = structured(door.connect());
            for at in (0..1 << 20).step_by(16 << 10) {
                fadvise(&disk.file, 0, None, Advice::DontNeed).unwrap();
                assert_eq!(a.read(at, 4096), Ok(vec![0x44; 4096]));
                assert_eq!(a.write(at, 0x55, 4096), None);
                assert_eq!(a.simple(Command::FLUSH, 0, 0), None);
                assert_eq!(a.simple(Command::TRIM, at, 4096), None);
                ask(&mut asks, at, 512);
                assert_eq!(answer(&mut asks), (at, 512));
            }
        });
        assert!(start.elapsed() < Duration::from_secs(59), "{:?}", start.elapsed());
    }
}

/// Holds back each trim as long as a test has it.
static TRIMS: Mutex<()> = Mutex::new(());

fn punch_later(file: &File, offset: u64, len: u64) -> rustix::io::Result<()> {
    let _may = TRIMS.lock().unwrap_or_else(PoisonError::into_inner);
    punch(file, offset, len)
}

#[test]
fn trims_that_take_long_delay_no_other_client() {
    let disk = Disk::new();
    disk.file.write_all_at(&[0x44; 5 << 20], 0).unwrap();
    let mut target = disk.target(false).punching(punch_later);
    let (_, target) = run(&mut target, &disk.data, 4 << 20, |[mut slow, mut victim], _| {
        let held = TRIMS.lock().unwrap_or_else(PoisonError::into_inner);
        for cookie in 0..20 {
            let command = if cookie % 2 == 0 { Command::TRIM } else { Command::WRITE_ZEROES };
            slow.send(command, cookie, cookie * 4096, 4096);
        }
        for _ in 0..100 {
            assert_eq!(victim.read(1 << 20, 4096), Ok(vec![0x44; 4096]));
        }
        drop(held);
        (0..20).for_each(|cookie| assert_eq!(slow.reply(), (cookie, None)));
        assert_eq!(victim.read(0, 20 * 4096), Ok(vec![0; 20 * 4096]));
        assert_eq!(victim.read(20 * 4096, 4096), Ok(vec![0x44; 4096]));
    });
    assert_eq!((target.trims.requests, target.writes.requests), (20, 0));
}

/// At the end of the server the trims that are left are waited for.
#[test]
fn trims_that_were_received_are_done_before_the_end() {
    let disk = Disk::new();
    disk.file.write_all_at(&[0x44; 5 << 20], 0).unwrap();
    let mut target = disk.target(false).punching(punch_later);
    let held = TRIMS.lock().unwrap_or_else(PoisonError::into_inner);
    let (_, target) = run(&mut target, &disk.data, 4 << 20, |[mut a, _b], door| {
        // The queue of 8 has places for four requests of a client.
        (0..3).for_each(|cookie| a.send(Command::TRIM, cookie, cookie * 4096, 4096));
        assert_eq!(a.read(1 << 20, 512), Ok(vec![0x44; 512]), "they have been received");
        door.close();
        std::thread::sleep(Duration::from_millis(50));
        drop(held);
        (0..3).for_each(|cookie| assert_eq!(a.reply(), (cookie, None)));
    });
    assert_eq!(target.trims.requests, 3);
    let mut bytes = vec![1; 4 * 4096];
    disk.file.read_exact_at(&mut bytes, BASE).unwrap();
    assert!(bytes[..3 * 4096].iter().all(|byte| *byte == 0));
    assert_eq!(bytes[3 * 4096], 0x44);
}

/// Finds everything allocated when it may, and says what it is asked before.
fn finder() -> (ExtentFinder, std::sync::mpsc::Receiver<u32>, Sender<()>) {
    let ((asked, asks), (may, permitted)) = (channel(), channel());
    let find = move |span: Span| -> Extents {
        asked.send(span.length).unwrap();
        // The test may be over.
        let _ = permitted.recv();
        vec![(span.length, ExtentFlags::empty())]
    };
    (ExtentFinder::start(find).unwrap(), asks, may)
}

#[test]
fn extents_that_take_long_to_find_delay_no_other_client() {
    const FLOOD: u64 = 300;
    let disk = Disk::new();
    let (finder, asked, may) = finder();
    let mut target = disk.target(false);
    let extents = Some(&finder);
    run_finding(&mut target, &disk.data, 4 << 20, extents, |[mut victim, _b], door| {
        let [mut flood, mut other] = [(); 2].map(|()| structured(door.connect()));
        let questions: Vec<_> = (0..FLOOD).flat_map(|cookie| question(cookie, 512)).collect();
        // By one call: the socket has space for few messages that the server does not receive.
        flood.write_all(&questions).unwrap();
        assert_eq!(asked.recv(), Ok(512));
        ask(&mut other, 7, 1024);
        for _ in 0..100 {
            assert_eq!(victim.read(0, 4096), Ok(vec![0; 4096]));
        }
        // Its client has one question there: the other's is the next one.
        may.send(()).unwrap();
        assert_eq!(asked.recv(), Ok(1024));
        (0..FLOOD).for_each(|_| may.send(()).unwrap());
        assert_eq!(answer(&mut other), (7, 1024));
        (0..FLOOD).for_each(|cookie| assert_eq!(answer(&mut flood), (cookie, 512)));
    });
}

/// Whether they take no reply any more, or break the rules. Each had half of the memory.
#[test]
fn clients_that_leave_before_their_answer_keep_no_memory() {
    let disk = Disk::new();
    let (finder, asked, may) = finder();
    let mut target = disk.target(false);
    let extents = Some(&finder);
    run_finding(&mut target, &disk.data, 2 * PAGE, extents, |[mut victim, _b], door| {
        for number in 0..40 {
            let mut leaves = structured(door.connect());
            ask(&mut leaves, 1, 512);
            assert_eq!(asked.recv(), Ok(512));
            if number % 2 == 0 {
                leaves.write_all(&[0xff; 28]).unwrap();
                assert_eq!(leaves.read(&mut [0]).unwrap_or(0), 0, "closed");
            }
            drop(leaves);
            assert_eq!(victim.read(0, 4096), Ok(vec![0; 4096]));
            may.send(()).unwrap();
        }
        assert_eq!(victim.read(0, 8192), Ok(vec![0; 8192]));
    });
    drop(target);
    assert_eq!(disk.data.stats().frames_in_use, 0);
}

/// Requests made before the end of the server are answered; where no extents can be found,
/// everything is reported as allocated.
#[test]
fn an_answer_is_sent_to_a_client_that_asks_no_more() {
    let disk = Disk::new();
    let (finder, asked, may) = finder();
    let mut target = disk.target(false);
    let extents = Some(&finder);
    run_finding(&mut target, &disk.data, 4 << 20, extents, |[mut victim, _b], door| {
        let mut asks = structured(door.connect());
        ask(&mut asks, 1, 512);
        ask(&mut asks, 2, 1024);
        asks.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(asked.recv(), Ok(512));
        assert_eq!(victim.read(0, 4096), Ok(vec![0; 4096]));
        (0..2).for_each(|_| may.send(()).unwrap());
        assert_eq!((answer(&mut asks), answer(&mut asks)), ((1, 512), (2, 1024)));
        assert_eq!(asks.read(&mut [0]).unwrap(), 0, "closed");
    });
    let mut target = disk.target(false);
    run(&mut target, &disk.data, 4 << 20, |_, door| {
        let mut asks = structured(door.connect());
        ask(&mut asks, 3, 2048);
        assert_eq!(answer(&mut asks), (3, 2048));
    });
}
