//! From the command line to open targets and the memory stack of a run. Impossible requests are
//! rejected here.
//!
//! | module | contents |
//! | --- | --- |
//! | [`resolve`], [`staged`], [`scratch`] | targets before they are opened; destinations and files created for a run |
//! | [`limits`], [`memory`] | checks of `--bs`, `--iodepth`, `--size` and memory before any is allocated |
//! | [`stack`] | the domain and the arenas of a run |
//! | [`driver`], [`device`], [`open`] | controllers and their drivers; open targets with a queue for each job |

pub(crate) mod device;
pub(crate) mod driver;
pub(crate) mod error;
mod kernel_nvme;
pub(crate) mod limits;
pub(crate) mod memory;
pub(crate) mod open;
pub(crate) mod options;
pub(crate) mod resolve;
pub(crate) mod scratch;
pub(crate) mod stack;
pub(crate) mod staged;
