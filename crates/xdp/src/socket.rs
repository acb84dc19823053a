//! One queue of an interface: receive, hold, transmit, recycle.
//!
//! ```no_run
//! use pinfold_xdp::{ChunkSize, Copying, Redirect, Socket, redirect};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let interface = redirect::interface("eth1")?;
//! let redirect = Redirect::attach(&interface)?;
//! // One socket and one thread for each queue: each has its own memory, and nothing is shared.
//! let sockets = (0..interface.queues().unwrap_or(1))
//!     .map(|queue| {
//!         let options = Socket::options().queue(queue).chunk(ChunkSize::HalfPage).copying(Copying::KernelChooses);
//!         let mut socket = options.open(&interface)?;
//!         socket.redirect(&redirect)?;
//!         Ok(socket)
//!     })
//!     .collect::<Result<Vec<_>, pinfold_xdp::OpenError>>()?;
//! # drop(sockets);
//! # Ok(()) }
//! ```

mod options;
mod queue;

pub(crate) use options::mtu_limit;
pub use options::{BusyPoll, ChunkSize, Copying, Options};
pub use queue::{Closed, Socket};
