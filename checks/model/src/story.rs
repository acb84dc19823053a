//! A counterexample as a story.

use crate::state::{State, members};
use crate::{Action, Mistake, OWN_MEMORY, Protocol, QUIESCED};
use stateright::{Checker, HasDiscoveries, Model, Path};
use std::fmt::Write;

/// The shortest story of a mistake, if it has any.
pub fn of(mistake: Mistake) -> Option<String> {
    let protocol = Protocol { caches: mistake.caches(), mistake: Some(mistake) };
    let mut shortest: Option<(&str, Path<State, Action>)> = None;
    loop {
        // The checker reports the last violation of many that it looked at together, which need not
        // be the shortest: it is asked again for one with fewer states.
        let states =
            shortest.as_ref().map_or(usize::MAX, |(_, path)| path.clone().into_vec().len());
        let checker = protocol.clone().checker().finish_when(HasDiscoveries::Any);
        let checker = checker.target_max_depth(states).spawn_bfs().join();
        let mut found = checker.discoveries();
        let found = [QUIESCED, OWN_MEMORY]
            .into_iter()
            .filter_map(|name| Some((name, found.remove(name)?)))
            .min_by_key(|(_, path)| path.clone().into_vec().len());
        match found {
            Some(shorter) => shortest = Some(shorter),
            None => break,
        }
    }
    shortest.map(|(property, path)| tell(&protocol, property, path))
}

/// The steps of `path`, numbered, and the sentence that no longer holds.
pub fn tell(protocol: &Protocol, property: &str, path: Path<State, Action>) -> String {
    let mut text = match protocol.mistake {
        Some(mistake) => format!("{mistake:?}:\n"),
        None => String::new(),
    };
    let last = path.last_state().clone();
    for (number, action) in (1..).zip(path.into_actions()) {
        let _ = writeln!(text, "{number:3}. {action}");
    }
    for at in 0..last.addresses.len() {
        for buffer in members(last.reachable(at)) {
            let free = last.buffers[usize::from(buffer)] == crate::state::Buffer::Program;
            let wrong =
                if property == QUIESCED { free } else { last.addresses[at] != Some(buffer) };
            if wrong {
                let whose = match (free, last.addresses[at]) {
                    (true, _) => "which the program has".to_owned(),
                    (false, Some(other)) => format!("and buffer {other} is mapped there"),
                    (false, None) => "and the address is free".to_owned(),
                };
                let _ = writeln!(
                    text,
                    "     A device reaches buffer {buffer} through address {at}, {whose}."
                );
            }
        }
    }
    text
}
