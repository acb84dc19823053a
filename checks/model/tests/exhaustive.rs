//! The protocol without a mistake, explored to the end, and each mistake as a shortest story.

use pinfold_model::state::State;
use pinfold_model::symmetry::{alike, representative};
use pinfold_model::{Caches, Mistake, Protocol, story};
use stateright::{Checker, Model};
use std::collections::BTreeSet;

fn explore(caches: Caches) {
    let checker = Protocol { caches, mistake: None }.checker().threads(2).spawn_bfs().join();
    assert!(checker.is_done());
    if let Some((property, path)) = checker.discoveries().into_iter().next() {
        panic!("{caches:?}: {property}:\n{}", story::tell(checker.model(), property, path));
    }
    // So few would mean that steps are missing.
    assert!(checker.unique_state_count() > 1_000_000, "{} states", checker.unique_state_count());
}

#[test]
fn nothing_is_reached_in_any_state() {
    explore(Caches::DeviceTlb);
}

#[test]
fn nothing_is_reached_in_any_state_of_two_units() {
    explore(Caches::TwoUnits);
}

/// States that are alike have futures that are alike, so one of them is enough.
#[test]
fn states_that_are_alike_have_the_same_future() {
    let protocol = Protocol { caches: Caches::DeviceTlb, mistake: None };
    let future = |state: &State| -> BTreeSet<State> {
        let mut actions = Vec::new();
        protocol.actions(state, &mut actions);
        actions.into_iter().map(|action| representative(&protocol.after(state, action))).collect()
    };
    let (mut state, mut random) = (State::new(), 1_u64);
    for _ in 0..5_000 {
        let expected = future(&state);
        for other in alike(&state) {
            assert_eq!(representative(&other), representative(&state));
            assert_eq!(future(&other), expected);
        }
        let mut actions = Vec::new();
        protocol.actions(&state, &mut actions);
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let action = actions[(random >> 33) as usize % actions.len()];
        state = protocol.after(&state, action);
    }
}

#[test]
fn every_mistake_has_a_story() {
    for mistake in Mistake::ALL {
        let text = story::of(mistake).unwrap_or_else(|| panic!("{mistake:?} is not found"));
        assert!(text.contains("A device reaches buffer"), "{text}");
        assert!(text.lines().count() < 20, "not the shortest: {text}");
    }
}

/// ARCHITECTURE.md prints one of them, and has the number of steps of each in its table.
#[test]
fn the_page_prints_what_is_found() {
    let page = include_str!("../../../ARCHITECTURE.md");
    let printed = story::of(Mistake::DeviceTlbFirst).expect("a story");
    assert!(page.contains(&printed), "ARCHITECTURE.md does not contain:\n{printed}");
    for mistake in Mistake::ALL {
        let story = story::of(mistake).expect("a story");
        let steps = story.lines().count() - 2;
        let row = page.lines().find(|line| {
            line.starts_with("| ")
                && line.contains(&format!("`{mistake:?}`"))
                && line.contains(". ")
        });
        let row = row.unwrap_or_else(|| panic!("no row has {mistake:?}"));
        let found = row.trim_end_matches(" |").rsplit(" | ").next().unwrap_or_default();
        let counts: Vec<&str> = found.split(", ").collect();
        assert!(
            counts.contains(&steps.to_string().as_str()),
            "{mistake:?}: {steps} steps, not {found}"
        );
    }
}
