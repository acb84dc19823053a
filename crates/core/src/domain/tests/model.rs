//! A domain against lists of what is mapped and held.

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Map(usize),
    Revoke(usize),
    RevokeAll,
    Unmap(usize),
    Poll(usize),
    DropMapped(usize),
    Complete,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (1usize..10).prop_map(Step::Map),
        2 => any::<usize>().prop_map(Step::Revoke),
        1 => Just(Step::RevokeAll),
        1 => any::<usize>().prop_map(Step::Unmap),
        3 => any::<usize>().prop_map(Step::Poll),
        1 => any::<usize>().prop_map(Step::DropMapped),
        2 => Just(Step::Complete),
    ];
    proptest::collection::vec(step, 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn a_domain_agrees_with_lists_of_what_is_mapped_and_held(steps in steps()) {
        let (mock, domain, drops) = domain();
        set(&mock.obliging);
        let empty = domain.space.iovas.stats();
        let (mut mapped, mut revoked) = (Vec::new(), Vec::new());
        let mut made = 0usize;
        for step in steps {
            match step {
                Step::Map(pages) => match domain.map(Buf::new(pages, &drops), Bidirectional) {
                    Ok(one) => { made += 1; prop_assert!(pages <= 8); mapped.push(one); }
                    Err(refused) => { made += 1; prop_assert!(pages > 8 && refused.payload.is_some()); }
                },
                Step::Revoke(i) if !mapped.is_empty() => {
                    revoked.push(mapped.swap_remove(i % mapped.len()).revoke());
                }
                Step::RevokeAll => domain.revoke_many(mapped.drain(..), &mut revoked),
                Step::Unmap(i) if !mapped.is_empty() => {
                    prop_assert!(mapped.swap_remove(i % mapped.len()).unmap().is_ok());
                }
                Step::Poll(i) if !revoked.is_empty() => {
                    let one = revoked.swap_remove(i % revoked.len());
                    let done = mock.done.load(Ordering::SeqCst) >= one.ticket().0;
                    match one.poll() {
                        Ok(_) => prop_assert!(done),
                        Err(held) => { prop_assert!(!done); revoked.push(held); }
                    }
                }
                Step::DropMapped(i) if !mapped.is_empty() => drop(mapped.swap_remove(i % mapped.len())),
                Step::Complete => { mock.done.store(mock.last.load(Ordering::SeqCst), Ordering::SeqCst); }
                _ => {}
            }
            // What the table says is what is mapped, no more and no less ...
            let table: Vec<u64> = mock.pages.lock().keys().copied().collect();
            let mut model: Vec<u64> = mapped.iter().flat_map(|m| numbers(m.iova())).collect();
            model.sort_unstable();
            prop_assert_eq!(table, model);
            // ... no address is given out twice while it is mapped or held ...
            let ranges = mapped.iter().map(Mapping::iova).chain(revoked.iter().map(Revoked::iova));
            let mut pages: Vec<u64> = ranges.flat_map(numbers).collect();
            let held = pages.len();
            pages.sort_unstable();
            pages.dedup();
            prop_assert_eq!(pages.len(), held);
            prop_assert_eq!(domain.space.iovas.stats().bytes_in_use, held as u64 * 4096);
            // ... and no buffer is lost.
            prop_assert_eq!(drops.load(Ordering::SeqCst), made - mapped.len() - revoked.len());
            prop_assert_eq!(domain.stats().live, mapped.len() as u64);
        }
        drop((mapped, revoked));
        prop_assert_eq!(drops.load(Ordering::SeqCst), made);
        prop_assert_eq!(domain.space.iovas.stats(), empty);
    }
}
