//! SIGINT, SIGTERM, SIGHUP and SIGXCPU: a flag that the engines check, so that unfinished work is
//! undone before the program ends, and a bound on the time this may take. SIGXFSZ ends nothing.

use crate::output;
use pinfold::Signals;
use pinfold::probe::threads;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXCPU, SIGXFSZ};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The time limit for the end of the program after the first signal.
const GRACE: Duration = Duration::from_secs(10);
/// The time for which further signals count as the first one: timeout(1) sends two, one to the
/// program and one to its group.
const SAME: Duration = Duration::from_secs(1);
/// The same for SIGINT, which a person sends: one that a parent passes on follows at once, a second
/// Ctrl-C does not.
const SAME_INT: Duration = Duration::from_millis(250);
/// The exit code after a signal.
const INTERRUPTED: i32 = 130;

/// Has a write that exceeds the limit of a file's size (`ulimit -f`) fail like any other, where
/// SIGXFSZ would end the program: in every command, since standard output may be such a file. A
/// handler, and not SIG_IGN, which programs that are started would inherit.
///
/// # Errors
/// The handler cannot be installed.
pub(crate) fn survive_file_limit() -> io::Result<()> {
    signal_hook::flag::register(SIGXFSZ, Arc::default()).map(drop)
}

/// Raises `flag` with SIGINT, SIGTERM and SIGHUP: by handlers, which a program that is started does not
/// inherit. A signal that is ignored stays ignored, by that program too.
///
/// # Errors
/// A handler cannot be installed.
pub(crate) fn raise(flag: &Arc<AtomicBool>) -> io::Result<()> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0);
    for number in [SIGINT, SIGTERM, SIGHUP] {
        if ignored >> (number - 1) & 1 == 0 {
            signal_hook::flag::register(number, flag.clone())?;
        }
    }
    Ok(())
}

/// Whether the user, or another job, has asked to stop.
#[derive(Clone, Debug, Default)]
pub(crate) struct Interrupt {
    flag: Arc<AtomicBool>,
    parent: Option<Arc<AtomicBool>>,
}

impl Interrupt {
    /// Catches the first SIGINT, SIGTERM, SIGHUP or SIGXCPU (`ulimit -t`, whose hard limit comes
    /// later) and raises the flag. One that comes more than a
    /// second later (SIGINT: a quarter), or 10 s, ends the program, even while its other threads
    /// wait for a file system that does not respond. Signals that were ignored stay ignored.
    ///
    /// # Errors
    /// A signal cannot be blocked, or the thread that waits for the signals cannot be started.
    pub(crate) fn catch() -> io::Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        let blocked = Signals::block(&[SIGINT, SIGTERM, SIGHUP, SIGXCPU]);
        let signals = blocked.map_err(|errno| io::Error::from_raw_os_error(errno.raw()))?;
        let raised = Arc::clone(&flag);
        let waiter = std::thread::Builder::new().name("signals".into());
        waiter.spawn(move || wait_for_signals(signals, &raised)).map_err(|error| {
            io::Error::new(
                error.kind(),
                format!(
                    "no thread to wait for them could be started: {}",
                    threads::refusal(&error)
                ),
            )
        })?;
        Ok(Self { flag, parent: None })
    }

    /// Returns whether a signal has arrived or the flag was raised.
    pub(crate) fn is_raised(&self) -> bool {
        let set = |flag: &Arc<AtomicBool>| flag.load(Ordering::Relaxed);
        set(&self.flag) || self.parent.as_ref().is_some_and(set)
    }

    /// Returns an interrupt that is raised with this one, and can be raised separately.
    pub(crate) fn child(&self) -> Self {
        Self { flag: Arc::default(), parent: Some(self.flag.clone()) }
    }

    /// Raises the flag as a signal would.
    pub(crate) fn raise(&self) {
        self.flag.store(true, Ordering::Relaxed);
    }
}

fn wait_for_signals(signals: Signals, raised: &AtomicBool) {
    while signals.wait(None).is_none() {}
    raised.store(true, Ordering::Relaxed);
    let first = Instant::now();
    let why = loop {
        match signals.wait(Some(GRACE.saturating_sub(first.elapsed()))) {
            // Sent with each second of processor time beyond the limit.
            Some(SIGXCPU) => {}
            Some(number) if first.elapsed() < if number == SIGINT { SAME_INT } else { SAME } => {}
            Some(_) => break "interrupted again".to_owned(),
            None => {
                break format!(
                    "interrupted, and requests have not completed after {} s",
                    GRACE.as_secs()
                );
            }
        }
    };
    output::error(format_args!(
        "{why}: ended without cleaning up; a temporary file (.pinfold-*.part) may remain, and of \
         `serve` its socket, or the directory of that ({})",
        std::env::temp_dir().join("pinfold-*").display()
    ));
    signal_hook::low_level::exit(INTERRUPTED);
}
