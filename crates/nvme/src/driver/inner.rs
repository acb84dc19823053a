//! The state that a controller's handles and its queues share, and the admin commands on it.

mod events;
mod namespaces;
mod queue_pairs;
mod start;
mod state;

pub(super) use queue_pairs::{CreatedQueuePair, RingSizes};
pub(super) use state::{Inner, PendingRelease};
