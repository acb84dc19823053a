//! The driver.
//!
//! [`Controller::start`] resets and enables a controller and asks what it is; [`Controller::create_queue`] gives a
//! [`Queue`], which one thread owns. What a command moves is moved into it and comes back when the controller is
//! done with it:
//!
//! ```text
//! queue.write(nsid, slba, blocks, payload) -> InFlight ── queue.poll() -> Completion ──▶ in_flight.finish(completion)
//! ```
//!
//! A queue keeps its own copy of everything that it submitted. Of what the controller writes, an identifier is looked
//! up in that copy and a status is passed on; nothing else is believed.
//!
//! A command that does not complete in time is aborted. Where that does not end it, it is *not over*: its payload and
//! its PRP lists are quarantined until [`Controller::reset`] has seen the controller disabled. What completes later is counted and given to nobody.

mod admin;
mod clock;
mod config;
mod controller;
mod error;
mod life;
mod queue;
mod request;
mod rings;
mod span;
mod stats;

pub use admin::{Event, EventKind};
pub use clock::{Clock, SystemClock};
pub use config::Config;
pub(crate) use controller::quiet;
pub use controller::{Controller, Health, Identity, Namespace, NamespaceInfo, Unusable};
pub use error::{CommandError, Error, LayoutError, PollError, Reject, Rejected};
pub use life::quarantined_bytes;
pub use pinfold_core::domain::Payload;
pub use queue::{Queue, Vector};
pub use request::{Completion, InFlight, Outcome, Quarantined};
pub use stats::{ControllerStats, QueueStats};
