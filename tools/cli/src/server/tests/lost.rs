//! A target that does not give buffers back, since a device may still reach them, and clients that
//! leave.

use super::*;
use crate::server::address::NbdAddress;
use crate::server::listener::Listener;
use crate::server::run::{self, ServeOptions};
use crate::signal::Interrupt;
use crate::targets::target::{Completion, Request, SubmitError, TargetError, TargetInfo};
use pinfold::Source;
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Answers at once, or not at all.
struct Losing<'l> {
    info: TargetInfo,
    loses: &'l AtomicBool,
    lost: Vec<Buffer>,
    completed: Vec<Completion<Buffer>>,
}

/// A queue whose events cannot be waited for, and one that notes its last flush.
struct Ends {
    info: TargetInfo,
    descriptor: Option<std::fs::File>,
    synced: bool,
}

impl Target<Buffer> for Ends {
    fn info(&self) -> &TargetInfo {
        &self.info
    }
    fn submit(
        &mut self,
        Request { io, buffer }: Request<Buffer>,
    ) -> Result<(), SubmitError<Buffer>> {
        let error = TargetError::Timeout { target: "ends".into(), io: Box::new(io) };
        Err(SubmitError { buffer: Some(buffer), error })
    }
    fn poll(&mut self, _: &mut Vec<Completion<Buffer>>) -> Result<(), TargetError> {
        Ok(())
    }
    fn wait(&mut self, _: &mut Vec<Completion<Buffer>>) -> Result<(), TargetError> {
        Ok(())
    }
    fn completion_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
        self.descriptor.as_ref().map(std::os::fd::AsFd::as_fd)
    }
    fn sync(&mut self, _: &Interrupt) -> Result<(), TargetError> {
        self.synced = true;
        Ok(())
    }
}

/// The others end as after a signal: what they have done is flushed and reported beside the error.
#[test]
fn a_loop_that_fails_ends_the_server_with_its_report() {
    let folder = tempfile::tempdir().unwrap();
    let data = Arena::builder().size(8 << 20).source(Source::Plain).build_unmapped().unwrap();
    // epoll does not take a regular file.
    let descriptor = std::fs::File::create(folder.path().join("regular")).unwrap();
    let mut sound = Ends { info: info("sound"), descriptor: None, synced: false };
    let mut broken = Ends { info: info("broken"), descriptor: Some(descriptor), synced: false };
    let export = Export::new("", SIZE, TransmissionFlags::empty());
    let options = ServeOptions {
        export: &export,
        base: 0,
        file: None,
        watch: None,
        tls: None,
        writable: true,
        connections: 1,
        depth: 8,
        budget: 1 << 20,
    };
    let address = NbdAddress::Unix(folder.path().join("socket"));
    let listener = Listener::bind(&address).unwrap();
    let targets: Vec<&mut (dyn Target<Buffer> + Send)> = vec![&mut sound, &mut broken];
    let served = run::run(listener, targets, &data, options, &Interrupt::default()).unwrap();
    let failed = served.failed.unwrap().to_string();
    assert!(failed.contains("epoll_ctl"), "{failed}");
    assert!(sound.synced);
}

fn info(name: &str) -> TargetInfo {
    TargetInfo {
        name: name.into(),
        capacity: Some(SIZE),
        block: 512,
        alignment: 512,
        max_depth: 8,
        max_transfer: PIECE,
        no_trim: None,
        trim_zeroes: false,
    }
}

impl Target<Buffer> for Losing<'_> {
    fn info(&self) -> &TargetInfo {
        &self.info
    }

    fn submit(
        &mut self,
        Request { io, buffer }: Request<Buffer>,
    ) -> Result<(), SubmitError<Buffer>> {
        let completion = if self.loses.load(Ordering::Relaxed) {
            self.lost.push(buffer);
            let error = TargetError::Timeout { target: "losing".into(), io: Box::new(io) };
            Completion { io, buffer: None, result: Err(error) }
        } else {
            Completion { io, buffer: Some(buffer), result: Ok(io.len) }
        };
        self.completed.push(completion);
        Ok(())
    }

    fn poll(&mut self, completed: &mut Vec<Completion<Buffer>>) -> Result<(), TargetError> {
        completed.append(&mut self.completed);
        Ok(())
    }

    fn wait(&mut self, completed: &mut Vec<Completion<Buffer>>) -> Result<(), TargetError> {
        self.poll(completed)
    }

    fn sync(&mut self, _: &Interrupt) -> Result<(), TargetError> {
        Ok(())
    }
}

