//! A random adversary on the real stack: no access lands after its mapping is quiesced, and a stack
//! with any one known mistake is caught.
//!
//! Several owners map, revoke and unmap buffers of 4 KiB to 2 MiB behind the software IOMMU, one by
//! one and in batches, through the domain and through handles with windows of their own; they pass
//! mappings to each other and give up their handles. Meanwhile devices do DMA at random. Every page
//! carries tags that say whose it is ([`world`]), so that the reader of a page knows at once whether
//! it should have. Owners that use request loops mix payloads that stay mapped with others, accesses
//! within a request, and requests of no payload; they lose requests and complete them after all, drop
//! loops with requests outstanding, and find units that hang and fail: then no byte is missing that
//! is not counted. Table pages are so few that they are constantly retired and used again; free
//! ones are poisoned. The addresses lie around multiples of 1 GiB. The times of the IOMMU are drawn
//! from the seed of each [`round`].
//!
//! Choices follow from the seed; what threads do to each other does not, so a seed repeats a round
//! in kind and not to the instruction. `PINFOLD_ADVERSARY_ACCESSES` makes the run without a mistake
//! as long as that many accesses of devices need (`make adversary`: 10^9),
//! `PINFOLD_ADVERSARY_SECONDS` as long as asked, and `PINFOLD_ADVERSARY_SEED` sets the seed that
//! all runs begin from.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test, of small numbers"
)]

use owner::Through;
use pinfold_core::known_bad::Mistake;
use round::{Careless, Fault, Outcome, Size, Trouble, play};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

mod device;
mod loops;
mod owner;
mod round;
mod world;

const ROUND: Size =
    Size { owners: 3, devices: 2, arena_bytes: 32 << 20, length: Duration::from_millis(300) };
/// The soak: more owners than any machine has processors, so that each is descheduled at every
/// place.
const SOAK: Size =
    Size { owners: 196, devices: 4, arena_bytes: 256 << 20, length: Duration::from_secs(5) };
/// The time in which a mistake must be caught; most are caught in the first round. A busy machine
/// also has that many accesses, in at most twenty times as long.
const BUDGET: Duration = Duration::from_secs(30);
const BUDGET_ACCESSES: u64 = 50_000_000;
/// The least accesses of the run without a mistake, and its longest time.
const ACCESSES: u64 = 1_000_000;
const LONGEST: Duration = Duration::from_secs(600);

/// One at a time: each run has more threads than there are processors as it is.
static ALONE: Mutex<()> = Mutex::new(());

/// Returns the number in `PINFOLD_ADVERSARY_<name>`.
fn asked(name: &str) -> Option<u64> {
    std::env::var(format!("PINFOLD_ADVERSARY_{name}")).ok().and_then(|asked| asked.parse().ok())
}

fn first_seed() -> u64 {
    asked("SEED").unwrap_or(1)
}

