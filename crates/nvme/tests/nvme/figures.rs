//! Figures that the documentation names, and sums of counters.

use crate::common::*;
use crate::faults::{SECOND, with_test_clock};
use pinfold_nvme::driver::{Config, QueueStats};
use pinfold_nvme_model::{Fault, Trigger};
use std::time::Duration;

#[test]
fn the_defaults_are_those_of_the_documentation() {
    let config = Config::default();
    let limits = [config.timeout, config.abort_timeout, config.retry_limit, config.admin_timeout];
    assert_eq!(limits, [30, 5, 10, 60].map(Duration::from_secs));
    assert_eq!((config.queues, config.max_transfer_bytes, config.use_sgls), (16, 1 << 20, true));
}

#[test]
fn the_counters_of_two_queues_are_added() {
    let counted = |factor: u64| QueueStats {
        requests: factor,
        retried_requests: 2 * factor,
        timeouts: 3 * factor,
        aborted: 4 * factor,
        commands: 5 * factor,
        retries: 6 * factor,
        retry_wait_ns: 7 * factor,
        aborts: 8 * factor,
        completions: 9 * factor,
        errors: 10 * factor,
        late_completions: 11 * factor,
        spurious_completions: 12 * factor,
        bad_heads: 13 * factor,
        segments: 14 * factor,
        segments_max: 15 * factor,
        prp_entries: 16 * factor,
        prp_list_pages: 17 * factor,
        sgl_data_blocks: 18 * factor,
        sgl_segment_pages: 19 * factor,
        doorbells: 20 * factor,
        sleeps: 21 * factor,
        interrupts: 22 * factor,
    };
    let sum = QueueStats { segments_max: 15 * 100, ..counted(101) };
    assert_eq!(counted(1).merged(counted(100)), sum);
    assert_eq!(counted(100).merged(counted(1)), sum);
}

#[test]
fn a_sleep_ends_at_the_deadline_or_after_100_ms() {
    let (bench, clock) = with_test_clock();
    let mut queue = bench.controller.create_queue(2).unwrap();
    bench.model.faults().inject(Trigger::Nth(1), Fault::Hold);
    let held = queue.flush(1).unwrap();
    assert_eq!(queue.arm_interrupt(), Duration::from_millis(100));
    clock.advance(SECOND - 50_000_000);
    assert!(queue.poll().unwrap().is_none());
    assert_eq!(queue.arm_interrupt(), Duration::from_millis(50));
    bench.model.faults().release();
    assert_eq!(one(&mut queue, held).1, Ok(()));
}
