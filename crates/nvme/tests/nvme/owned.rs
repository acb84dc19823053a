//! A program's own memory as the payload of commands: written to the controller and read back through the IOMMU.

use crate::common::{namespaces, pattern};
use pinfold::memory::{OwnedMemory, OwnedPieces, Reclaim};
use pinfold::{Arena, Domain, MappingPolicy, Source};
use pinfold_core::access::{FromDevice, ToDevice};
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
            ModelController::spawn(domain.port().unwrap(), ModelConfig::new(namespaces(32 << 20))).unwrap();
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
        let mapping: Mapping<_, _, &pinfold_core::domain::Domain> = domain.map(pieces, FromDevice).unwrap();
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
        ModelController::spawn(domain.port().unwrap(), ModelConfig::new(namespaces(8 << 20))).unwrap();
    let controller = Controller::start(model.registers(), control, Config::default()).unwrap();
    let mut queue = controller.create_queue(8).unwrap();
    let memory = OwnedMemory::from_vec(vec![0; 64 << 10]).unwrap();
    memory.map_into(&domain, MappingPolicy::PerUse).unwrap();
    let mut piece = memory.take().unwrap();
    drop(piece.split_off(8192).unwrap());
    let read = queue.read(1, 0, 16, domain.map(piece, FromDevice).unwrap()).unwrap();
    let Err(Reclaim::InUse(memory)) = memory.reclaim::<Vec<u8>>() else { panic!("it is in flight") };
    drop(finish(&mut queue, read));
    assert_eq!(memory.reclaim::<Vec<u8>>().unwrap().len(), 64 << 10);
}
