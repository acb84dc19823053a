//! Clients of `pinfold serve` that change the same blocks while the controller is not ready: what was
//! answered is not reversed by a request that is sent again later.

use crate::client::Client;
use crate::common::{Folder, start, words};
use crate::serve::Server;
use pinfold_nbd::protocol::CommandFlags;
use pinfold_nbd::{Command as Nbd, RequestHeader};
use std::io::Write;
use std::time::{Duration, Instant};

const BYTES: u32 = 4096;
/// The controller is not ready for this long, and longer than a request waits for its last retry.
const TARGET: &str = "soft:64M,not-ready=1200ms";

/// Sends a request for the first blocks, whose payload, of a write, is `byte`.
fn send(client: &mut Client, command: Nbd, flags: CommandFlags, byte: u8) {
    let header = RequestHeader { command, flags, cookie: byte.into(), offset: 0, length: BYTES };
    let mut bytes = header.to_bytes().to_vec();
    if command == Nbd::WRITE {
        bytes.extend([byte; BYTES as usize]);
    }
    client.0.write_all(&bytes).unwrap();
}

/// Waits until the server has received all that was sent to it, and some time longer: for it to pass
/// the request to the controller.
fn wait_until_received(client: &Client, longer: Duration) {
    // SIOCOUTQ (unix(7)): the bytes that the other end has not received.
    const LEFT: rustix::ioctl::Opcode = 0x5411;
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        // SAFETY: the request stores an `int`.
        let get = unsafe { rustix::ioctl::Getter::<LEFT, i32>::new() };
        // SAFETY: it does nothing else to memory.
        if unsafe { rustix::ioctl::ioctl(&client.0, get) }.unwrap() == 0 {
            break;
        }
        assert!(Instant::now() < until, "the server does not receive");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(longer);
}

/// Asserts that the blocks hold `byte`, now and when no retry is left.
fn assert_holds(server: &Server, byte: u8, case: &str) {
    let until = Instant::now() + Duration::from_millis(1300);
    let mut client = server.client();
    loop {
        let read = client.read(0, BYTES).unwrap();
        assert!(read.iter().all(|found| *found == byte), "{case}: {:#x}, not {byte:#x}", read[0]);
        if Instant::now() > until {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The first client leaves before its request is answered, at two times and on one or two threads.
#[test]
fn a_client_that_has_left_changes_nothing_that_was_answered_later() {
    let folder = Folder::new();
    let no_hole = CommandFlags::NO_HOLE;
    for (number, (command, flags, delay_ms, threads)) in [
        (Nbd::WRITE, CommandFlags::empty(), 0, 1),
        (Nbd::WRITE, CommandFlags::FUA, 300, 1),
        (Nbd::WRITE, CommandFlags::empty(), 650, 2),
        (Nbd::WRITE_ZEROES, CommandFlags::empty(), 0, 2),
        (Nbd::WRITE_ZEROES, no_hole, 300, 1),
        (Nbd::TRIM, CommandFlags::empty(), 650, 1),
    ]
    .into_iter()
    .enumerate()
    {
        let case = format!("case {number}");
        let server = Server::start(&folder, TARGET, &format!("--threads {threads}"));
        let mut first = server.client();
        let mut second = server.client();
        send(&mut first, command, flags, 0xaa);
        wait_until_received(&first, Duration::from_millis(100));
        drop(first);
        std::thread::sleep(Duration::from_millis(delay_ms));
        send(&mut second, Nbd::WRITE, CommandFlags::FUA, 0xbb);
        assert_eq!(second.reply(), (0xbb, None), "{case}");
        assert_holds(&server, 0xbb, &case);
        server.stop();
    }
}

/// The first client stays, and both are answered; a third one reads what was answered last.
#[test]
fn requests_of_clients_that_stay_are_answered_in_their_order() {
    let folder = Folder::new();
    for threads in [1, 2] {
        let server = Server::start(&folder, TARGET, &format!("--threads {threads}"));
        let (mut first, mut second) = (server.client(), server.client());
        send(&mut first, Nbd::WRITE, CommandFlags::empty(), 0xaa);
        wait_until_received(&first, Duration::from_millis(300));
        send(&mut second, Nbd::WRITE, CommandFlags::FUA, 0xbb);
        assert_eq!(second.reply(), (0xbb, None));
        assert_eq!(first.reply(), (0xaa, None));
        assert_holds(&server, 0xbb, "two clients");
        server.stop();
        // Within one client.
        let server = Server::start(&folder, TARGET, &format!("--threads {threads}"));
        let mut client = server.client();
        for byte in [0xaa, 0xbb, 0xcc] {
            send(&mut client, Nbd::WRITE, CommandFlags::FUA, byte);
        }
        for _ in 0..3 {
            assert_eq!(client.reply().1, None);
        }
        assert_holds(&server, 0xcc, "one client");
        server.stop();
    }
}

/// A request that no one waits for any more is not carried out once the controller is ready; that
/// of a client which has only ended its own sending is.
#[test]
fn what_a_client_has_left_waiting_is_given_up() {
    let folder = Folder::new();
    for stays in [false, true] {
        let server = Server::start(&folder, TARGET, "--threads 1");
        let mut first = server.client();
        send(&mut first, Nbd::WRITE, CommandFlags::empty(), 0xaa);
        wait_until_received(&first, Duration::from_millis(100));
        if stays {
            first.0.shutdown(std::net::Shutdown::Write).unwrap();
            assert_eq!(first.reply(), (0xaa, None));
        } else {
            drop(first);
        }
        std::thread::sleep(Duration::from_millis(1500));
        assert_holds(&server, if stays { 0xaa } else { 0 }, "given up");
        server.stop();
    }
}

/// Through VFIO, of a device of `pinfold check` whose namespace is not ready for a while.
#[test]
fn a_write_to_a_device_behind_vfio_is_not_reversed() {
    let device = "check --nvme soft:64M --knob not-ready-ms=1200,late=0 --";
    for (threads, leaves) in [(2, false), (1, true)] {
        // The kernel may close the socket of a server that was killed after its end.
        let folder = Folder::new();
        let case = format!("{threads} threads, it leaves: {leaves}");
        let address = format!("unix:{}", folder.arg("socket"));
        let own = env!("CARGO_BIN_EXE_pinfold");
        let served = format!("serve vfio:0000:01:00.0 --nbd {address} --json --threads {threads}");
        let line = words(&format!("{device} {own} {served}"));
        let server = Server::started(start(&line), folder.arg("socket"));
        let (mut first, mut second) = (server.client(), server.client());
        send(&mut first, Nbd::WRITE, CommandFlags::empty(), 0xaa);
        wait_until_received(&first, Duration::from_millis(300));
        let first = if leaves {
            drop(first);
            None
        } else {
            Some(first)
        };
        send(&mut second, Nbd::WRITE, CommandFlags::FUA, 0xbb);
        assert_eq!(second.reply(), (0xbb, None), "{case}");
        if let Some(mut first) = first {
            assert_eq!(first.reply(), (0xaa, None), "{case}");
        }
        assert_holds(&server, 0xbb, &case);
        server.terminate();
        let ended = server.wait();
        // The signal reaches check, which ends the server.
        assert_eq!(ended.code, Some(130), "{case}: {ended:#?}");
        assert!(ended.err.contains("0 errors, 0 warnings"), "{case}: {ended:#?}");
    }
}
