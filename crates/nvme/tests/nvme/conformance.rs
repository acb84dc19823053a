//! The model controller's answers to invalid commands.

use crate::common::*;
use pinfold_core::mem::DmaMemory;
use pinfold_nvme::Registers;
use pinfold_nvme::spec::{
    Cc, Command, Cqe, Csts, Doorbell, DsmRange, Status, admin, cns, doorbell_offset, feature, nvm,
    offset,
};
use pinfold_nvme_model::{ModelConfig, ModelController, ModelRegisters};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, IntoBytes};

fn doorbell(queue: u16, which: Doorbell) -> u32 {
    doorbell_offset(queue, which, 0).unwrap()
}

const ENTRIES: u32 = 8;

/// A queue pair that the test programs itself.
struct Pair {
    id: u16,
    sq: Buffer,
    cq: Buffer,
    tail: u32,
    head: u32,
    phase: bool,
}

/// A host that sends anything.
struct Host {
    arena: Arena,
    model: ModelController,
    registers: ModelRegisters,
    pairs: Vec<Pair>,
    data: Buffer,
}

fn wait_for(registers: &ModelRegisters, wanted: impl Fn(Csts) -> bool) {
    while !wanted(Csts::from_bits_retain(registers.read32(offset::CSTS))) {
        std::thread::yield_now();
    }
}

impl Pair {
    fn new(arena: &Arena, id: u16) -> Self {
        Self {
            id,
            sq: Buffer::new(arena, 4096),
            cq: Buffer::new(arena, 4096),
            tail: 0,
            head: 0,
            phase: true,
        }
    }
}

impl Host {
    fn new() -> Self {
        let arena = Arena(Memory::new(128));
        let mut config = ModelConfig::new(namespaces(1 << 20));
        (config.mdts, config.mqes, config.queues) = (1, 15, 2);
        let model = ModelController::spawn(arena.clone(), config).unwrap();
        let registers = model.registers();
        let admin = Pair::new(&arena, 0);
        registers.write32(offset::AQA, (ENTRIES - 1) | (ENTRIES - 1) << 16);
        registers.write64(offset::ASQ, admin.sq.iova().raw());
        registers.write64(offset::ACQ, admin.cq.iova().raw());
        registers.write32(offset::CC, Cc::ENABLED.0);
        wait_for(&registers, |csts| csts == Csts::READY);
        let data = Buffer::new(&arena, 5 * 4096);
        Self { arena, model, registers, pairs: vec![admin], data }
    }

    /// Kept alive by the test's arena as long as the host.
    fn memory(&self) -> DmaMemory<'_> {
        self.data.memory()
    }

    fn send(&mut self, pair: usize, command: Command) -> Cqe {
        self.push(pair, command);
        self.receive(pair)
    }

    fn push(&mut self, pair: usize, mut command: Command) {
        let pair = &mut self.pairs[pair];
        command.cid = U16::new(0x4000 + pair.tail as u16);
        pair.sq.memory().copy_from_slice(pair.tail as usize * 64, command.as_bytes()).unwrap();
        pair.tail = (pair.tail + 1) % ENTRIES;
        self.registers.write32(doorbell(pair.id, Doorbell::SubmissionTail), pair.tail);
    }

    fn receive(&mut self, pair: usize) -> Cqe {
        let pair = &mut self.pairs[pair];
        loop {
            let at = pair.head as usize * 16;
            let last = pair.cq.memory().load_acquire_u32(at + 12).unwrap();
            if (last >> 16 & 1 == 1) == pair.phase {
                let mut bytes = [0; 16];
                pair.cq.memory().copy_to_slice(at, &mut bytes).unwrap();
                pair.head = (pair.head + 1) % ENTRIES;
                pair.phase ^= pair.head == 0;
                self.registers.write32(doorbell(pair.id, Doorbell::CompletionHead), pair.head);
                return Cqe::read_from_bytes(&bytes).unwrap();
            }
            std::thread::yield_now();
        }
    }

    fn admin(&mut self, command: Command) -> Status {
        self.send(0, command).status().code()
    }

    fn io(&mut self, command: Command) -> Status {
        self.send(1, command).status().code()
    }

    fn queue(opcode: u8, id: u16, size: u16, cdw11: u32, at: u64) -> Command {
        let cdw10 = U32::new(u32::from(id) | u32::from(size) << 16);
        Command { opcode, cdw10, cdw11: U32::new(cdw11), prp1: U64::new(at), ..Command::default() }
    }

    fn with_queue() -> Self {
        let mut host = Self::new();
        let pair = Pair::new(&host.arena, 1);
        let (sq, cq) = (pair.sq.iova().raw(), pair.cq.iova().raw());
        assert_eq!(host.admin(Self::queue(admin::CREATE_CQ, 1, 7, 1, cq)), Status::SUCCESS);
        assert_eq!(
            host.admin(Self::queue(admin::CREATE_SQ, 1, 7, 1 | 1 << 16, sq)),
            Status::SUCCESS
        );
        host.pairs.push(pair);
        host
    }

    fn transfer(&self, opcode: u8, slba: u64, blocks: u32) -> Command {
        let mut command = Command {
            opcode,
            nsid: U32::new(1),
            prp1: U64::new(self.data.iova().raw()),
            cdw12: U32::new(blocks - 1),
            ..Command::default()
        };
        command.set_slba(slba);
        command
    }
}

