//! A program's own memory as the payload of commands: written to the controller and read back
//! through the IOMMU.
#![forbid(unsafe_code)]

use crate::common::{namespaces, pattern};
use pinfold::memory::{OwnedMemory, OwnedPiece, OwnedPieces, Reclaim};
use pinfold::{Arena, Domain, MappingPolicy, Source};
use pinfold_core::access::{FromDevice, ToDevice};
use pinfold_core::dma_pool::{Block, DmaPool};
use pinfold_core::domain::{Mapping, Pinned};
use pinfold_nvme::driver::{Config, Controller, InFlight, Outcome, Queue};
use pinfold_nvme_model::{ModelConfig, ModelController, ModelRegisters};

const LEN: usize = 3 << 20;

fn finish<P>(queue: &mut Queue<ModelRegisters, Arena>, in_flight: InFlight<P>) -> P {
    let completion = queue.wait().unwrap().unwrap();
    match in_flight.finish(completion) {
        Outcome::Completed { payload, result } => {
            result.unwrap();
            payload
        }
        _ => panic!("not completed"),
    }
}

fn bytes_of(memory: pinfold_core::mem::DmaMemory<'_>) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.copy_to_slice(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_programs_own_memory_is_written_and_read_back_scattered() {
    for policy in [MappingPolicy::PerUse, MappingPolicy::Whole] {
        let domain = Domain::soft().unwrap();
        let control = Arena::builder().size(4 << 20).source(Source::Plain).build(&domain).unwrap();
        let model =
            ModelController::spawn(domain.port().unwrap(), ModelConfig::new(namespaces(32 << 20)))
                .unwrap();
        let controller = Controller::start(model.registers(), control, Config::default()).unwrap();
        let mut queue = controller.create_queue(8).unwrap();

        let source = OwnedMemory::from_vec(pattern(1, LEN)).unwrap();
        let target = OwnedMemory::from_vec(vec![0; LEN]).unwrap();
        source.map_into(&domain, policy).unwrap();
        target.map_into(&domain, policy).unwrap();

        // One contiguous write ...
        let mut piece = source.take().unwrap();
        drop(piece.split_off(2 << 20).unwrap());
        let expected = bytes_of(piece.memory());
        let mapping = domain.map(piece, ToDevice).unwrap();
        assert_eq!(mapping.is_fixed(), policy == MappingPolicy::Whole);
        let write = queue.write(1, 8, 4096, mapping).unwrap();
        drop(finish(&mut queue, write).unmap().unwrap());

        // ... read back into two parts of other memory, the later one first.
        let mut first = target.take().unwrap();
        let mut second = first.split_off(1 << 20).unwrap();
        drop(second.split_off(1 << 20).unwrap());
        let pieces = OwnedPieces::new(vec![second, first]).unwrap();
        let mapping: Mapping<_, _> = domain.map(pieces, FromDevice).unwrap();
        let read = queue.read(1, 8, 4096, mapping).unwrap();
        let pieces = finish(&mut queue, read).unmap().unwrap();
        let back: Vec<u8> =
            pieces.into_pieces().iter().flat_map(|piece| bytes_of(Pinned::memory(piece))).collect();
        assert!(back == expected);
        assert_eq!(domain.soft_bus().unwrap().stats().faults, 0);

        let bytes: Vec<u8> = source.reclaim().unwrap();
        assert!(bytes == pattern(1, LEN));
    }
}

/// A command that is lost keeps its payload, and so the memory.
#[test]
fn memory_in_flight_is_not_reclaimed() {
    let domain = Domain::soft().unwrap();
    let control = Arena::builder().size(4 << 20).source(Source::Plain).build(&domain).unwrap();
    let model =
        ModelController::spawn(domain.port().unwrap(), ModelConfig::new(namespaces(8 << 20)))
            .unwrap();
    let controller = Controller::start(model.registers(), control, Config::default()).unwrap();
    let mut queue = controller.create_queue(8).unwrap();
    let memory = OwnedMemory::from_vec(vec![0; 64 << 10]).unwrap();
    memory.map_into(&domain, MappingPolicy::PerUse).unwrap();
    let mut piece = memory.take().unwrap();
    drop(piece.split_off(8192).unwrap());
    let read = queue.read(1, 0, 16, domain.map(piece, FromDevice).unwrap()).unwrap();
    let Err(Reclaim::InUse { memory, .. }) = memory.reclaim::<Vec<u8>>() else {
        panic!("it is in flight")
    };
    drop(finish(&mut queue, read));
    assert_eq!(memory.reclaim::<Vec<u8>>().unwrap().len(), 64 << 10);
}

