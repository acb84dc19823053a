//! An event loop over the model controller with injected faults: an error for the client that
//! asked, and for no other.

use super::client::Client;
use super::event_loop::{EventLoop, Inbox, Shared};
use super::extents::ExtentFinder;
use super::operation::ServeStats;
use super::payload::{PAGE, PIECE, Payloads};
use super::stream::Stream;
use crate::args::Protect;
use crate::engine::worker::WorkerStats;
use crate::signal::Interrupt;
use crate::targets::nvme::{NvmeOptions, NvmeTarget};
use crate::targets::target::Target;
use pinfold::{Arena, ArenaMemory, Buffer, Domain, MappingPolicy};
use pinfold_nbd::{Command, ErrorNumber, Export, RequestHeader, TransmissionFlags};
use pinfold_nvme::EventFd;
use pinfold_nvme::driver::{Config, Controller};
use pinfold_nvme::spec::Status;
use pinfold_nvme_model::{
    CommandInfo, Fault, Faults, MemoryMedia, ModelConfig, ModelController, Namespace, Trigger,
};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

mod background;
mod commands;
mod lost;
mod shares;

const SIZE: u64 = 4 << 20;
/// The start of the export in the target.
const BASE: u64 = 1 << 20;

impl<S: Read + Write> Client<S> {
    fn send_payload(
        &mut self,
        command: Command,
        cookie: u64,
        offset: u64,
        length: u32,
        payload: &[u8],
    ) {
        self.send(command, cookie, offset, length);
        self.0.write_all(payload).unwrap();
    }

    fn write(&mut self, offset: u64, byte: u8, len: u32) -> Option<ErrorNumber> {
        self.send_payload(Command::WRITE, 1, offset, len, &vec![byte; len as usize]);
        self.reply().1
    }

    fn simple(&mut self, command: Command, offset: u64, length: u32) -> Option<ErrorNumber> {
        self.send(command, 3, offset, length);
        self.reply().1
    }
}

/// The source of more clients, and the end of the event loop.
struct Door<'d> {
    streams: &'d Sender<Stream>,
    wake: &'d EventFd,
    interrupt: &'d Interrupt,
}

impl Door<'_> {
    fn connect(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.admit(Stream::unix(theirs).unwrap());
        ours
    }

    /// Ends the event loop.
    fn close(&self) {
        self.interrupt.raise();
        self.wake.signal();
    }

    fn admit(&self, stream: Stream) {
        self.streams.send(stream).unwrap();
        self.wake.signal();
    }

    fn client(&self) -> Client {
        let (client, size) = Client::greet(self.connect());
        assert_eq!(size, SIZE);
        client
    }
}

/// Runs `test` with two clients of an event loop over the model controller; returns what the loop
/// has done.
fn serve(budget: usize, test: impl FnOnce([Client; 2], &Faults)) -> (ServeStats, WorkerStats) {
    serve_at(budget, |clients, faults, _| test(clients, faults))
}

