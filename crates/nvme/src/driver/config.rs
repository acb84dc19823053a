//! What may be chosen about the driver.

use super::clock::{Clock, SystemClock};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What may be chosen about the driver; [`Config::default`] is what most want.
#[derive(Clone)]
pub struct Config {
    /// How long a request may take before it is aborted. 30 s.
    pub timeout: Duration,
    /// How long an abort may take before what it was to end is quarantined; 0 quarantines at once, without an abort. 5 s.
    pub abort_timeout: Duration,
    /// How long an admin command may take. 60 s.
    pub admin_timeout: Duration,
    /// How many I/O queue pairs to ask for; the controller may grant fewer. 16.
    pub queues: u16,
    /// The most bytes in one command; also limited by the controller's MDTS and by 8 MiB. 1 MiB.
    pub max_transfer_bytes: u32,
    /// Where time comes from.
    pub clock: Arc<dyn Clock>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30),
            abort_timeout: Duration::from_secs(5),
            admin_timeout: Duration::from_secs(60),
            queues: 16,
            max_transfer_bytes: 1 << 20,
            clock: Arc::new(SystemClock::default()),
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("timeout", &self.timeout)
            .field("abort_timeout", &self.abort_timeout)
            .field("admin_timeout", &self.admin_timeout)
            .field("queues", &self.queues)
            .field("max_transfer_bytes", &self.max_transfer_bytes)
            .finish_non_exhaustive()
    }
}

pub(super) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
