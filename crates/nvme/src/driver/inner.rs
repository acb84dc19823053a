//! The state that a controller's handles and its queues share, and the admin commands on it.

mod start;
mod state;

pub(super) use state::{CreatedQueuePair, Inner, PendingRelease, RingSizes};