#[test]
fn queue_creation_and_deletion_are_checked() {
    let mut host = Host::new();
    let at = host.data.iova().raw();
    let q = Host::queue;
    use admin::{CREATE_CQ, CREATE_SQ, DELETE_CQ, DELETE_SQ};
    assert_eq!(host.admin(q(CREATE_CQ, 0, 7, 1, at)), Status::INVALID_QUEUE_ID);
    assert_eq!(host.admin(q(CREATE_CQ, 3, 7, 1, at)), Status::INVALID_QUEUE_ID);
    assert_eq!(host.admin(q(CREATE_CQ, 1, 0, 1, at)), Status::INVALID_QUEUE_SIZE);
    assert_eq!(host.admin(q(CREATE_CQ, 1, 16, 1, at)), Status::INVALID_QUEUE_SIZE);
    assert_eq!(host.admin(q(CREATE_CQ, 1, 7, 0, at)), Status::INVALID_FIELD);
    assert_eq!(host.admin(q(CREATE_CQ, 1, 7, 3, at)), Status::INVALID_INTERRUPT_VECTOR);
    assert_eq!(host.admin(q(CREATE_CQ, 1, 7, 1, at + 4)), Status::PRP_OFFSET_INVALID);
    assert_eq!(host.admin(q(CREATE_SQ, 1, 7, 1 | 1 << 16, at)), Status::COMPLETION_QUEUE_INVALID);
    assert_eq!(host.admin(q(CREATE_CQ, 1, 7, 1, at)), Status::SUCCESS);
    assert_eq!(host.admin(q(CREATE_CQ, 1, 7, 1, at)), Status::INVALID_QUEUE_ID);
    assert_eq!(host.admin(q(CREATE_SQ, 2, 7, 1 | 1 << 16, at)), Status::SUCCESS);
    assert_eq!(host.admin(q(DELETE_CQ, 1, 0, 0, 0)), Status::INVALID_QUEUE_DELETION);
    assert_eq!(host.admin(q(DELETE_SQ, 1, 0, 0, 0)), Status::INVALID_QUEUE_ID);
    assert_eq!(host.admin(q(DELETE_SQ, 2, 0, 0, 0)), Status::SUCCESS);
    assert_eq!(host.admin(q(DELETE_CQ, 1, 0, 0, 0)), Status::SUCCESS);
    assert_eq!(host.admin(q(DELETE_CQ, 1, 0, 0, 0)), Status::INVALID_QUEUE_ID);
}

