//! Payloads of one block from anywhere in the program: bounced, or in pages that their owner
//! declares shareable.

use crate::common::{namespaces, pattern};
use pinfold::memory::{BouncePool, OwnedMemory};
use pinfold::{Arena, Domain, MappingPolicy, Source};
use pinfold_core::access::{Direction, FromDevice, ToDevice};
use pinfold_core::domain::Payload;
use pinfold_nvme::driver::{Config, Controller, InFlight, Outcome, Queue};
use pinfold_nvme_model::{ModelConfig, ModelController, ModelRegisters};
use std::ptr::NonNull;

struct Rig {
    queue: Queue<ModelRegisters, Arena>,
    controller: Controller<ModelRegisters, Arena>,
    model: ModelController,
    arena: Arena,
    domain: Domain,
}

fn rig(use_sgls: bool) -> Rig {
    let domain = Domain::soft().unwrap();
    let arena = Arena::builder().size(4 << 20).source(Source::Plain).build(&domain).unwrap();
    let model =
        ModelController::spawn(domain.port().unwrap(), ModelConfig::new(namespaces(8 << 20)))
            .unwrap();
    let config = Config { use_sgls, ..Config::default() };
    let controller = Controller::start(model.registers(), arena.clone(), config).unwrap();
    let queue = controller.create_queue(8).unwrap();
    Rig { queue, controller, model, arena, domain }
}

impl Rig {
    fn finish<P>(&mut self, in_flight: InFlight<P>) -> P {
        let completion = self.queue.wait().unwrap().unwrap();
        let Outcome::Completed { payload, result } = in_flight.finish(completion) else {
            panic!("not completed")
        };
        result.unwrap();
        payload
    }

    /// Ends it all; the accesses that faulted are those that the test asked for.
    fn end(self, faults: u64) {
        let Self { queue, controller, model, arena, domain } = self;
        assert_eq!(domain.soft_bus().unwrap().stats().faults, faults);
        drop((queue, controller, model));
        assert_eq!(arena.stats().frames_in_use, 0);
    }
}

fn reaches<D: Direction>(
    domain: &Domain,
    payload: &impl Payload<D>,
    ahead: u64,
    write: bool,
) -> bool {
    let at = payload.segment(0).unwrap().iova.checked_add(ahead).unwrap();
    let port = domain.port().unwrap();
    if write { port.write(at, &[0xee]).is_ok() } else { port.read(at, &mut [0]).is_ok() }
}

#[test]
fn an_unaligned_payload_is_bounced_there_and_back() {
    for use_sgls in [false, true] {
        let mut rig = rig(use_sgls);
        let to = BouncePool::<ToDevice>::new(&rig.arena).unwrap();
        let from = BouncePool::<FromDevice>::new(&rig.arena).unwrap();
        // From one block to as many as a pool takes, none of them aligned in the program.
        for (slba, blocks) in [(1, 1), (2, 2), (5, 8), (20, 9), (40, 32)] {
            let len = blocks as usize * 512;
            let program = pattern(slba, len + 3);
            let payload = to.copy_of(&program[3..]).unwrap();
            assert!(
                !reaches(&rig.domain, &payload, 0, true),
                "a device does not change what it is sent"
            );
            let write = rig.queue.write(1, slba, blocks, payload).unwrap();
            drop(rig.finish(write));

            let read = rig.queue.read(1, slba, blocks, from.alloc(len).unwrap()).unwrap();
            let payload = rig.finish(read);
            let mut back = vec![0xcc; len + 2];
            payload.memory().copy_to_slice(0, &mut back[1..=len]).unwrap();
            assert_eq!(back[1..=len], program[3..]);
            assert_eq!((back[0], back[len + 1]), (0xcc, 0xcc));
        }
        drop((to, from));
        rig.end(5);
    }
}

#[test]
fn a_payload_of_another_length_than_the_command_is_refused() {
    let mut rig = rig(false);
    let payload = BouncePool::<ToDevice>::new(&rig.arena).unwrap().copy_of(&[1; 511]).unwrap();
    let rejected = rig.queue.write(1, 0, 1, payload).unwrap_err();
    assert_eq!(rejected.payload.len(), 511);
    drop(rejected);
    rig.end(0);
}

#[repr(align(4096))]
struct Slots([u8; 8192]);

#[test]
fn a_slot_of_shared_pages_is_transferred_alone() {
    let mut rig = rig(false);
    let slots = Box::leak(Box::new(Slots([0x5a; 8192])));
    slots.0[4608..5120].copy_from_slice(&pattern(9, 512));
    let pages = NonNull::from(&mut slots.0 as &mut [u8]);
    // SAFETY: the pages are leaked, and reached through this value alone.
    let memory = unsafe { OwnedMemory::sharing_pages(pages, 4608..5120, ()) }.unwrap();
    memory.map_into(&rig.domain, MappingPolicy::PerUse).unwrap();

    let domain = rig.domain.clone();
    let mapping = domain.map(memory.take().unwrap(), ToDevice).unwrap();
    let write = rig.queue.write(1, 7, 1, mapping).unwrap();
    let mapping = rig.finish(write);
    assert!(reaches(&domain, &mapping, 512, false), "the neighbour: it was declared shareable");
    let piece = mapping.unmap().unwrap();

    let mapping = domain.map(piece, FromDevice).unwrap();
    let read = rig.queue.read(1, 7, 1, mapping).unwrap();
    let piece = rig.finish(read).unmap().unwrap();
    let mut page = vec![0; 4096];
    piece.memory().copy_to_slice(0, &mut page).unwrap();
    assert_eq!(page[512..1024], pattern(9, 512));
    assert!(
        page[..512].iter().chain(&page[1024..]).all(|&byte| byte == 0x5a),
        "no neighbour was written"
    );
    drop((piece, memory, domain));
    rig.end(0);
}