fn serve_at(
    budget: usize,
    test: impl FnOnce([Client; 2], &Faults, &Door<'_>),
) -> (ServeStats, WorkerStats) {
    let domain = Domain::soft().unwrap();
    let build = |size: u64, policy| {
        Arena::builder().size(size).mapping_policy(policy).build(&domain).unwrap()
    };
    let (data, control) =
        (build(8 << 20, MappingPolicy::PerUse), build(4 << 20, MappingPolicy::Whole));
    let namespace = Namespace::new(Arc::new(MemoryMedia::new(BASE + SIZE).unwrap()), 512).unwrap();
    let config = ModelConfig { vectors: 2, ..ModelConfig::new(vec![namespace]) };
    let model = ModelController::spawn(domain.port().unwrap(), config).unwrap();
    let config = Config { timeout: Duration::from_secs(60), ..Config::default() };
    let controller = Controller::start(model.registers(), control, config).unwrap();
    let namespace = controller.namespaces()[0];
    let vector = pinfold_nvme::driver::Vector { number: 1, interrupt: model.interrupt(1).unwrap() };
    let options = NvmeOptions {
        domain: &domain,
        protect: Protect::Batch,
        controller,
        namespace,
        depth: 8,
        vector: Some(vector),
        flush_limit: Duration::from_secs(5),
    };
    let mut target = NvmeTarget::new("soft".into(), options).unwrap();
    let stats =
        run(&mut target, &data, budget, |clients, door| test(clients, &model.faults(), door));
    drop(target);
    assert_eq!(data.stats().frames_in_use, 0, "all memory is returned");
    stats
}

/// Runs `test` with two clients of an event loop over `target`.
fn run(
    target: &mut (dyn Target<Buffer> + Send),
    data: &ArenaMemory,
    budget: usize,
    test: impl FnOnce([Client; 2], &Door<'_>),
) -> (ServeStats, WorkerStats) {
    run_finding(target, data, budget, None, test)
}

/// The same, with the extents that `extents` finds.
fn run_finding(
    target: &mut (dyn Target<Buffer> + Send),
    data: &ArenaMemory,
    budget: usize,
    extents: Option<&ExtentFinder>,
    test: impl FnOnce([Client; 2], &Door<'_>),
) -> (ServeStats, WorkerStats) {
    let flags = TransmissionFlags::all() - TransmissionFlags::READ_ONLY;
    let export = Export::new("", SIZE, flags);
    let (interrupt, connected) = (Interrupt::default(), AtomicUsize::new(2));
    let shared = Shared {
        export: &export,
        base: BASE,
        extents,
        tls: None,
        connected: &connected,
        interrupt: &interrupt,
        // No test ends in time where this stands in for a wake-up.
        max_sleep: Duration::from_secs(60),
    };
    let (sender, streams) = channel();
    let wake = Arc::new(EventFd::new().unwrap());
    let inbox = Inbox { streams, wake: wake.clone() };
    let payloads = Payloads::new(data, budget);
    std::thread::scope(|scope| {
        let served = scope.spawn(move || {
            EventLoop::new(shared, target, 8, payloads, inbox).map(|all| all.run(true))
        });
        let door = Door { streams: &sender, wake: &wake, interrupt: &interrupt };
        let clients = [(); 2].map(|()| door.client());
        // However the test ends, the loop does.
        let outcome =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(clients, &door)));
        door.close();
        let (clients, target, failed) = served.join().unwrap().unwrap();
        assert!(failed.is_none(), "{failed:?}");
        let stats = (clients, target);
        outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        stats
    })
}

#[test]
fn every_command_does_what_it_says() {
    let (clients, target) = serve(4 << 20, |[mut a, mut b], _| {
        assert_eq!(a.write(4096, 0xaa, 1 << 20), None);
        assert_eq!(b.read(4096, 1 << 20), Ok(vec![0xaa; 1 << 20]));
        assert_eq!(b.read(0, 4096), Ok(vec![0; 4096]));
        assert_eq!(b.simple(Command::FLUSH, 0, 0), None);
        assert_eq!(b.simple(Command::FLUSH, u64::MAX, u32::MAX), None);
        assert_eq!(b.simple(Command::WRITE_ZEROES, 8192, 600 << 10), None);
        assert_eq!(a.read(4096, 4096), Ok(vec![0xaa; 4096]));
        assert_eq!(a.read(8192, 600 << 10), Ok(vec![0; 600 << 10]));
        assert_eq!(a.read(8192 + (600 << 10), 512), Ok(vec![0xaa; 512]));
        assert_eq!(a.simple(Command::TRIM, 0, 8192), None);
        assert_eq!(a.simple(Command::READ, 0, 0), None);
        assert_eq!(a.simple(Command(77), 0, 512), Some(ErrorNumber::Invalid));
        assert_eq!(a.simple(Command::READ, SIZE, 512), Some(ErrorNumber::Invalid));
        assert_eq!(a.write(SIZE - 512, 1, 1024), Some(ErrorNumber::NoSpace));
        a.0.write_all(
            &RequestHeader { command: Command::DISCONNECT, ..Default::default() }.to_bytes(),
        )
        .unwrap();
        assert_eq!(a.0.read(&mut [0]).unwrap(), 0, "closed");
    });
    assert_eq!((clients.connections, clients.dropped, clients.errors), (2, 0, 3));
    // Zeroes are written, since a controller may ignore a deallocation.
    assert_eq!((target.trims.requests, target.flushes.requests), (1, 2));
}

#[test]
fn any_offset_of_a_flush_or_a_refused_request_is_harmless() {
    serve(1 << 20, |[mut client, _], _| {
        for offset in [u64::MAX, u64::MAX - BASE, 1 << 63] {
            assert_eq!(client.simple(Command::FLUSH, offset, u32::MAX), None, "{offset}");
            assert_eq!(client.write(offset, 1, 4096), Some(ErrorNumber::NoSpace));
            for command in [Command::READ, Command::TRIM] {
                assert_eq!(client.simple(command, offset, 4096), Some(ErrorNumber::Invalid));
            }
            assert_eq!(client.simple(Command::WRITE_ZEROES, offset, 0), Some(ErrorNumber::NoSpace));
        }
        assert_eq!(client.read(0, 512).unwrap(), [0; 512]);
    });
}

#[test]
fn a_failed_request_is_an_error_for_its_client_alone() {
    serve(4 << 20, |[mut a, mut b], faults| {
        assert_eq!(a.write(0, 0x11, 8192), None);
        faults.inject(Trigger::Nth(1), Fault::Fail(Status::WRITE_FAULT.do_not_retry()));
        assert_eq!(a.read(0, 4096), Err(ErrorNumber::Io));
        assert_eq!(b.read(0, 4096), Ok(vec![0x11; 4096]));
        // One of the four pieces of a request fails.
        faults.inject(Trigger::Nth(3), Fault::Fail(Status::WRITE_FAULT.do_not_retry()));
        assert_eq!(a.write(0, 0x22, 1 << 20), Some(ErrorNumber::Io));
        faults.inject(Trigger::Nth(2), Fault::Fail(Status::WRITE_FAULT.do_not_retry()));
        assert_eq!(a.read(0, 1 << 20), Err(ErrorNumber::Io));
        faults.inject(Trigger::Nth(1), Fault::Fail(Status::WRITE_FAULT.do_not_retry()));
        assert_eq!(b.simple(Command::FLUSH, 0, 0), Some(ErrorNumber::Io));
        assert_eq!(a.read(0, 4096), Ok(vec![0x22; 4096]));
        assert_eq!(b.write(0, 0x33, 512), None);
    });
}

#[test]
fn a_failed_controller_answers_clients_with_errors() {
    serve(4 << 20, |[mut a, mut b], faults| {
        assert_eq!(a.write(0, 0x11, 4096), None);
        faults.inject(Trigger::Nth(2), Fault::Fatal);
        for cookie in 0..4 {
            a.send(Command::READ, cookie, 0, 4096);
        }
        let mut failed = 0;
        for _ in 0..4 {
            match a.reply().1 {
                None => a.0.read_exact(&mut [0; 4096]).unwrap(),
                Some(error) => {
                    assert_eq!(error, ErrorNumber::Io);
                    failed += 1;
                }
            }
        }
        assert!(failed > 0);
        assert_eq!(b.read(0, 4096), Err(ErrorNumber::Io));
        assert_eq!(b.write(0, 1, 4096), Some(ErrorNumber::Io));
    });
}

#[test]
fn replies_come_in_any_order_and_memory_is_bounded() {
    // 32 MiB requested with 2 MiB of memory, by a client that does not read meanwhile.
    let (clients, _) = serve(2 << 20, |[mut a, mut b], _| {
        for cookie in 0..32 {
            a.send(Command::READ, cookie, (cookie % 4) << 20, 1 << 20);
        }
        assert_eq!(b.write(0, 0x44, 1 << 20), None);
        assert_eq!(b.read(0, 1 << 20), Ok(vec![0x44; 1 << 20]));
        let mut cookies = Vec::new();
        let mut bytes = vec![0; 1 << 20];
        for _ in 0..32 {
            let (cookie, error) = a.reply();
            assert_eq!(error, None);
            a.0.read_exact(&mut bytes).unwrap();
            cookies.push(cookie);
        }
        cookies.sort_unstable();
        assert_eq!(cookies, (0..32).collect::<Vec<_>>());
    });
    assert!(clients.memory_waits > 0, "{clients:?}");
}

#[test]
fn a_large_read_leaves_room_in_the_queue_for_others() {
    serve(8 << 20, |[mut a, mut b], faults| {
        // The parts of the large read stay at the controller, whose queue holds fewer than all of
        // them.
        faults.inject(Trigger::Matches(Box::new(|command| command.blocks > 8)), Fault::Hold);
        a.send(Command::READ, 1, 0, 4 << 20);
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(b.read(0, 4096), Ok(vec![0; 4096]));
        faults.clear();
        faults.release();
        assert_eq!(a.reply(), (1, None), "it was not waited for until its parts timed out");
        let mut bytes = vec![0xee; 4 << 20];
        a.0.read_exact(&mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
    });
}

/// Nothing else happens meanwhile: no event makes the one that waits try again just before the loop
/// looks for it.
#[test]
fn silent_clients_that_hold_all_memory_are_disconnected() {
    let (stats, _) = serve_at(2 * PAGE, |mut idle, _, door| {
        for idle in &mut idle {
            idle.send(Command::WRITE, 1, 0, 1 << 20);
            idle.0.write_all(&[1; 512]).unwrap();
        }
        // The loop greets it after it has received what had arrived before: the others have all of
        // the memory.
        let mut waiting = door.client();
        assert_eq!(waiting.write(0, 2, 1 << 16), None);
        assert_eq!(waiting.read(0, 512), Ok(vec![2; 512]));
    });
    assert!(stats.dropped >= 1, "{stats:?}");
}

/// Bytes that arrive one by one are no progress: others get the memory nevertheless.
#[test]
fn slow_clients_that_hold_all_memory_are_disconnected() {
    let (stats, _) = serve_at(2 * PAGE, |mut slow, _, door| {
        for slow in &mut slow {
            slow.send(Command::WRITE, 1, 0, 1 << 20);
            slow.0.write_all(&[1; 512]).unwrap();
        }
        let mut waiting = door.client();
        std::thread::scope(|scope| {
            for mut slow in slow {
                scope.spawn(move || {
                    while slow.0.write_all(&[1]).is_ok() {
                        std::thread::sleep(Duration::from_millis(200));
                    }
                });
            }
            assert_eq!(waiting.write(1 << 19, 2, 1 << 16), None);
            assert_eq!(waiting.read(1 << 19, 512), Ok(vec![2; 512]));
            // The remaining client holds memory that no other waits for.
            door.close();
        });
    });
    assert!(stats.dropped >= 1, "{stats:?}");
}

/// Replies that describe extents are the client's memory as well, although it has requested no
/// data.
#[test]
fn block_status_takes_memory_of_its_client() {
    const REQUESTS: u64 = 500;
    let (stats, _) = serve_at(2 * PIECE, |[mut a, _b], _, door| {
        let mut asks = structured(door.connect());
        let requests = (0..REQUESTS).flat_map(|cookie| {
            let command = Command::BLOCK_STATUS;
            RequestHeader { command, cookie, offset: 0, length: 1 << 20, ..Default::default() }
                .to_bytes()
        });
        asks.write_all(&requests.collect::<Vec<_>>()).unwrap();
        assert_eq!(a.write(0, 0x44, 1 << 16), None);
        for cookie in 0..REQUESTS {
            // A header with the cookie at 8, the number of the context, and one extent.
            let mut reply = [0; 32];
            asks.read_exact(&mut reply).unwrap();
            assert_eq!(reply[8..16], cookie.to_be_bytes());
            assert_eq!(reply[24..28], (1u32 << 20).to_be_bytes());
        }
    });
    // A quarter of the pages that the replies would need is the client's share.
    assert!(stats.memory_waits > 0, "{stats:?}");
}

/// Negotiates structured replies and `base:allocation`.
fn structured(mut stream: UnixStream) -> UnixStream {
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let context = b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation";
    let mut options = b"\0\0\0\x03".to_vec();
    for (option, data) in [(8u32, &b""[..]), (10, context), (1, b"")] {
        options.extend(b"IHAVEOPT");
        options.extend(option.to_be_bytes());
        options.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
        options.extend(data);
    }
    stream.write_all(&options).unwrap();
    // The greeting; an acknowledgement; the context and an acknowledgement; size and flags.
    stream.read_exact(&mut [0; 18 + 20 + (20 + 4 + 15) + 20 + 10]).unwrap();
    stream
}

#[test]
fn a_client_that_leaves_takes_nothing_with_it() {
    let (clients, target) = serve(4 << 20, |[mut a, mut b], faults| {
        // In the middle of a payload, and with requests at the controller.
        let (seen, taken) = channel();
        faults.inject(Trigger::Matches(Box::new(move |_| seen.send(()).is_ok())), Fault::Hold);
        a.send(Command::READ, 1, 2 << 20, 4096);
        a.send(Command::READ, 2, 2 << 20, 4096);
        a.send_payload(Command::WRITE, 3, 0, 1 << 20, &[0x55; 300 << 10]);
        // With the first piece of the payload.
        (0..3).for_each(|_| taken.recv_timeout(Duration::from_secs(60)).unwrap());
        drop(a);
        faults.clear();
        faults.release();
        // The pieces that had arrived are written, and the rest is not.
        assert_eq!(b.read(256 << 10, 512), Ok(vec![0; 512]));
        b.0.write_all(b"this is no request, but long enough to be one").unwrap();
        assert_eq!(b.0.read(&mut [0]).unwrap_or(0), 0, "closed");
    });
    assert_eq!((clients.connections, clients.dropped), (2, 1));
    assert!(target.reads.requests >= 2, "{target:?}");
}

#[test]
fn a_client_that_has_sent_its_last_request_gets_its_replies() {
    let (clients, _) = serve(4 << 20, |[mut a, _b], _| {
        for cookie in 0..8 {
            a.send(Command::READ, cookie, 0, 64 << 10);
        }
        a.0.shutdown(std::net::Shutdown::Write).unwrap();
        for _ in 0..8 {
            assert_eq!(a.reply().1, None);
            a.0.read_exact(&mut vec![0; 64 << 10]).unwrap();
        }
        assert_eq!(a.0.read(&mut [0]).unwrap(), 0, "closed");
    });
    assert_eq!((clients.dropped, clients.requests), (0, 8));
}

/// While the last requests are answered, no other client is served.
#[test]
fn clients_after_the_signal_are_refused() {
    let (clients, _) = serve_at(4 << 20, |[mut a, _b], faults, door| {
        let (seen, taken) = channel();
        // The first command, and no other.
        let mut seen = Some(seen);
        let held = move |_: &CommandInfo| seen.take().is_some_and(|seen| seen.send(()).is_ok());
        faults.inject(Trigger::Matches(Box::new(held)), Fault::Hold);
        a.send(Command::READ, 1, 0, 4096);
        taken.recv_timeout(Duration::from_secs(60)).unwrap();
        door.interrupt.raise();
        let mut late = door.connect();
        late.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(late.read(&mut [0; 18]).unwrap(), 0, "closed without a greeting");
        faults.release();
        let (cookie, error) = a.reply();
        assert_eq!(cookie, 1);
        // The controller may have been waited for long enough.
        if error.is_none() {
            a.0.read_exact(&mut [0; 4096]).unwrap();
        }
    });
    assert_eq!(clients.connections, 2);
}
