//! How a target is used.

/// How a target is used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TargetOptions {
    /// All offsets and lengths are multiples of this.
    pub(crate) alignment: usize,
    /// How many requests of a job may be in flight.
    pub(crate) depth: usize,
    /// How many jobs there are, each with its own queue; at least one.
    pub(crate) jobs: usize,
    /// The option with which the user chooses how many, for messages.
    pub(crate) jobs_option: &'static str,
    /// Polls for completions where it could sleep until an interrupt.
    pub(crate) poll: bool,
    /// The queue of a single job moves to another thread, as those of several jobs do.
    pub(crate) moves: bool,
    /// Opens files with O_DIRECT where possible.
    pub(crate) direct: bool,
}
