//! A queue belongs to one generation of its controller.

use crate::common::*;
use pinfold_core::addr::Iova;
use pinfold_core::dma_pool::{ChunkSource, SourceError};
use pinfold_core::frame::{Frame, Order};
use pinfold_nvme::driver::{Config, Controller, Error, Outcome};
use pinfold_nvme::spec::{Status, admin};
use pinfold_nvme_model::{
    CommandInfo, Fault, ModelConfig, ModelController, ModelRegisters, Trigger,
};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

type Hook = Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>;

/// An arena that runs a hook, once, before it allocates.
#[derive(Clone)]
struct Hooked(Arena, Hook);

// SAFETY: all of it is the arena's.
unsafe impl ChunkSource for Hooked {
    fn span(&self) -> NonNull<[u8]> {
        self.0.span()
    }
    fn iova(&self) -> Iova {
        self.0.iova()
    }
    fn acquire(&self, order: Order) -> Result<Frame, SourceError> {
        let hook = self.1.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
        self.0.acquire(order)
    }
    unsafe fn release(&self, frame: Frame, order: Order) {
        // SAFETY: the caller's contract.
        unsafe { self.0.release(frame, order) };
    }
}

#[test]
fn a_reset_while_a_queue_is_created_does_not_make_it_stale() {
    let arena = Arena(Memory::new(256));
    let model =
        ModelController::spawn(arena.clone(), ModelConfig::new(namespaces(1 << 20))).unwrap();
    let source = Hooked(arena.clone(), Hook::default());
    let controller: Controller<ModelRegisters, Hooked> =
        Controller::start(model.registers(), source.clone(), Config::default()).unwrap();
    let again = controller.clone();
    *source.1.lock().unwrap() = Some(Box::new(move || again.reset().unwrap()));
    let before = arena.0.used();
    let mut queue = controller.create_queue(4).unwrap();
    assert!(source.1.lock().unwrap().is_none() && controller.stats().resets == 2);
    let flush = queue.flush(1).expect("the controller has the queue");
    let completion = queue.wait().unwrap().unwrap();
    assert!(matches!(flush.finish(completion), Outcome::Completed { result: Ok(()), .. }));
    drop(queue);
    assert_eq!(arena.0.used(), before);
    // Had the rings been released without deleting the queue, the identifier would still be in use.
    assert_eq!(controller.create_queue(4).unwrap().id(), 1);
    assert_eq!(model.stats().errors, 0);
}

#[test]
fn a_partly_created_queue_is_quarantined() {
    let bench = bench(256, ModelConfig::new(namespaces(1 << 20)), Config::default());
    let (faults, status) = (bench.model.faults(), Status::INTERNAL_ERROR);
    let on = |opcode| {
        let hit = move |seen: &CommandInfo| seen.queue == 0 && seen.opcode == opcode;
        Trigger::Matches(Box::new(hit))
    };
    let before = bench.arena.0.used();
    for opcode in [admin::CREATE_CQ, admin::CREATE_SQ] {
        faults.inject(on(opcode), Fault::Fail(status));
        assert!(matches!(bench.controller.create_queue(1), Err(Error::Admin { .. })));
        assert_eq!(
            (bench.arena.0.used(), bench.controller.stats().quarantined_queues),
            (before, 0)
        );
        faults.clear();
    }
    faults.inject(on(admin::CREATE_SQ), Fault::Fail(status));
    faults.inject(on(admin::DELETE_CQ), Fault::Fail(status));
    assert!(matches!(bench.controller.create_queue(1), Err(Error::Admin { .. })));
    assert_eq!(
        (bench.arena.0.used(), bench.controller.stats().quarantined_queues),
        (before + 2, 1)
    );
    faults.clear();
    // The controller has a completion queue of this number.
    assert_eq!(bench.controller.create_queue(1).unwrap().id(), 2);
    bench.controller.reset().unwrap();
    assert_eq!((bench.arena.0.used(), bench.controller.stats().quarantined_queues), (before, 0));
    assert_eq!(bench.controller.create_queue(1).unwrap().id(), 1);
}