/// Runs `test` with 1 MiB of memory, of which a client uses at most half.
fn losing(test: impl FnOnce([Client; 2], &AtomicBool)) -> ServeStats {
    let data = Arena::builder().size(8 << 20).source(Source::Plain).build_unmapped().unwrap();
    let loses = AtomicBool::new(false);
    let mut target =
        Losing { info: info("losing"), loses: &loses, lost: Vec::new(), completed: Vec::new() };
    let (stats, _) = run(&mut target, &data, 1 << 20, |clients, _| test(clients, &loses));
    let lost =
        std::mem::take(&mut target.lost).iter().map(|buffer| buffer.len() as u64).sum::<u64>();
    assert_eq!(stats.lost, lost);
    assert_eq!(data.stats().frames_in_use, 0, "all other memory is returned");
    stats
}

#[test]
fn a_client_whose_memory_is_lost_is_still_answered() {
    let piece = u32::try_from(PIECE).unwrap();
    let stats = losing(|[mut a, mut b], loses| {
        loses.store(true, Ordering::Relaxed);
        // A write and a read: together all that one client may have at a time.
        assert_eq!(a.write(0, 1, piece), Some(ErrorNumber::Io));
        assert_eq!(a.read(0, piece), Err(ErrorNumber::Io));
        assert_eq!(a.simple(Command::FLUSH, 0, 0), Some(ErrorNumber::Io));
        loses.store(false, Ordering::Relaxed);
        for client in [&mut a, &mut b] {
            assert!(client.read(0, piece).is_ok());
            assert_eq!(client.write(0, 1, piece), None);
            // More than is left, part by part.
            assert!(client.read(0, 4 * piece).is_ok());
        }
    });
    assert_eq!((stats.lost, stats.errors), (2 * u64::from(piece) + 4096, 3));
}

#[test]
fn without_memory_every_request_is_refused() {
    losing(|[mut a, mut b], loses| {
        loses.store(true, Ordering::Relaxed);
        // The second half of the second payload finds nothing left.
        assert_eq!(a.write(0, 1, 1 << 19), Some(ErrorNumber::Io));
        assert_eq!(b.write(0, 1, 1 << 20), Some(ErrorNumber::Io));
        loses.store(false, Ordering::Relaxed);
        for client in [&mut a, &mut b] {
            assert_eq!(client.read(0, 512), Err(ErrorNumber::NoMemory));
            assert_eq!(client.write(0, 1, 100 << 10), Some(ErrorNumber::NoMemory));
            for command in [Command::FLUSH, Command::WRITE_ZEROES] {
                assert_eq!(client.simple(command, 0, 512), Some(ErrorNumber::NoMemory));
            }
            let disconnect = RequestHeader { command: Command::DISCONNECT, ..Default::default() };
            client.0.write_all(&disconnect.to_bytes()).unwrap();
            assert_eq!(client.0.read(&mut [0]).unwrap(), 0, "closed");
        }
    });
}

/// Four pieces of a large read are at the controller at a time, and no more follow for a client
/// that is gone.
#[test]
fn a_read_ends_with_its_client_and_a_write_does_not() {
    let (clients, target) = serve_at(8 << 20, |[mut a, mut b], faults, door| {
        let mut c = door.client();
        let (seen, taken) = channel();
        faults.inject(Trigger::Matches(Box::new(move |_| seen.send(()).is_ok())), Fault::Hold);
        // Behind the first parts of the read, which would wait for it otherwise.
        c.send_payload(Command::WRITE, 1, 3 << 20, 4096, &[7; 4096]);
        c.0.write_all(
            &RequestHeader { command: Command::DISCONNECT, ..Default::default() }.to_bytes(),
        )
        .unwrap();
        a.send(Command::READ, 1, 0, 4 << 20);
        (0..5).for_each(|_| taken.recv_timeout(Duration::from_secs(60)).unwrap());
        drop((a, c));
        // An answer to another client shows that the loop has seen it: they come in one event at
        // the latest.
        faults.clear();
        assert_eq!(b.read(0, 0), Ok(Vec::new()));
        faults.release();
        while b.read(3 << 20, 4096) != Ok(vec![7; 4096]) {}
    });
    let read = target.reads.bytes / (256 << 10);
    assert!((4..16).contains(&read), "{read} of 16 pieces; {clients:?}");
}

