//! From the command line to open targets and the memory stack of a run. Impossible requests are
//! rejected here.
//!
//! | module | contents |
//! | --- | --- |
//! | [`resolve`], [`staged`] | targets before they are opened; destinations and files created for a run |
//! | [`limits`] | checks of `--bs`, `--iodepth` and `--size` |
//! | [`stack`] | the memory that a run needs, whether it is available, and the arenas in their domain |
//! | [`open`] | open targets: controllers, their drivers, and a queue for each job |

pub(crate) mod error;
pub(crate) mod limits;
pub(crate) mod open;
pub(crate) mod resolve;
pub(crate) mod stack;
pub(crate) mod staged;
