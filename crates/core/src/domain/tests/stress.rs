//! Owners in threads of their own, which pass mappings to each other.

use super::*;
use crate::share::Shared;
use crate::sync::Mutex;
use crate::testing::Random;

#[test]
fn stress_mappings_wander_between_owners_that_come_and_go() {
    const THREADS: usize = 4;
    let (mock, domain, drops) = domain();
    set(&mock.obliging);
    let empty = domain.space.iovas.stats();
    let domain = Shared::new(domain);
    let rounds = if cfg!(miri) { 20 } else { 600 };
    let hands: [Mutex<Vec<Revoked<Buf>>>; THREADS] = Default::default();
    let made = AtomicUsize::new(0);
    crate::testing::scope(|scope| {
        for me in 0..THREADS {
            let (domain, hands, drops, made) = (&domain, &hands, &drops, &made);
            scope.spawn(move || {
                let mut local = domain.local();
                let mut random = Random::new(me as u64 + 1);
                for round in 0..rounds {
                    let sizes: Vec<usize> =
                        (0..1 + random.below(8)).map(|_| 1 + random.below(3)).collect();
                    made.fetch_add(sizes.len(), Ordering::Relaxed);
                    let buffers = sizes.into_iter().map(|pages| Buf::new(pages, drops));
                    let mut mappings = local.map_many(buffers, Bidirectional).unwrap();
                    drop(mappings.pop().filter(|_| round % 3 == 0));
                    let mut revoked = Vec::new();
                    local.revoke_many(mappings, &mut revoked);
                    let to = random.below(THREADS);
                    hands[to].lock().extend(revoked);
                    let mine = std::mem::take(&mut *hands[me].lock());
                    for (i, one) in mine.into_iter().enumerate() {
                        match i % 3 {
                            0 => drop(local.wait(one).unwrap()),
                            1 => drop(one.wait().unwrap()),
                            _ => drop(one),
                        }
                    }
                    if round % 100 == 99 {
                        local = domain.local();
                    }
                }
            });
        }
    });
    drop(hands);
    let stats = domain.stats();
    assert_eq!((stats.live, stats.held_bytes, stats.windows, stats.owners), (0, 0, 0, 0));
    assert_eq!((stats.quarantined, stats.maps), (0, made.load(Ordering::Relaxed) as u64));
    assert_eq!(drops.load(Ordering::SeqCst), made.load(Ordering::Relaxed));
    assert_eq!(domain.space.iovas.stats(), empty);
}