#[test]
fn admin_commands_are_checked() {
    let mut host = Host::new();
    let at = U64::new(host.data.iova().raw());
    let identify = |cns: u8, nsid| Command {
        opcode: admin::IDENTIFY,
        nsid: U32::new(nsid),
        prp1: at,
        cdw10: U32::new(cns.into()),
        ..Command::default()
    };
    assert_eq!(host.admin(Command { opcode: 0x7f, ..Command::default() }), Status::INVALID_OPCODE);
    assert_eq!(host.admin(identify(0x55, 0)), Status::INVALID_FIELD);
    assert_eq!(host.admin(identify(cns::NAMESPACE, 3)), Status::INVALID_NAMESPACE);
    assert_eq!(host.admin(identify(cns::ACTIVE_NAMESPACES, u32::MAX)), Status::INVALID_NAMESPACE);
    assert_eq!(host.admin(identify(cns::ACTIVE_NAMESPACES, 1)), Status::SUCCESS);
    assert_eq!((host.memory().read_u32(0), host.memory().read_u32(4)), (Ok(2), Ok(0)));
    let nowhere = Command { prp1: U64::new(0x1000), ..identify(cns::CONTROLLER, 0) };
    assert_eq!(host.admin(nowhere), Status::DATA_TRANSFER_ERROR);
    let features = |id: u8, cdw11| Command {
        opcode: admin::SET_FEATURES,
        cdw10: U32::new(id.into()),
        cdw11: U32::new(cdw11),
        ..Command::default()
    };
    assert_eq!(host.admin(features(0x7e, 0)), Status::INVALID_FIELD);
    assert_eq!(host.admin(features(feature::NUMBER_OF_QUEUES, u32::MAX)), Status::INVALID_FIELD);
    assert_eq!(
        host.send(0, features(feature::NUMBER_OF_QUEUES, 9 | 9 << 16)).result.get(),
        1 | 1 << 16
    );
    let abort =
        Command { opcode: admin::ABORT, cdw10: U32::new(1 | 5 << 16), ..Command::default() };
    assert_eq!(host.send(0, abort).result.get(), 1);
}

#[test]
fn transfers_are_checked() {
    let mut host = Host::with_queue();
    let at = host.data.iova().raw();
    let plain = host.transfer(nvm::READ, 0, 8);
    assert_eq!(host.io(plain), Status::SUCCESS);
    assert_eq!(host.io(Command { opcode: 0x55, ..plain }), Status::INVALID_OPCODE);
    assert_eq!(host.io(Command { flags: 1, ..plain }), Status::INVALID_FIELD);
    assert_eq!(host.io(Command { nsid: U32::new(3), ..plain }), Status::INVALID_NAMESPACE);
    assert_eq!(host.io(Command { nsid: U32::new(0), ..plain }), Status::INVALID_NAMESPACE);
    for (slba, blocks, expected) in [
        (2047, 1, Status::SUCCESS),
        (2047, 2, Status::LBA_OUT_OF_RANGE),
        (u64::MAX, 2, Status::LBA_OUT_OF_RANGE),
        (0, 17, Status::INVALID_FIELD),
    ] {
        assert_eq!(
            host.io(host.transfer(nvm::WRITE, slba, blocks)),
            expected,
            "{blocks} at {slba}"
        );
    }
    // MDTS is 8 KiB: with an offset that is three pages, so a list.
    let list = at + 4 * 4096;
    host.memory().write_u64(4 * 4096, at + 4096).unwrap();
    host.memory().write_u64(4 * 4096 + 8, at + 8192).unwrap();
    let full = host.transfer(nvm::READ, 0, 16);
    let prps = |prp1, prp2| Command { prp1: U64::new(prp1), prp2: U64::new(prp2), ..full };
    assert_eq!(host.io(prps(at + 512, list)), Status::SUCCESS);
    assert_eq!(host.io(prps(at + 2, list)), Status::PRP_OFFSET_INVALID);
    assert_eq!(host.io(prps(at + 512, list + 4)), Status::PRP_OFFSET_INVALID);
    assert_eq!(host.io(prps(at, at + 4100)), Status::PRP_OFFSET_INVALID);
    assert_eq!(host.io(prps(at, at + 4096)), Status::SUCCESS);
    assert_eq!(host.io(prps(at + 512, 0xdead_0000)), Status::DATA_TRANSFER_ERROR);
    assert_eq!(host.io(prps(at, 0xdead_0000)), Status::DATA_TRANSFER_ERROR);
    host.memory().write_u64(4 * 4096 + 8, at + 8200).unwrap();
    assert_eq!(host.io(prps(at + 512, list)), Status::PRP_OFFSET_INVALID);
    let flush = |nsid| Command { opcode: nvm::FLUSH, nsid: U32::new(nsid), ..Command::default() };
    assert_eq!(host.io(flush(u32::MAX)), Status::SUCCESS);
    assert_eq!(host.io(flush(7)), Status::INVALID_NAMESPACE);
}