#[test]
fn the_stack_without_mistakes_is_clean() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (accesses, seconds) = (asked("ACCESSES"), asked("SECONDS").map(Duration::from_secs));
    let least = accesses.unwrap_or(ACCESSES);
    let start = Instant::now();
    let mut sum = Outcome::default();
    let (mut rounds, mut caching, mut peak) = (0, 0, 0);
    let (mut by_handle, mut by_loop, mut hung) = (0, 0, 0);
    for seed in first_seed().. {
        let outcome = play(seed, None, None, ROUND);
        assert_eq!(outcome.caught, None);
        let stats = outcome.stats;
        let lost = (stats.live, stats.quarantined, stats.deferred, stats.windows);
        match outcome.trouble {
            Trouble::None => {
                assert_eq!(lost, (0, 0, 0, 0), "seed {seed}");
                assert_eq!(stats.unmaps, stats.maps, "seed {seed}: {stats:?}");
            }
            Trouble::Drops => assert_eq!(
                (stats.quarantined, stats.deferred),
                (outcome.quarantined, 0),
                "seed {seed}"
            ),
            // No flush completes any more, but late ones may complete.
            Trouble::Fails => assert_eq!(stats.deferred, 0, "seed {seed}"),
            Trouble::Hangs => assert_eq!(stats.quarantined, 0, "seed {seed}"),
        }
        rounds += 1;
        hung += u64::from(outcome.trouble == Trouble::Hangs && stats.deferred > 0);
        caching += u64::from(outcome.caching_mode);
        sum.accesses += outcome.accesses;
        sum.landed += outcome.landed;
        sum.maps += outcome.maps;
        sum.no_pages += outcome.no_pages;
        sum.late += outcome.late;
        sum.large += outcome.large;
        sum.remote += outcome.remote;
        sum.without_payloads += outcome.without_payloads;
        sum.mixed += outcome.mixed;
        sum.fixed += outcome.fixed;
        sum.lost += outcome.lost;
        sum.quarantined += outcome.quarantined;
        match outcome.through {
            Some(Through::Handles) => by_handle += outcome.maps,
            Some(Through::Requests) => by_loop += outcome.maps,
            _ => {}
        }
        peak = peak.max(stats.backend.invalidations.in_flight_peak);
        let kinds = sum.maps > 500
            && sum.no_pages > 10
            && sum.large > 10
            && sum.late > 10
            && sum.remote > 10
            && sum.without_payloads.min(sum.mixed).min(sum.fixed) > 3;
        let troubled = hung > 0 && sum.lost > 0 && sum.quarantined > 0;
        let enough = sum.accesses >= least
            && rounds >= 24
            && kinds
            && troubled
            && caching > 1
            && peak > 2
            && by_handle > 100
            && by_loop > 100;
        let longest = if accesses.is_some() { Duration::MAX } else { LONGEST };
        if start.elapsed() >= seconds.unwrap_or(if enough { Duration::ZERO } else { longest }) {
            break;
        }
    }
    println!(
        "no access of {} landed where none may ({} landed elsewhere) in {rounds} rounds and {:.1?}; {} maps, {by_handle} of \
         them through handles alone and {by_loop} through request loops; {} mappings ended at another owner; {caching} rounds in caching mode; {peak} batches in \
         flight at most",
        sum.accesses,
        sum.landed,
        start.elapsed(),
        sum.maps,
        sum.remote,
    );
    // It was an adversary: it landed, and found table pages, superpages, and rounds of all kinds.
    assert!(sum.accesses >= least && sum.landed > least / 20, "{sum:?}");
    assert!(
        sum.maps > 500
            && sum.no_pages > 10
            && sum.large > 10
            && caching > 1
            && sum.late > 10
            && peak > 2,
        "{sum:?}, {peak}"
    );
    assert!(by_handle > 100 && by_loop > 100, "{by_handle}, {by_loop}");
    assert!(sum.remote > 10, "{sum:?}");
    assert!(sum.without_payloads.min(sum.mixed).min(sum.fixed) > 3, "{sum:?}");
    assert!(hung > 0 && sum.lost > 0 && sum.quarantined > 0, "{hung}, {sum:?}");
}

/// 196 owners and four devices in one domain, for as long as `PINFOLD_ADVERSARY_SOAK_SECONDS` says
/// (`make soak`: 60 s).
#[test]
#[cfg_attr(debug_assertions, ignore = "takes long: make test-all")]
fn a_soak_of_200_threads_is_clean() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let length = asked("SOAK_SECONDS").map_or(SOAK.length, Duration::from_secs);
    let (start, mut maps, mut remote, mut landed) = (Instant::now(), 0, 0, 0);
    // One round, and more on a machine that is too busy for one to suffice.
    for seed in first_seed() + 3.. {
        let outcome = play(seed, None, Some(Through::Both), Size { length, ..SOAK });
        println!(
            "200 threads for {length:?}: no access of {} landed where none may; {} maps, {} mappings ended at another owner, {} \
             waits reached their deadline",
            outcome.accesses, outcome.maps, outcome.remote, outcome.late
        );
        assert_eq!(outcome.caught, None);
        let stats = outcome.stats;
        let lost = (stats.live, stats.quarantined, stats.deferred, stats.windows, stats.owners);
        assert_eq!(lost, (0, 0, 0, 0, 0), "seed {seed}");
        maps += outcome.maps;
        remote += outcome.remote;
        landed += outcome.landed;
        if maps > 1000 && remote > 10 && landed > 1000 {
            break;
        }
        assert!(
            start.elapsed() < 2 * LONGEST,
            "{maps} maps, {remote} ended elsewhere, {landed} landed"
        );
    }
}

/// The mistake of a round: a decision of the stack, a queue, or a request loop.
#[derive(Clone, Copy, Debug)]
enum Wrong {
    Stack(Mistake),
    Queue(Fault),
    Loop(Careless),
}

