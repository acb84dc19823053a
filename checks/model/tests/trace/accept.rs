//! Whether a trace is one of the model's: all states in which the model may be are followed through
//! it.

use crate::recorder::Event;
use pinfold_model::state::{Buffer, Entry, Flight, Owner, State};
use pinfold_model::{Action, Caches, Protocol};
use std::collections::HashSet;

const MODEL: Protocol = Protocol { caches: Caches::DeviceTlb, mistake: None };

/// Returns the event that a step shows; `None` for a step within the stack alone.
fn seen(state: &State, action: Action) -> Option<Event> {
    match action {
        Action::Map { at: window, .. } | Action::Pin { window, .. } => {
            let linked = matches!(state.directory[usize::from(window)], Entry::Link(_));
            (!linked).then_some(Event::Link(window))
        }
        Action::Leaf { owner } => match state.owners[usize::from(owner)] {
            Owner::Linked { buffer, at } => Some(Event::Leaf(at, buffer)),
            _ => None,
        },
        Action::Clear { buffer, .. } => match state.buffers[usize::from(buffer)] {
            Buffer::Mapped { at } => Some(Event::Clear(at)),
            _ => None,
        },
        Action::Retire { owner } => match state.owners[usize::from(owner)] {
            Owner::Cleared { at, .. } => Some(Event::Retire(at)),
            _ => None,
        },
        Action::Unpin { window, .. } => Some(Event::Retire(window)),
        Action::Reclaim { page } => {
            let home = state.directory.iter().position(|entry| *entry == Entry::Retired(page));
            home.map(|home| Event::Reclaim(home as u8))
        }
        Action::Submit => state.flights.iter().flatten().last().map(submission),
        Action::Recover => MODEL.after(state, action).flights[0].as_ref().map(submission),
        Action::Abort => Some(Event::Aborted),
        Action::Poll { buffer } | Action::ReleaseLate { buffer } => Some(Event::Returned(buffer)),
        _ => None,
    }
}

fn submission(flight: &Flight) -> Event {
    Event::Submit { iotlb: flight.iotlb[0], device: flight.device }
}

/// Returns whether a trace shows no such action: the unit's work is visible only as a whole, and the
/// holder of a payload is not visible.
fn is_left_out(action: &Action) -> bool {
    matches!(action, Action::Flush { .. } | Action::FlushDevice { .. } | Action::TimeOut { .. })
}

fn steps(state: &State) -> impl Iterator<Item = Action> {
    let mut actions = Vec::new();
    stateright::Model::actions(&MODEL, state, &mut actions);
    actions.into_iter().filter(|action| !is_left_out(action))
}

/// Adds the states that are reached by steps which are not seen.
fn close(states: &mut HashSet<State>) {
    let mut new: Vec<State> = states.iter().cloned().collect();
    while let Some(state) = new.pop() {
        for action in steps(&state).filter(|action| seen(&state, *action).is_none()) {
            let next = MODEL.after(&state, action);
            if states.insert(next.clone()) {
                new.push(next);
            }
        }
    }
}

/// Carries out the oldest batch that the queue has and that has not been carried out.
fn carry(mut state: State) -> Option<State> {
    if state.aborted {
        return None;
    }
    let pending =
        |flight: &Flight| flight.submitted && (flight.iotlb != [0; 2] || flight.device != 0);
    let oldest = state.flights.iter().position(|flight| flight.as_ref().is_some_and(pending))?;
    let is_of_it = |action: &Action| match action {
        Action::Flush { flight, .. } | Action::FlushDevice { flight, .. } => {
            usize::from(*flight) == oldest
        }
        _ => false,
    };
    loop {
        let mut actions = Vec::new();
        stateright::Model::actions(&MODEL, &state, &mut actions);
        match actions.into_iter().find(is_of_it) {
            Some(action) => state = MODEL.after(&state, action),
            None => return Some(state),
        }
    }
}

/// Follows the trace.
///
/// # Errors
/// The number of events that the model makes too, and the first event that it does not make.
pub fn accepts(trace: &[Event]) -> Result<(), (usize, Event)> {
    let mut states = HashSet::from([State::new()]);
    for (number, event) in trace.iter().enumerate() {
        close(&mut states);
        states = states
            .iter()
            .flat_map(|state| {
                let carried = (*event == Event::Carried).then(|| carry(state.clone())).flatten();
                let made = steps(state).filter(|action| seen(state, *action) == Some(*event));
                carried.into_iter().chain(made.map(|action| MODEL.after(state, action)))
            })
            .collect();
        if states.is_empty() {
            return Err((number, *event));
        }
    }
    Ok(())
}
