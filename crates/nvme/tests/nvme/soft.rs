//! The whole stack: arena, domain, software IOMMU, model controller, driver.

use crate::common::{namespaces, pattern};
use pinfold::soft::SoftConfig;
use pinfold::{Arena, Buffer, Domain, MappingPolicy, Source};
use pinfold_core::access::{Bidirectional, Direction, FromDevice, ToDevice};
use pinfold_core::domain::{DomainId, Mapping};
use pinfold_nvme::Registers;
use pinfold_nvme::driver::{
    CommandError, Config, Controller, Error, InFlight, Outcome, Queue, Reject,
};
use pinfold_nvme_model::{
    BusAccess, Fault, InjectionOutcome, ModelConfig, ModelController, ModelRegisters, ROGUE_BYTE,
    Trigger,
};
use std::time::Duration;

/// Bound in this order, so that the queue is dropped first and the model last.
struct Stack {
    model: ModelController,
    domain: Domain,
    arena: Arena,
    controller: Controller<ModelRegisters, Arena>,
    queue: Queue<ModelRegisters, Arena>,
}

fn stack(mapping_policy: MappingPolicy, config: Config) -> Stack {
    let mut soft = SoftConfig::default();
    (soft.late_by, soft.iotlb_entries) = (Duration::from_micros(50), 64);
    let domain = Domain::soft_with(soft).unwrap();
    // Queues stay mapped; the payloads have the requested policy.
    let build = |mapping_policy, size| {
        Arena::builder()
            .size(size)
            .source(Source::Plain)
            .mapping_policy(mapping_policy)
            .build(&domain)
            .unwrap()
    };
    let arena = build(mapping_policy, 24 << 20);
    let model =
        ModelController::spawn(domain.port().unwrap(), ModelConfig::new(namespaces(32 << 20)))
            .unwrap();
    let controller =
        Controller::start(model.registers(), build(MappingPolicy::PerUse, 4 << 20), config)
            .unwrap();
    let queue = controller.create_queue(8).unwrap();
    Stack { queue, controller, model, arena, domain }
}

fn finish<P>(
    queue: &mut Queue<ModelRegisters, Arena>,
    in_flight: InFlight<P>,
) -> (P, Result<(), CommandError>) {
    let completion = queue.wait().unwrap().unwrap();
    match in_flight.finish(completion) {
        Outcome::Completed { payload, result } => (payload, result),
        _ => panic!("not done"),
    }
}

fn mapped<D: Direction>(stack: &Domain, buffer: Buffer, direction: D) -> Mapping<Buffer, D> {
    stack.map(buffer, direction).unwrap()
}

#[test]
fn data_round_trips_through_the_iommu() {
    for mapping_policy in [MappingPolicy::Whole, MappingPolicy::PerUse] {
        let Stack { model: _model, domain, arena, controller, mut queue } =
            stack(mapping_policy, Config::default());
        for (nsid, block) in [(1, 512usize), (2, 4096)] {
            for blocks in [1, 2, 9, 255, (8 << 20) / block] {
                let bytes = pattern(blocks as u64, blocks * block);
                let source = arena.alloc(bytes.len()).unwrap();
                source.memory().copy_from_slice(0, &bytes).unwrap();
                let write =
                    queue.write(nsid, 3, blocks as u32, mapped(&domain, source, ToDevice)).unwrap();
                let (source, result) = finish(&mut queue, write);
                result.unwrap();
                source.unmap().unwrap();
                let target = mapped(&domain, arena.alloc_zeroed(bytes.len()).unwrap(), FromDevice);
                let read = queue.read(nsid, 3, blocks as u32, target).unwrap();
                let (target, result) = finish(&mut queue, read);
                result.unwrap();
                let mut back = vec![0; bytes.len()];
                target.revoke().wait().unwrap().memory().copy_to_slice(0, &mut back).unwrap();
                assert!(back == bytes, "{blocks} blocks of {block}, {mapping_policy:?}");
            }
        }
        assert_eq!(domain.soft_bus().unwrap().stats().faults, 0);
        drop(queue);
        assert_eq!(controller.stats().list_pages_used, 0);
    }
}

#[test]
fn an_access_by_a_stale_address_faults_after_unmap() {
    let Stack { model, domain, arena, controller: _controller, mut queue } =
        stack(MappingPolicy::PerUse, Config::default());
    let faults = model.faults();
    faults.inject(Trigger::Nth(1), Fault::Remember);
    let payload = mapped(&domain, arena.alloc_zeroed(4096).unwrap(), Bidirectional);
    let read = queue.read(1, 0, 8, payload).unwrap();
    let (payload, result) = finish(&mut queue, read);
    result.unwrap();
    assert_eq!(faults.access_remembered(BusAccess::Write)[0].outcome, InjectionOutcome::Succeeded);
    let mut buffer = payload.unmap().unwrap();
    assert!(buffer.as_slice().unwrap().iter().all(|byte| *byte == ROGUE_BYTE));
    for access in [BusAccess::Write, BusAccess::Read] {
        assert!(matches!(faults.access_remembered(access)[0].outcome, InjectionOutcome::Fault(_)));
    }
    assert_eq!(domain.soft_bus().unwrap().stats().faults, 2);
}