#[test]
fn all_ranges_of_a_discard_are_checked_before_any_takes_effect() {
    let mut host = Host::with_queue();
    host.memory().fill(0, 4096, 7).unwrap();
    let write = host.transfer(nvm::WRITE, 0, 8);
    assert_eq!(host.io(write), Status::SUCCESS);
    let discard = |host: &mut Host, last: u64| {
        for (i, slba) in [0, last].into_iter().enumerate() {
            let range =
                DsmRange { blocks: U32::new(4), slba: U64::new(slba), ..DsmRange::default() };
            host.memory().copy_from_slice(i * 16, range.as_bytes()).unwrap();
        }
        host.io(Command {
            opcode: nvm::DATASET_MANAGEMENT,
            nsid: U32::new(1),
            prp1: U64::new(host.data.iova().raw()),
            cdw10: U32::new(1),
            cdw11: U32::new(nvm::DEALLOCATE),
            ..Command::default()
        })
    };
    let first = |host: &mut Host| {
        let read = host.transfer(nvm::READ, 0, 8);
        assert_eq!(host.io(read), Status::SUCCESS);
        host.memory().read_u8(0).unwrap()
    };
    assert_eq!(discard(&mut host, 2046), Status::LBA_OUT_OF_RANGE);
    assert_eq!(first(&mut host), 7);
    assert_eq!(discard(&mut host, 2044), Status::SUCCESS);
    assert_eq!(first(&mut host), 0);
}

#[test]
fn wrong_doorbells_are_events_and_unreachable_queues_are_fatal() {
    let mut host = Host::with_queue();
    let event = Command { opcode: admin::ASYNC_EVENT, ..Command::default() };
    host.push(0, event);
    host.registers.write32(doorbell(1, Doorbell::SubmissionTail), 8);
    let cqe = host.receive(0);
    assert_eq!((cqe.status(), cqe.result.get()), (Status::SUCCESS, 1 << 8 | 1 << 16));
    host.push(0, event);
    host.registers.write32(doorbell(2, Doorbell::SubmissionTail), 1);
    assert_eq!(host.receive(0).result.get(), 1 << 16);
    host.registers.write32(doorbell(99, Doorbell::SubmissionTail), 1);
    assert_eq!(host.model.stats().bad_doorbells, 3);
    // One event is allowed to be outstanding; the third doorbell's is reported first.
    host.push(0, event);
    assert_eq!(host.receive(0).result.get(), 1 << 16);
    host.push(0, event);
    host.push(0, event);
    assert_eq!(host.receive(0).status().code(), Status::ASYNC_EVENT_LIMIT);
    // The memory of the submission queue becomes unreachable.
    let pair = host.pairs.pop().unwrap();
    drop(pair.sq);
    host.registers.write32(doorbell(1, Doorbell::SubmissionTail), 3);
    wait_for(&host.registers, |csts| csts.contains(Csts::FATAL));
    host.registers.write32(offset::CC, 0);
    wait_for(&host.registers, |csts| csts.is_empty());
    host.registers.write32(offset::AQA, 0);
    host.registers.write32(offset::CC, Cc::ENABLED.0);
    wait_for(&host.registers, |csts| csts == Csts::FATAL);
}

#[test]
fn a_full_completion_queue_holds_what_does_not_fit() {
    let mut host = Host::with_queue();
    let flush = Command { opcode: nvm::FLUSH, nsid: U32::new(1), ..Command::default() };
    for _ in 0..7 {
        host.push(1, flush);
    }
    while host.model.stats().commands < 9 {
        std::thread::yield_now();
    }
    // Seven entries are full; more commands wait until the host has read.
    for _ in 0..5 {
        host.push(1, flush);
    }
    std::thread::sleep(std::time::Duration::from_millis(5));
    for _ in 0..12 {
        assert_eq!(host.receive(1).status(), Status::SUCCESS);
    }
}
