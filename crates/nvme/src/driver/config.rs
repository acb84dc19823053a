//! Configuration of the driver.

use super::clock::{Clock, SystemClock, Unpaused};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Configures the driver; [`Config::default`] suits most programs.
#[derive(Clone)]
pub struct Config {
    /// How long a request may take before it is aborted; a retry may take as long again. Default:
    /// 30 s.
    pub timeout: Duration,
    /// How long an abort may take before its request is quarantined; 0 quarantines at once, without
    /// an abort. Default: 5 s.
    pub abort_timeout: Duration,
    /// For how long a command whose status permits a retry (DNR clear) is sent again, from its
    /// first failure: after the delay that the controller asks for (CRD), otherwise after 1 ms, 2
    /// ms, and so on up to a second; a media error at most 4 times. Commands that the controller
    /// wants to have later than that fail at once. 0 retries nothing. Default: 10 s.
    pub retry_limit: Duration,
    /// How long an admin command may take. Default: 60 s.
    pub admin_timeout: Duration,
    /// The number of I/O queue pairs to request; the controller may grant fewer. Default: 16.
    pub queues: u16,
    /// The largest transfer of one command, further limited by MDTS and by 8 MiB. Default: 1 MiB.
    pub max_transfer_bytes: u32,
    /// Whether to use SGLs where the controller supports them and a command would need a PRP list.
    /// Default: true.
    pub use_sgls: bool,
    /// The clock. Default: the system's monotonic clock without the pauses of the process
    /// ([`Unpaused`]).
    pub clock: Arc<dyn Clock>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30),
            abort_timeout: Duration::from_secs(5),
            retry_limit: Duration::from_secs(10),
            admin_timeout: Duration::from_secs(60),
            queues: 16,
            max_transfer_bytes: 1 << 20,
            use_sgls: true,
            clock: Arc::new(Unpaused::new(SystemClock::default())),
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            timeout,
            abort_timeout,
            retry_limit,
            admin_timeout,
            queues,
            max_transfer_bytes,
            use_sgls,
            clock: _,
        } = self;
        f.debug_struct("Config")
            .field("timeout", timeout)
            .field("abort_timeout", abort_timeout)
            .field("retry_limit", retry_limit)
            .field("admin_timeout", admin_timeout)
            .field("queues", queues)
            .field("max_transfer_bytes", max_transfer_bytes)
            .field("use_sgls", use_sgls)
            .finish_non_exhaustive()
    }
}

pub(super) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
