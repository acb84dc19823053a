//! SIGINT, SIGTERM and SIGHUP: a flag that the loops look at, so that what was begun is taken back before the program ends.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the user has asked the program to stop.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// From here on SIGINT, SIGTERM and SIGHUP do not end the program but raise the flag. Nor does SIGXFSZ (`ulimit -f`):
    /// the write that went too far fails, and is taken back as any other that fails.
    pub(crate) fn catch() -> std::io::Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&flag))?;
        }
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        Ok(Self(flag))
    }

    /// Whether one of the signals has come.
    pub(crate) fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Raises the flag as a signal would.
    #[cfg(test)]
    pub(crate) fn raise(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