/// Nothing of the read is at the controller, whose queue is full: no completion passes on the rest
/// of its parts.
#[test]
fn a_read_that_has_not_begun_ends_with_its_client() {
    let (stats, _) = serve_at(4 << 20, |[mut a, mut b], faults, door| {
        let mut c = door.client();
        let (seen, taken) = channel();
        faults.inject(Trigger::Matches(Box::new(move |_| seen.send(()).is_ok())), Fault::Hold);
        // As many clients as the queue has places: there is none for one that comes later.
        let mut others: Vec<_> = (0..7).map(|_| door.client()).collect();
        others.iter_mut().chain([&mut b]).for_each(|client| client.send(Command::READ, 1, 0, 4096));
        (0..8).for_each(|_| taken.recv_timeout(Duration::from_secs(60)).unwrap());
        a.send(Command::READ, 1, 0, 2 << 20);
        // Each answer is that of a later iteration.
        let iterate = |client: &mut Client| {
            assert_eq!(client.simple(Command(77), 0, 0), Some(ErrorNumber::Invalid))
        };
        iterate(&mut c);
        iterate(&mut c);
        drop(a);
        iterate(&mut c);
        iterate(&mut c);
        faults.clear();
        faults.release();
        for client in others.iter_mut().chain([&mut b]) {
            assert_eq!(client.reply().1, None);
            client.0.read_exact(&mut [0; 4096]).unwrap();
        }
    });
    assert_eq!(stats.cut, 0, "nothing is left of it");
}

/// Replies wait for it, so that no further request of its is received, and it leaves. Whole, in
/// parts, and over TCP, which is reset.
#[test]
fn requests_behind_replies_that_are_not_taken_are_executed() {
    for budget in [8 << 20, PIECE] {
        let (stats, _) = serve_at(budget, |[a, mut b], _, door| {
            leave_behind_replies(a, 0x11, &mut b);
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            // All that it sends is here when it leaves: the reset drops what is not.
            client.set_nodelay(true).unwrap();
            let (ours, _) = listener.accept().unwrap();
            // So that a part of the replies waits in the server.
            set_socket_recv_buffer_size(&client, 64 << 10).unwrap();
            set_socket_send_buffer_size(&ours, 64 << 10).unwrap();
            door.admit(Stream::tcp(ours).unwrap());
            leave_behind_replies(Client::negotiate(client).0, 0x22, &mut b);
        });
        assert_eq!((stats.dropped, stats.cut), (0, 0), "{stats:?}");
    }
}

/// Makes `client` leave without its replies, and waits until `other` reads the data written behind
/// them.
fn leave_behind_replies(mut client: Client<impl Read + Write>, byte: u8, other: &mut Client) {
    client.send(Command::READ, 1, 0, 4 << 20);
    client.send_payload(Command::WRITE, 2, 8192, 8192, &[byte; 8192]);
    // Its reply has begun: the request is at the target, or its data is.
    assert_eq!(client.reply(), (1, None));
    // More requests than replies may wait, which are refused at once, and one more write.
    let refused =
        RequestHeader { command: Command(77), ..Default::default() }.to_bytes().repeat(1100);
    client.0.write_all(&refused).unwrap();
    client.send_payload(Command::WRITE, 3, 65536, 512, &[byte; 512]);
    drop(client);
    let end = Instant::now() + Duration::from_secs(60);
    for (offset, length) in [(8192, 8192), (65536, 512)] {
        while other.read(offset, length) != Ok(vec![byte; length as usize]) {
            assert!(Instant::now() < end, "the write of {byte:#x} at {offset} was lost");
        }
    }
}
