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
    /// Polls for completions where it could sleep until an interrupt.
    pub(crate) poll: bool,
    /// Opens files with O_DIRECT where possible.
    pub(crate) direct: bool,
}
