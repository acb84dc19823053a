//! The driver: [`Controller`], [`Queue`], and the requests in flight between them.
//!
//! [`Controller::start`] resets, enables and identifies a controller; [`Controller::create_queue`]
//! creates a [`Queue`], which one thread owns. The payload of a request is moved into it and
//! returned when the controller no longer accesses it:
//!
//! ```text
//! queue.write(nsid, slba, blocks, payload) -> InFlight ── queue.poll() -> Completion ──▶ in_flight.finish(completion)
//! ```
//!
//! A queue keeps its own copy of everything that it submitted. Of what the controller writes, an
//! identifier is looked up in that copy and a status is passed on; nothing else is trusted.
//!
//! A command whose status permits a retry (DNR clear) is sent again when it is due, up to
//! [`Config::retry_limit`]; its request is in flight meanwhile. A flush that may have been carried
//! out is not repeated: the second could succeed without the data that the first has lost.
//!
//! Of two requests that overlap, of which at least one changes blocks, the later one of a queue is
//! not sent before the older one has ended: no retry reverses what was acknowledged since. See
//! [`Queue`] for requests of several queues.
//!
//! A request that does not complete in time is aborted. If it still does not complete, its payload
//! and list pages are *quarantined* until [`Controller::reset`] has seen the controller disabled.
//! Late completions are only counted.
//!
//! ```
//! # use pinfold_nvme_model::{MemoryMedia, ModelConfig, ModelController, Namespace};
//! use pinfold::{Arena, Domain};
//! use pinfold_core::access::FromDevice;
//! use pinfold_nvme::driver::{Config, Controller, Outcome};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let domain = Domain::soft()?;
//! let arena = Arena::builder().size(8 << 20).build(&domain)?;
//! # let media = std::sync::Arc::new(MemoryMedia::new(1 << 20)?);
//! # let config = ModelConfig::new(vec![Namespace::new(media, 512)?]);
//! # let model = ModelController::spawn(domain.port().ok_or("no port")?, config)?;
//! # let registers = model.registers();
//! let controller = Controller::start(registers, arena.clone(), Config::default())?;
//! let mut queue = controller.create_queue(32)?;
//! let read = queue.read(1, 0, 8, domain.map(arena.alloc(4096)?, FromDevice)?)?;
//! let completion = queue.wait()?.ok_or("nothing in flight")?;
//! if let Outcome::Completed { payload, result } = read.finish(completion) {
//!     result?;
//!     let _blocks = payload.unmap()?;
//! }
//! println!("{}", queue.stats());
//! # Ok(())
//! # }
//! ```

mod admin_queue;
mod clock;
mod config;
mod controller;
mod data_pointer;
mod enable;
mod error;
mod event;
mod in_flight;
mod inner;
mod namespace;
mod overlap;
mod passthrough;
mod queue;
mod slots;

pub use clock::{Clock, SystemClock, Unpaused};
pub use config::{Config, ControllerStats, QueueStats};
pub use controller::Controller;
pub(crate) use enable::disable_controller;
pub use error::{CommandError, Error, LayoutError, PollError, Reject, Rejected};
pub use event::{Event, EventKind, Health};
pub use in_flight::{Completion, InFlight, Outcome, Quarantined, quarantined_bytes};
pub use namespace::{Identity, Namespace, NamespaceInfo, Unusable};
pub use passthrough::{DataDirection, RawCommand};
pub use pinfold_core::domain::Payload;
pub use queue::{Queue, Vector};
