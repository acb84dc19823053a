//! Against the model controller, with faults: a typed error or a retry, never a hang, never a wrong byte.

use super::*;
use crate::copy::error::PumpError;
use crate::copy::pump::{Phase, Plan, pump};
use crate::progress::Progress;
use crate::signal::Interrupt;
use crate::targets::fake::Fake;
use pinfold::{Arena, Buffer, MappingPolicy};
use pinfold_nvme::driver::{CommandError, Config};
use pinfold_nvme::spec::Status;
use pinfold_nvme_model::{Fault, MemoryMedia, ModelConfig, ModelController, ModelRegisters, Trigger};
use std::sync::Arc;

const BLOCK: usize = 8192;
const BYTES: u64 = 40 * BLOCK as u64;

struct Bench {
    domain: pinfold::Domain,
    control: Arena,
    data: Arena,
    model: ModelController,
    protect: Protect,
}

type Soft<'d> = NvmeTarget<'d, Buffer, ModelRegisters, Arena>;

impl Bench {
    fn new(protect: Protect) -> Self {
        let domain = pinfold::Domain::soft().unwrap();
        let mapping_policy =
            if protect == Protect::Static { MappingPolicy::Whole } else { MappingPolicy::PerUse };
        let data = Arena::builder().size(1 << 20).mapping_policy(mapping_policy).build(&domain).unwrap();
        let control =
            Arena::builder().size(2 << 20).mapping_policy(MappingPolicy::Whole).build(&domain).unwrap();
        let media = Arc::new(MemoryMedia::new(1 << 20));
        let namespace = pinfold_nvme_model::Namespace::new(media, 512).unwrap();
        let port = domain.port().unwrap();
        let model = ModelController::spawn(port, ModelConfig::new(vec![namespace])).unwrap();
        Self { domain, control, data, model, protect }
    }

    fn target(&self) -> Soft<'_> {
        let config = Config { timeout: Duration::from_millis(200), ..Config::default() };
        let controller = Controller::start(self.model.registers(), self.control.clone(), config).unwrap();
        let namespace = controller.namespaces()[0];
        NvmeTarget::new("soft".into(), (&self.domain, self.protect), (controller, namespace), 8, None)
            .unwrap()
    }

    fn buffers(&self) -> Vec<Buffer> {
        (0..8).map(|_| self.data.alloc(BLOCK).unwrap()).collect()
    }
}

const PROTECTIONS: [Protect; 3] = [Protect::Static, Protect::Revoke, Protect::Strict];

fn go(
    from: &mut dyn Target<Buffer>,
    to: &mut dyn Target<Buffer>,
    buffers: &mut Vec<Buffer>,
) -> Result<Phase, PumpError> {
    let plan = Plan { total: BYTES, block: BLOCK };
    pump(from, to, plan, buffers, &Progress::hidden(), &Interrupt::default())
}

/// Writes, reads back, and compares.
fn there_and_back(target: &mut Soft<'_>, buffers: &mut Vec<Buffer>) {
    let data: Vec<u8> = (0..=250u8).cycle().take(40 * BLOCK).collect();
    let (mut from, mut to) = (Fake::new(data, 512), Fake::new(Vec::new(), 512).grows());
    go(&mut from, target, buffers).unwrap();
    go(target, &mut to, buffers).unwrap();
    assert!(from.data == to.data, "a wrong byte");
    assert_eq!(buffers.len(), 8);
}

fn write(target: &mut Soft<'_>, buffers: &mut Vec<Buffer>) -> Result<Phase, PumpError> {
    let mut from = Fake::new((0..=250u8).cycle().take(40 * BLOCK).collect(), 512);
    go(&mut from, target, buffers)
}

#[test]
fn what_may_be_retried_is_and_what_comes_out_of_order_is_put_right() {
    for protect in PROTECTIONS {
        let bench = Bench::new(protect);
        let mut target = bench.target();
        let mut buffers = bench.buffers();
        bench.model.faults().inject(Trigger::Every(7), Fault::Fail(Status::NAMESPACE_NOT_READY));
        bench.model.faults().inject(Trigger::Every(3), Fault::Reorder(2));
        there_and_back(&mut target, &mut buffers);
        let account = target.account();
        assert!(account.retries > 0 && account.errors == account.retries, "{account:?}");
        drop(target);
        let stats = bench.domain.stats();
        assert_eq!((stats.live, stats.quarantined), (0, 0), "{protect:?}");
    }
}

#[test]
fn what_may_not_be_retried_ends_it_with_all_buffers_back() {
    for protect in PROTECTIONS {
        let bench = Bench::new(protect);
        let mut target = bench.target();
        let mut buffers = bench.buffers();
        let status = Status::WRITE_FAULT.do_not_retry();
        bench.model.faults().inject(Trigger::Nth(20), Fault::Fail(status));
        let error = write(&mut target, &mut buffers).unwrap_err();
        let PumpError::Target(TargetError::Command { error, .. }) = error else { panic!("{error:?}") };
        assert_eq!(error, CommandError::Status(status));
        assert_eq!(buffers.len(), 8);
        assert_eq!(target.account().retries, 0);
        there_and_back(&mut target, &mut buffers);
    }
}

#[test]
fn one_that_fails_again_and_again_is_given_up() {
    let bench = Bench::new(Protect::Revoke);
    let mut target = bench.target();
    let mut buffers = bench.buffers();
    bench.model.faults().inject(Trigger::Every(1), Fault::Fail(Status::INTERNAL_ERROR));
    let error = write(&mut target, &mut buffers).unwrap_err();
    assert!(error.to_string().contains("internal error"), "{error}");
    assert_eq!(buffers.len(), 8);
    assert!(target.account().retries >= 3);
}

#[test]
fn a_command_that_never_completes_quarantines_its_buffer_and_no_other() {
    for protect in PROTECTIONS {
        let bench = Bench::new(protect);
        let mut target = bench.target();
        let mut buffers = bench.buffers();
        bench.model.faults().inject(Trigger::Nth(20), Fault::NeverComplete);
        let error = write(&mut target, &mut buffers).unwrap_err();
        assert!(matches!(error, PumpError::Target(TargetError::Silent { .. })), "{error:?}");
        assert_eq!((buffers.len(), target.account().timeouts), (7, 1), "{protect:?}");
    }
}

#[test]
fn a_controller_that_fails_is_disabled_so_that_all_buffers_come_back() {
    for protect in PROTECTIONS {
        let bench = Bench::new(protect);
        let mut target = bench.target();
        let mut buffers = bench.buffers();
        bench.model.faults().inject(Trigger::Nth(20), Fault::Fatal);
        let error = write(&mut target, &mut buffers).unwrap_err();
        let PumpError::Target(TargetError::Poll { error, .. }) = error else { panic!("{error:?}") };
        assert_eq!(error, PollError::Fatal);
        assert_eq!(buffers.len(), 8, "{protect:?}");
        // It is not taken into use again: what comes now is refused, and does not hang.
        let error = write(&mut target, &mut buffers).unwrap_err();
        assert!(matches!(error, PumpError::Target(TargetError::Rejected { .. })), "{error:?}");
        assert_eq!(buffers.len(), 8);
    }
}
