//! How whole 2 MiB fare under churn.

use super::*;
use crate::testing::Random;

/// Churn at 70 %: fills a zone to that, then frees and takes single frames at random, in spells of at most
/// `spell` frees before as many allocations. Returns how many regions are whole afterwards. `scattered`: at the start
/// what is free lies all over the zone.
fn whole_after(steps: usize, spell: usize, regions: u32, owner: bool, scattered: bool) -> u32 {
    let zone = Zone::new(regions * 512).unwrap();
    let mut local = owner.then(|| zone.local());
    let mut alloc = || match &mut local {
        Some(local) => local.alloc(Order::PAGE).unwrap(),
        None => zone.alloc(Order::PAGE).unwrap(),
    };
    let most = regions * 512 * 7 / 10;
    let mut taken: Vec<_> = (0..if scattered { regions * 512 } else { most }).map(|_| alloc()).collect();
    let mut random = Random::new(0x9E37_79B9_7F4A_7C15);
    while taken.len() > most as usize {
        zone.free(taken.swap_remove(random.below(taken.len())), Order::PAGE).unwrap();
    }
    let mut done = 0;
    while done < steps {
        let spell = random.below(spell) + 1;
        for _ in 0..spell {
            let frame = taken.swap_remove(random.below(taken.len()));
            match &mut local {
                Some(local) => local.free(frame, Order::PAGE).unwrap(),
                None => zone.free(frame, Order::PAGE).unwrap(),
            }
        }
        for _ in 0..spell {
            taken.push(match &mut local {
                Some(local) => local.alloc(Order::PAGE).unwrap(),
                None => zone.alloc(Order::PAGE).unwrap(),
            });
        }
        done += spell * 2;
    }
    drop(local);
    let whole = zone.whole_regions();
    for _ in 0..whole {
        zone.alloc(Order::HUGE).unwrap();
    }
    assert!(zone.alloc(Order::HUGE).is_err(), "as many runs as were counted, and no more");
    whole
}

/// With 30 % free, at most 30 % of the regions can be whole: 153 of 512. Frames that are taken again come from partly
/// free regions first, so a spell of k frees breaks none but what the sets' order costs: the floor is nine tenths
/// of the most. An allocator that takes any free frame has none left: 0.3^512 of the regions are free by random.
///
/// `PINFOLD_CHURN_STEPS` says how many steps; 10^6 if it does not.
#[test]
fn whole_regions_stay_whole_under_churn() {
    let steps = std::env::var("PINFOLD_CHURN_STEPS").ok().and_then(|n| n.parse().ok()).unwrap_or(1_000_000);
    for (owner, spell) in [(false, 1), (false, 1000), (true, 1), (true, 1000)] {
        let whole = whole_after(steps, spell, 512, owner, false);
        println!("{steps} steps, spells of {spell}, owner {owner}: {whole} of at most 153 runs of 2 MiB");
        assert!(whole >= 138, "{whole} after {steps} steps in spells of {spell}, owner {owner}");
    }
}

/// They also become whole again where what is free was scattered: an owner gives its highest words back, and the zone
/// hands out its lowest. In spells beyond what a magazine holds, or the same frames would go to and fro.
#[test]
fn regions_become_whole_again() {
    for owner in [false, true] {
        let whole = whole_after(600_000, 4096, 64, owner, true);
        assert!(whole >= 17, "{whole} of at most 19, owner {owner}");
    }
}
