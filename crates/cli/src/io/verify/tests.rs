use super::*;
use crate::targets::fake::{Fake, Fault};
use crate::targets::{Done, Info, SubmitError, TargetError, file};
use sha2::{Digest, Sha256};

fn workload(rw: Rw, blocks: u64, requests: u64) -> Workload {
    Workload { rw, block: 8192, blocks, requests, runtime: None, reads_in_100: 50 }
}

fn go(
    target: &mut dyn Target<Vec<u8>>,
    workload: Workload,
    depth: usize,
) -> (Result<(Outcome, Verified), PumpError>, usize) {
    let mut buffers = vec![vec![0xcc; workload.block]; depth];
    let done =
        run(target, (&workload, 512, u64::MAX), &mut buffers, &Progress::hidden(), &Interrupt::default());
    (done, buffers.len())
}

#[test]
fn an_honest_target_passes_at_every_block_and_depth() {
    for block in [512, 4096] {
        for depth in [1, 7, 64] {
            for rw in [Rw::Randrw, Rw::Randread, Rw::Randwrite] {
                let mut target = Fake::new(vec![0xee; 100 * block], block);
                let (done, left) = go(&mut target, workload(rw, 97, 500), depth);
                let (outcome, verified) = done.unwrap();
                assert_eq!((verified.requests, left), (500, depth));
                assert_eq!(outcome.reads.requests == 0, rw == Rw::Randwrite);
                let read_back = 97 * block as u64;
                assert_eq!(verified.compared_bytes, outcome.reads.bytes + read_back);
                let held = Hash::from(Sha256::new().chain_update(&target.data[..97 * block]));
                assert_eq!(verified.sha256, Some(held));
                assert!(target.data[97 * block..].iter().all(|&byte| byte == 0xee), "past the region");
                assert_eq!(depth > 1, target.at_most > 1);
            }
        }
    }
}

#[test]
fn requests_have_all_lengths() {
    let mut ledger = Ledger::new(4096, 512, u64::MAX);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..20_000 {
        seen.insert(ledger.anywhere(IoDirection::Read, (1, 2048)).unwrap().blocks);
    }
    assert!((1..=64).all(|blocks| seen.contains(&blocks)));
    assert!(seen.last().is_some_and(|&most| most > 2000 && most <= 2048));
}

/// What a dishonest target does to one request.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// Says that it was written, and writes nothing.
    LosesWrite,
    /// Says that it was read, and leaves the buffer as it was.
    LosesRead,
    /// Writes it one block further on.
    Misplaces,
    /// One bit of what was read is another.
    FlipsBit,
}

struct Liar {
    honest: Fake,
    lie: Lie,
    at: usize,
}

impl Target<Vec<u8>> for Liar {
    fn info(&self) -> &Info {
        self.honest.info()
    }

    fn submit(&mut self, mut request: Request<Vec<u8>>) -> Result<(), SubmitError<Vec<u8>>> {
        let at = usize::try_from(request.offset).unwrap();
        let held = self.honest.data[at..at + request.len].to_vec();
        let last = at + request.len == self.honest.data.len();
        if self.honest.requests >= self.at {
            let lied = match (self.lie, request.way) {
                // What is there is written once more.
                (Lie::LosesWrite, IoDirection::Write) => {
                    request.buffer.write_at(0, &held).unwrap();
                    true
                }
                (Lie::Misplaces, IoDirection::Write) if !last => {
                    request.offset += 512;
                    true
                }
                (Lie::FlipsBit, IoDirection::Read) => {
                    self.honest.data[at] ^= 1;
                    true
                }
                (Lie::LosesRead, IoDirection::Read) => {
                    // What the buffer holds is what comes back.
                    let before = request.buffer[..request.len].to_vec();
                    self.honest.data[at..at + request.len].copy_from_slice(&before);
                    true
                }
                _ => false,
            };
            self.at = if lied { usize::MAX } else { self.at };
        }
        self.honest.submit(request)
    }

