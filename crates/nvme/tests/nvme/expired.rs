//! Requests that end before all of their commands were sent, or that cannot be aborted.

use crate::common::*;
use crate::faults::{SECOND, settle};
use pinfold_core::access::Bidirectional;
use pinfold_core::addr::Segment;
use pinfold_core::domain::DomainId;
use pinfold_nvme::driver::{CommandError, Config, Error, InFlight, LayoutError, Outcome, Payload};
use pinfold_nvme::spec::{SglSupport, admin};
use pinfold_nvme_model::{CommandInfo, Fault, ModelConfig, Trigger};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Three slots: the first request has five commands, of which two are not sent before it is
/// aborted. The second one waits behind it.
#[test]
fn what_waits_behind_an_expired_request_is_sent() {
    let clock = TestClock::default();
    let second = Duration::from_secs(1);
    let config = Config {
        timeout: second,
        abort_timeout: second,
        clock: Arc::new(clock.clone()),
        max_transfer_bytes: 4096,
        ..Config::default()
    };
    let mut model = ModelConfig::new(namespaces(4 << 20));
    model.mqes = 3;
    let bench = bench(256, model, config);
    let mut queue = bench.controller.create_queue(2).unwrap();
    let held = |seen: &CommandInfo| seen.queue != 0 && seen.slba < 5;
    bench.model.faults().inject(Trigger::Matches(Box::new(held)), Fault::Hold);
    let expired = queue.write(2, 0, 5, Buffer::new(&bench.arena, 5 * 4096)).unwrap();
    queue.ring_doorbell();
    settle(&bench);
    clock.advance(SECOND / 2);
    let behind = queue.write(2, 8, 1, Buffer::new(&bench.arena, 4096)).unwrap();
    assert!(queue.poll().unwrap().is_none());
    clock.advance(SECOND / 2 + 1);
    // The second one may end before the last command of the first.
    let mut ended: Vec<_> = (0..2).map(|_| queue.wait().unwrap().unwrap()).collect();
    let mut result = |request: InFlight<Buffer>| {
        let at = ended.iter().position(|ended| ended.tag() == request.tag()).unwrap();
        let Outcome::Completed { result, .. } = request.finish(ended.swap_remove(at)) else {
            panic!("timed out")
        };
        result
    };
    assert_eq!(result(expired), Err(CommandError::Aborted));
    assert_eq!(result(behind), Ok(()));
    assert_eq!((queue.stats().timeouts, queue.stats().commands), (1, 4));
}

/// The admin queue has lost a command, so it sends no abort: the request is quarantined at once,
/// not after the time for an abort.
#[test]
fn a_request_that_cannot_be_aborted_is_quarantined_at_once() {
    let (now, step) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let clock = {
        let (now, step) = (now.clone(), step.clone());
        move || now.fetch_add(step.load(Ordering::SeqCst), Ordering::SeqCst)
    };
    let limit = Duration::from_secs(3600);
    let config = Config {
        timeout: limit,
        abort_timeout: limit,
        admin_timeout: limit,
        clock: Arc::new(clock),
        ..Config::default()
    };
    let bench = bench(256, ModelConfig::new(namespaces(4 << 20)), config);
    let mut queue = bench.controller.create_queue(2).unwrap();
    let lost = |seen: &CommandInfo| seen.queue != 0 || seen.opcode == admin::IDENTIFY;
    bench.model.faults().inject(Trigger::Matches(Box::new(lost)), Fault::NeverComplete);
    let aborts = |seen: &CommandInfo| seen.queue == 0 && seen.opcode == admin::ABORT;
    bench.model.faults().inject(Trigger::Matches(Box::new(aborts)), Fault::NeverComplete);
    let request = queue.flush(1).unwrap();
    queue.ring_doorbell();
    settle(&bench);
    // An hour passes until the admin command is given up, and another one until its abort is.
    step.store(SECOND, Ordering::SeqCst);
    let lost = bench.controller.scan_namespaces().unwrap_err();
    assert!(matches!(lost, Error::AdminTimeout { .. }), "{lost}");
    step.store(0, Ordering::SeqCst);
    assert!(queue.poll().unwrap().is_none());
    let completion = queue.poll().unwrap().expect("nothing can abort it");
    assert!(completion.timed_out());
    drop(request.finish(completion));
    assert_eq!((queue.stats().timeouts, queue.stats().aborts), (1, 0));
}

/// Two pages, and two blocks that are no list of pages.
struct Pieces(Buffer);

// SAFETY: inside the buffer, which has 7 pages; otherwise as for `Buffer`.
unsafe impl Payload<Bidirectional> for Pieces {
    fn domain(&self) -> Option<DomainId> {
        Payload::<Bidirectional>::domain(&self.0)
    }
    fn segment(&self, index: usize) -> Option<Segment> {
        let &(offset, len) = [(0, 4096), (8192, 4096), (16384, 512), (24576, 512)].get(index)?;
        Some(Segment { iova: self.0.iova().checked_add(offset)?, len })
    }
}

/// Its first command is sent before the next one is found to be impossible.
#[test]
fn a_request_whose_rest_cannot_be_addressed_ends_with_what_was_sent() {
    let config = Config { max_transfer_bytes: 8192, ..Config::default() };
    let model =
        ModelConfig { sgls: SglSupport::Unsupported, ..ModelConfig::new(namespaces(4 << 20)) };
    let bench = bench(256, model, config);
    let mut queue = bench.controller.create_queue(4).unwrap();
    let write = queue.write(1, 0, 18, Pieces(Buffer::new(&bench.arena, 7 * 4096))).unwrap();
    let result = one(&mut queue, write).1;
    assert!(matches!(result, Err(CommandError::Layout(LayoutError::Ragged { .. }))), "{result:?}");
    assert_eq!((queue.stats().commands, bench.controller.stats().list_pages_used), (1, 0));
    let flush = queue.flush(1).unwrap();
    assert_eq!(one(&mut queue, flush).1, Ok(()));
}