impl From<Careless> for Wrong {
    fn from(careless: Careless) -> Self {
        Self::Loop(careless)
    }
}

impl From<Mistake> for Wrong {
    fn from(mistake: Mistake) -> Self {
        Self::Stack(mistake)
    }
}

impl From<Fault> for Wrong {
    fn from(fault: Fault) -> Self {
        Self::Queue(fault)
    }
}

/// Plays rounds with `mistake` until one is caught.
fn caught(mistake: impl Into<Wrong>, through: Option<Through>) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (mistake, start) = (mistake.into(), Instant::now());
    let (mut accesses, mut maps) = (0, 0);
    for seed in first_seed().. {
        let outcome = play(seed, Some(mistake), through, ROUND);
        (accesses, maps) = (accesses + outcome.accesses, maps + outcome.maps);
        if let Some(caught) = outcome.caught {
            println!(
                "{mistake:?} ({through:?}) after {:?}, {accesses} accesses, {maps} maps: {caught}",
                start.elapsed()
            );
            return;
        }
        let spent = start.elapsed() >= BUDGET && accesses >= BUDGET_ACCESSES
            || start.elapsed() >= 20 * BUDGET;
        assert!(!spent, "{mistake:?} was not caught by {accesses} accesses, {maps} maps");
    }
}

/// Three tests of each mistake: through whatever the seed of a round says, through the windows of
/// owners alone, and through request loops. Without optimisation those that take some seconds are left out.
macro_rules! caught {
    ($($(#[$attribute:meta])* $test:ident $kind:ident::$mistake:ident $(($level:literal))?,)*) => {
        $(#[test]
        $(#[$attribute])*
        fn $test() {
            caught($kind::$mistake $(($level))?, None);
        })*

        mod in_windows {
            use super::*;
            $(#[test]
            #[cfg_attr(debug_assertions, ignore = "takes long: make test-all")]
            fn $test() {
                caught($kind::$mistake $(($level))?, Some(Through::Handles));
            })*
        }

        mod in_request_loops {
            use super::*;
            $(#[test]
            #[cfg_attr(debug_assertions, ignore = "takes long: make test-all")]
            fn $test() {
                caught($kind::$mistake $(($level))?, Some(Through::Requests));
            })*
        }
    };
}

caught! {
    no_flush_is_caught Fault::NoFlush,
    a_flush_before_the_clear_is_caught Mistake::FlushBeforeClear,
    a_table_page_reclaimed_early_is_caught Mistake::TablePageEarly,
    #[cfg_attr(debug_assertions, ignore = "takes long: make test-all")]
    a_table_page_of_level_1_reclaimed_early_is_caught Mistake::TablePageEarlyAt(1),
    a_table_page_of_level_2_reclaimed_early_is_caught Mistake::TablePageEarlyAt(2),
    a_table_page_of_level_3_reclaimed_early_is_caught Mistake::TablePageEarlyAt(3),
    a_flush_of_leaves_for_a_table_page_is_caught Fault::LeafFlushForTablePage,
    an_iova_released_early_is_caught Mistake::IovaEarly,
    #[cfg_attr(debug_assertions, ignore = "takes long: make test-all")]
    a_window_recycled_early_is_caught Mistake::WindowEarly,
    a_buffer_given_back_early_is_caught Mistake::BufferEarly,
    a_rollback_that_does_not_wait_is_caught Mistake::RollbackNotAwaited,
    a_map_without_its_flush_in_caching_mode_is_caught Fault::MapNotFlushed,
    a_timeout_taken_for_completion_is_caught Fault::TimeoutIsCompletion,
    a_device_tlb_flushed_first_is_caught Fault::DeviceTlbFirst,
    a_flush_of_the_first_unit_alone_is_caught Fault::FirstUnitOnly,
    #[cfg_attr(debug_assertions, ignore = "takes long: make test-all")]
    an_abort_taken_for_completion_is_caught Fault::AbortIsCompletion,
}

#[test]
fn a_loop_whose_drop_ends_requests_is_caught() {
    caught(Careless::DropEnds, Some(Through::Requests));
}

#[test]
fn a_loop_that_ends_what_is_lost_is_caught() {
    caught(Careless::LostEnds, Some(Through::Requests));
}