#[test]
fn a_payload_of_another_domain_is_rejected() {
    let Stack { model, domain: _domain, arena: _arena, controller: _controller, mut queue } =
        stack(MappingPolicy::PerUse, Config::default());
    let other = Domain::soft().unwrap();
    let elsewhere = Arena::builder().size(1 << 20).build(&other).unwrap();
    let payload = mapped(&other, elsewhere.alloc_zeroed(4096).unwrap(), Bidirectional);
    let before = model.stats().commands;
    let rejected = queue.read(1, 0, 8, payload).unwrap_err();
    queue.ring_doorbell();
    assert_eq!(rejected.reason, Reject::OtherDomain);
    drop(rejected.payload.unmap().unwrap());
    assert_eq!(model.stats().commands, before);
}

/// The registers of a controller in a given domain.
struct Placed(ModelRegisters, DomainId);

impl Registers for Placed {
    fn read32(&self, offset: u32) -> u32 {
        self.0.read32(offset)
    }
    fn read64(&self, offset: u32) -> u64 {
        self.0.read64(offset)
    }
    fn write32(&self, offset: u32, value: u32) {
        self.0.write32(offset, value);
    }
    fn write64(&self, offset: u32, value: u64) {
        self.0.write64(offset, value);
    }
    fn domain(&self) -> Option<DomainId> {
        Some(self.1)
    }
}

#[test]
fn a_controller_is_not_started_with_memory_of_another_domain() {
    let (domain, other) = (Domain::soft().unwrap(), Domain::soft().unwrap());
    let config = ModelConfig::new(namespaces(1 << 20));
    let model = ModelController::spawn(domain.port().unwrap().clone(), config).unwrap();
    let start = |arena: Arena| {
        Controller::start(Placed(model.registers(), domain.id()), arena, Config::default())
            .map(drop)
    };
    let rings =
        |domain| Arena::builder().size(4 << 20).source(Source::Plain).build(domain).unwrap();
    assert_eq!(start(rings(&other)), Err(Error::OtherDomain));
    // The model knows the domain of its port itself.
    let error = Controller::start(model.registers(), rings(&other), Config::default());
    assert_eq!(error.map(drop), Err(Error::OtherDomain));
    assert_eq!(start(rings(&domain)), Ok(()));
}

#[test]
fn a_mapping_for_the_wrong_direction_is_a_data_transfer_error() {
    // The types exclude it; the IOMMU stops a device that does it nevertheless.
    struct WrongDirection(Mapping<Buffer, ToDevice>);
    // SAFETY: it is not so, on purpose: the mapping is for the other direction, which the IOMMU
    // enforces.
    unsafe impl pinfold_nvme::driver::Payload<FromDevice> for WrongDirection {
        fn domain(&self) -> Option<DomainId> {
            pinfold_nvme::driver::Payload::domain(&self.0)
        }
        fn segment(&self, index: usize) -> Option<pinfold_core::addr::Segment> {
            (index == 0).then(|| self.0.segment())
        }
    }
    let Stack { model: _model, domain, arena, controller: _controller, mut queue } =
        stack(MappingPolicy::PerUse, Config { retry_limit: Duration::ZERO, ..Config::default() });
    let payload = WrongDirection(mapped(&domain, arena.alloc_zeroed(4096).unwrap(), ToDevice));
    let read = queue.read(1, 0, 8, payload).unwrap();
    let (_, result) = finish(&mut queue, read);
    assert_eq!(result, Err(CommandError::Status(pinfold_nvme::spec::Status::DATA_TRANSFER_ERROR)));
}

#[test]
fn a_lost_command_keeps_its_mapping_until_reset() {
    let config = Config {
        timeout: Duration::from_millis(20),
        abort_timeout: Duration::ZERO,
        ..Config::default()
    };
    let Stack { model, domain, arena, controller, mut queue } =
        stack(MappingPolicy::PerUse, config);
    let faults = model.faults();
    faults.inject(Trigger::Nth(1), Fault::Hold);
    let read = queue
        .read(1, 0, 64, mapped(&domain, arena.alloc_zeroed(32 << 10).unwrap(), FromDevice))
        .unwrap();
    let completion = queue.wait().unwrap().unwrap();
    let Outcome::TimedOut(quarantined) = read.finish(completion) else { panic!("it was lost") };
    while queue.stats().late_completions == 0 {
        // Again, if the model had not taken the command when it was released the last time.
        faults.release();
        assert!(queue.poll().unwrap().is_none());
        // A poll with nothing in flight still reads the ring.
        std::thread::yield_now();
    }
    let quarantined = quarantined.recover().unwrap_err();
    assert_eq!(
        domain.soft_bus().unwrap().stats().faults,
        0,
        "the late access reached quarantined memory only"
    );
    controller.reset().unwrap();
    quarantined.recover().unwrap().unmap().unwrap();
    assert_eq!(controller.stats().quarantined_permanently, 0);
}
