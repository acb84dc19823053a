//! SIGINT, SIGTERM and SIGHUP: a flag that the loops look at, so that what was begun is taken back before the program ends.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the user, or another job, has asked to stop.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt {
    flag: Arc<AtomicBool>,
    parent: Option<Arc<AtomicBool>>,
}

impl Interrupt {
    /// From here on SIGINT, SIGTERM and SIGHUP do not end the program but raise the flag. Nor does SIGXFSZ (`ulimit -f`):
    /// the write that went too far fails, and is taken back as any other that fails.
    pub(crate) fn catch() -> std::io::Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&flag))?;
        }
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        Ok(Self { flag, parent: None })
    }

    /// Whether one of the signals has come, or the flag was raised.
    pub(crate) fn asked(&self) -> bool {
        let set = |flag: &Arc<AtomicBool>| flag.load(Ordering::Relaxed);
        set(&self.flag) || self.parent.as_ref().is_some_and(set)
    }

    /// One that is raised with this one, and can be raised by itself.
    pub(crate) fn child(&self) -> Self {
        Self { flag: Arc::default(), parent: Some(self.flag.clone()) }
    }

    /// Raises the flag as a signal would.
    pub(crate) fn raise(&self) {
        self.flag.store(true, Ordering::Relaxed);
    }
}