/// A driver's state in one struct without a lifetime.
struct Driver {
    domain: Domain,
    pool: DmaPool,
    blocks: Vec<Block>,
    queue: Queue<ModelRegisters, Arena>,
    in_flight: Vec<InFlight<Mapping<OwnedPiece, ToDevice>>>,
}

/// Commands are completed on another thread than the one that submitted them.
#[test]
fn a_driver_moves_between_threads_with_commands_in_flight() {
    const PIECE: usize = 64 << 10;
    fn is_owned<T: Send + 'static>(value: T) -> T {
        value
    }
    let domain = Domain::soft().unwrap();
    let build = |size| Arena::builder().size(size).source(Source::Plain).build(&domain).unwrap();
    let model =
        ModelController::spawn(domain.port().unwrap(), ModelConfig::new(namespaces(8 << 20)))
            .unwrap();
    let controller =
        Controller::start(model.registers(), build(4 << 20), Config::default()).unwrap();
    let memory = OwnedMemory::from_vec(pattern(3, 4 * PIECE + 4096)).unwrap();
    memory.map_into(&domain, MappingPolicy::PerUse).unwrap();
    let mut rest = memory.take().unwrap();
    let expected = bytes_of(rest.memory());
    drop(memory);

    let pool = DmaPool::builder("driver").block(64).align(64).build(&build(2 << 20)).unwrap();
    let blocks = (0..4).map(|_| pool.alloc().unwrap()).collect();
    let queue = controller.create_queue(8).unwrap();
    let mut driver = Driver { domain, pool, blocks, queue, in_flight: Vec::new() };
    drop(controller);
    for i in 0..4u64 {
        let next = rest.split_off(PIECE).ok();
        let mapping = driver.domain.local().map(rest, ToDevice).unwrap();
        driver.in_flight.push(driver.queue.write(1, i * 128, 128, mapping).unwrap());
        let Some(piece) = next else { break };
        rest = piece;
    }
    assert_eq!(driver.in_flight.len(), 4);

    let mut driver = is_owned(driver);
    let mut driver = std::thread::spawn(move || {
        // Completions may arrive in another order.
        let mut in_flight = std::mem::take(&mut driver.in_flight);
        while !in_flight.is_empty() {
            let completion = driver.queue.wait().unwrap().unwrap();
            let at = in_flight.iter().position(|one| one.tag() == completion.tag()).unwrap();
            let Outcome::Completed { payload, result } =
                in_flight.swap_remove(at).finish(completion)
            else {
                panic!("not completed")
            };
            result.unwrap();
            drop(payload.unmap().unwrap());
        }
        drop(driver.blocks.pop());
        driver
    })
    .join()
    .unwrap();

    assert_eq!((driver.pool.stats().in_use, driver.blocks.len()), (3, 3));
    let target = OwnedMemory::from_vec(vec![0; 4 * PIECE + 4096]).unwrap();
    target.map_into(&driver.domain, MappingPolicy::PerUse).unwrap();
    let mut piece = target.take().unwrap();
    drop(piece.split_off(4 * PIECE));
    let mapping = driver.domain.local().map(piece, FromDevice).unwrap();
    let read = driver.queue.read(1, 0, 512, mapping).unwrap();
    let back = finish(&mut driver.queue, read).unmap().unwrap();
    assert!(bytes_of(back.memory()) == expected[..4 * PIECE]);
    assert_eq!(driver.domain.soft_bus().unwrap().stats().faults, 0);
}
