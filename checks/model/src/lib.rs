//! The protocol of map, revoke, flush and reuse as a finite model, which `stateright` explores
//! exhaustively: two owners, two windows, two payloads, two table pages, an IOTLB, a walker that may
//! hold what it has read, and the TLB of a device or a second unit. What it leaves out: bytes,
//! levels above the one page, merging of requests, and time.

pub mod action;
pub mod mistake;
pub mod state;
mod step;
pub mod story;
pub mod symmetry;

pub use action::Action;
pub use mistake::Mistake;
use state::{Buffer, State, WINDOWS, members};
use stateright::{Model, Property};

/// The caches besides the first unit's IOTLB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Caches {
    /// A TLB of the device, filled from the unit.
    DeviceTlb,
    /// A second unit, with a walker, an IOTLB and a queue of its own.
    TwoUnits,
}

/// The protocol, with at most one mistake.
#[derive(Clone, Debug)]
pub struct Protocol {
    pub caches: Caches,
    pub mistake: Option<Mistake>,
}

/// The names of the properties.
pub const QUIESCED: &str = "what the program has is out of reach";
pub const OWN_MEMORY: &str = "an address leads to the memory that is mapped there, or nowhere";
pub const MAPPED: &str = "what is mapped is reached";

impl Protocol {
    /// The state after a step.
    pub fn after(&self, state: &State, action: Action) -> State {
        let mut next = state.clone();
        self.step(&mut next, action);
        next.fill(self.units(), self.caches == Caches::DeviceTlb);
        next
    }

    pub fn makes(&self, mistake: Mistake) -> bool {
        self.mistake == Some(mistake)
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::new()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        self.steps(state, actions);
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let next = self.after(state, action);
        Some(if self.mistake.is_none() { symmetry::representative(&next) } else { next })
    }

    fn format_action(&self, action: &Action) -> String {
        action.to_string()
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(QUIESCED, |_, state: &State| {
                let free = |buffer: u8| state.buffers[usize::from(buffer)] == Buffer::Program;
                !(0..WINDOWS).any(|at| members(state.reachable(at)).any(free))
            }),
            Property::always(OWN_MEMORY, |_, state: &State| {
                let own = |at: usize| {
                    members(state.reachable(at)).all(|buffer| state.addresses[at] == Some(buffer))
                };
                (0..WINDOWS).all(own)
            }),
            Property::always(MAPPED, |_, state: &State| {
                state.buffers.iter().zip(0..).all(|(buffer, number)| match *buffer {
                    Buffer::Mapped { at } => state.mapped(at.into()) == Some(number),
                    _ => true,
                })
            }),
        ]
    }
}