    fn poll(&mut self, done: &mut Vec<Done<Vec<u8>>>) -> Result<(), TargetError> {
        self.honest.poll(done)
    }
    fn wait(&mut self, done: &mut Vec<Done<Vec<u8>>>) -> Result<(), TargetError> {
        self.honest.wait(done)
    }
    fn sync(&mut self) -> Result<(), TargetError> {
        self.honest.sync()
    }
}

#[test]
fn every_lie_is_found() {
    for lie in [Lie::LosesWrite, Lie::LosesRead, Lie::Misplaces, Lie::FlipsBit] {
        for at in [0, 3, 40, 200] {
            for depth in [1, 8] {
                let honest = Fake::new(vec![0; 200 * 512], 512);
                let mut target = Liar { honest, lie, at };
                // Few writes: one that covers the lie before anybody reads there makes it good.
                let few = Workload { reads_in_100: 95, ..workload(Rw::Randrw, 200, 300) };
                let (done, left) = go(&mut target, few, depth);
                assert!(matches!(done, Err(PumpError::Wrong { .. })), "{lie:?} {at} {depth}");
                assert_eq!((target.at, left), (usize::MAX, depth));
            }
        }
    }
}

#[test]
fn a_failure_ends_it_and_gives_the_buffers_back() {
    for fault in [Fault::Fail, Fault::Refuse, Fault::Quarantine] {
        for at in [2, 50, 260] {
            let mut target = Fake::new(vec![0; 200 * 512], 512);
            target.fault = Some((at, fault));
            let (done, left) = go(&mut target, workload(Rw::Randrw, 200, 250), 8);
            assert!(matches!(done, Err(PumpError::Target(_))), "{fault:?} {at}");
            assert_eq!(left, 8 - usize::from(fault == Fault::Quarantine));
            assert!(target.in_flight.is_empty());
        }
    }
}

#[test]
fn requests_of_a_file_are_multiples_of_what_it_was_opened_for() {
    for (least, most, grain) in
        [(4096, 4096, 4096), (4096, 65_536, 4096), (4096, 6144, 2048), (512, 4096, 512)]
    {
        assert_eq!(file::granule((least, most)), grain);
        let mut target = Fake::new(vec![0; 64 * grain], 1).direct(grain);
        let workload = Workload { block: most, ..workload(Rw::Randrw, 64, 300) };
        let mut buffers = vec![vec![0; most]; 8];
        let interrupt = Interrupt::default();
        let done =
            run(&mut target, (&workload, least, u64::MAX), &mut buffers, &Progress::hidden(), &interrupt);
        assert_eq!(done.unwrap().1.requests, 300);
    }
}

/// A target of any size that keeps what was written, in blocks of 4 KiB, and takes some time for each request.
struct Vast {
    info: Info,
    held: std::collections::HashMap<u64, Vec<u8>>,
    flying: Vec<Request<Vec<u8>>>,
}

impl Vast {
    fn new(bytes: u64) -> Self {
        let info = Info { capacity: Some(bytes), ..Fake::<Vec<u8>>::new(vec![], 4096).info };
        Self { info, held: std::collections::HashMap::new(), flying: Vec::new() }
    }
}

impl Target<Vec<u8>> for Vast {
    fn info(&self) -> &Info {
        &self.info
    }
    fn submit(&mut self, request: Request<Vec<u8>>) -> Result<(), SubmitError<Vec<u8>>> {
        self.flying.push(request);
        Ok(())
    }
    fn poll(&mut self, done: &mut Vec<Done<Vec<u8>>>) -> Result<(), TargetError> {
        std::thread::sleep(Duration::from_millis(1));
        for mut request in self.flying.drain(..) {
            for (at, block) in (request.offset / 4096..).zip(request.buffer[..request.len].chunks_mut(4096)) {
                match request.way {
                    IoDirection::Write => drop(self.held.insert(at, block.to_vec())),
                    IoDirection::Read => block.copy_from_slice(&self.held[&at]),
                }
            }
            done.push(Done { slot: request.slot, buffer: Some(request.buffer), result: Ok(request.len) });
        }
        Ok(())
    }
    fn wait(&mut self, done: &mut Vec<Done<Vec<u8>>>) -> Result<(), TargetError> {
        self.poll(done)
    }
    fn sync(&mut self) -> Result<(), TargetError> {
        Ok(())
    }
}

