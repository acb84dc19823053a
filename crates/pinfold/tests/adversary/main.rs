//! A random adversary on the real stack: after `Quiesced` no access lands, and a stack with any one known mistake is
//! caught.
//!
//! Several owners map, revoke and unmap buffers of 4 KiB to 2 MiB behind the software IOMMU, while devices do DMA at
//! random. Every page carries tags that say whose it is ([`tag`]), so that the reader of a page knows at once whether it
//! should have. Table pages are so few that they are constantly retired and used again; free ones are poisoned. The
//! addresses lie around multiples of 1 GiB. What the IOMMU does when is drawn from the seed of each [`round`].
//!
//! Choices follow from the seed; what threads do to each other does not, so a seed repeats a round in kind and not to the
//! instruction. `PINFOLD_ADVERSARY_SECONDS` makes the run without a mistake as long as asked, and
//! `PINFOLD_ADVERSARY_SEED` sets the seed that all runs begin from.
#![expect(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test, of small numbers")]

use pinfold_core::known_bad::Mistake;
use round::{Outcome, play};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

mod device;
mod owner;
mod round;
mod tag;
mod world;

const ROUND: Duration = Duration::from_millis(300);
/// In how long a mistake must be caught; most are in the first round. On a machine that is busy with other things it
/// also has that many accesses, in four times as long at most.
const BUDGET: Duration = Duration::from_secs(30);
const BUDGET_ACCESSES: u64 = 50_000_000;
/// How many accesses the run without a mistake makes at least, and how long it takes at most.
const ACCESSES: u64 = 1_000_000;
const LONGEST: Duration = Duration::from_secs(60);

/// One at a time: each run has more threads than there are processors as it is.
static ALONE: Mutex<()> = Mutex::new(());

fn first_seed() -> u64 {
    std::env::var("PINFOLD_ADVERSARY_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

#[test]
fn the_stack_without_mistakes_is_clean() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let asked = std::env::var("PINFOLD_ADVERSARY_SECONDS").ok().and_then(|s| s.parse().ok());
    let asked = asked.map(Duration::from_secs);
    let start = Instant::now();
    let mut sum = Outcome::default();
    let (mut rounds, mut caching, mut peak) = (0, 0, 0);
    for seed in first_seed().. {
        let outcome = play(seed, None, ROUND);
        assert_eq!(outcome.caught, None);
        let stats = outcome.stats;
        // A map that was refused while its flush was late is released, but was never counted as one.
        let lost = (stats.live, stats.quarantined, stats.deferred);
        assert_eq!(lost, (0, 0, 0), "seed {seed}");
        assert!(stats.unmaps >= stats.maps, "seed {seed}: {stats:?}");
        rounds += 1;
        caching += u64::from(outcome.caching_mode);
        sum.accesses += outcome.accesses;
        sum.landed += outcome.landed;
        sum.maps += outcome.maps;
        sum.no_pages += outcome.no_pages;
        sum.late += outcome.late;
        sum.large += outcome.large;
        peak = peak.max(stats.backend.invalidations.in_flight_peak);
        let enough = sum.accesses >= ACCESSES && rounds >= 24;
        if start.elapsed() >= asked.unwrap_or(if enough { Duration::ZERO } else { LONGEST }) {
            break;
        }
    }
    println!("{rounds} rounds, {caching} in caching mode, {peak} batches in flight at most: {sum:?}");
    // It was an adversary: it landed, and found table pages, superpages, and rounds of both kinds.
    assert!(sum.accesses >= ACCESSES && sum.landed > ACCESSES / 20, "{sum:?}");
    assert!(
        sum.maps > 500 && sum.no_pages > 10 && sum.large > 10 && caching > 1 && sum.late > 10 && peak > 2,
        "{sum:?}, {peak}"
    );
}

/// Plays rounds with `mistake` until one is caught.
fn caught(mistake: Mistake) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let start = Instant::now();
    let (mut accesses, mut maps) = (0, 0);
    for seed in first_seed().. {
        let outcome = play(seed, Some(mistake), ROUND);
        (accesses, maps) = (accesses + outcome.accesses, maps + outcome.maps);
        if let Some(caught) = outcome.caught {
            println!("{mistake:?} after {:?}, {accesses} accesses, {maps} maps: {caught}", start.elapsed());
            return;
        }
        let spent = start.elapsed() >= BUDGET && accesses >= BUDGET_ACCESSES || start.elapsed() >= 4 * BUDGET;
        assert!(!spent, "{mistake:?} was not caught by {accesses} accesses, {maps} maps");
    }
}

macro_rules! caught {
    ($($test:ident $mistake:ident,)*) => {$(
        #[test]
        fn $test() {
            caught(Mistake::$mistake);
        }
    )*};
}

caught! {
    no_flush_is_caught NoFlush,
    a_flush_before_the_clear_is_caught FlushBeforeClear,
    a_table_page_reclaimed_early_is_caught TablePageEarly,
    a_flush_of_leaves_for_a_table_page_is_caught LeafFlushForTablePage,
    an_iova_released_early_is_caught IovaEarly,
    a_buffer_given_back_early_is_caught BufferEarly,
    a_rollback_that_does_not_wait_is_caught RollbackNotAwaited,
    a_map_without_its_flush_in_caching_mode_is_caught MapNotFlushed,
    a_timeout_taken_for_completion_is_caught TimeoutIsCompletion,
    a_device_tlb_flushed_first_is_caught DeviceTlbFirst,
    an_abort_taken_for_completion_is_caught AbortIsCompletion,
}