#[test]
fn the_time_ends_every_part_however_large_the_region_is() {
    let mut target = Vast::new(8 << 40);
    let runtime = Some(Duration::from_millis(50));
    let workload = Workload { runtime, ..workload(Rw::Randrw, (8 << 40) / 4096, u64::MAX) };
    let mut buffers = vec![vec![0; 8192]; 4];
    let (progress, interrupt) = (Progress::hidden(), Interrupt::default());
    let done = run(&mut target, (&workload, 4096, super::COUNTED), &mut buffers, &progress, &interrupt);
    let (outcome, verified) = done.unwrap();
    assert!(outcome.reads.requests > 0 && outcome.writes.requests > 0);
    assert!(verified.laid_out_bytes > 0 && verified.laid_out_bytes < 1 << 30, "{verified:?}");
    assert!(verified.read_back_bytes > 0 && verified.read_back_bytes <= verified.laid_out_bytes);
    assert_eq!((verified.sha256, buffers.len()), (None, 4));
}

#[test]
fn what_has_no_count_is_written_once_and_checked() {
    for counted in [0, 1, 10, 96] {
        let mut target = Fake::new(vec![0; 97 * 512], 512);
        let mut buffers = vec![vec![0; 8192]; 7];
        let workload = workload(Rw::Randrw, 97, 400);
        let (progress, interrupt) = (Progress::hidden(), Interrupt::default());
        let done = run(&mut target, (&workload, 512, counted), &mut buffers, &progress, &interrupt);
        let (_, verified) = done.unwrap();
        let held = Hash::from(Sha256::new().chain_update(&target.data));
        assert_eq!((verified.requests, verified.sha256), (400, Some(held)));
        let mut once = Ledger::new(97, 512, 0);
        let mut buffer = vec![0; 512];
        for first in counted..97 {
            once.write(Run { first, blocks: 1 }, &mut buffer).unwrap();
            let at = usize::try_from(first).unwrap() * 512;
            assert!(buffer == target.data[at..at + 512], "block {first} of {counted}");
        }
    }
}

#[test]
fn requests_in_flight_do_not_contradict_each_other() {
    let mut ledger = Ledger::new(64, 512, u64::MAX);
    let mut users = [(0u32, 0u32); 64];
    let mut flying = Vec::new();
    for step in 0..20_000 {
        let way = if ledger.random(3) == 0 { IoDirection::Write } else { IoDirection::Read };
        if ledger.random(2) == 0
            && let Some(run) = ledger.anywhere(way, (1, 9))
        {
            ledger.take(way, run);
            flying.push((way, run));
            for user in users.iter_mut().skip(usize::try_from(run.first).unwrap()).take(run.blocks) {
                if way == IoDirection::Write {
                    user.1 += 1
                } else {
                    user.0 += 1
                }
                assert!(*user == (user.0, 0) || *user == (0, 1), "step {step}: {user:?}");
            }
        } else if !flying.is_empty() {
            let at = usize::try_from(ledger.random(flying.len() as u64)).unwrap();
            let (way, run) = flying.swap_remove(at);
            ledger.give_back(run);
            for user in users.iter_mut().skip(usize::try_from(run.first).unwrap()).take(run.blocks) {
                if way == IoDirection::Write { user.1 -= 1 } else { user.0 -= 1 }
            }
        }
    }
}
