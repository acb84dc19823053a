//! Packets through `AF_XDP`, in pages of a pool.
//!
//! A [`Socket`] receives the packets of one queue of a network interface. Its memory is an arena;
//! the kernel's fill ring is fed by a [`PagePool`](pinfold::PagePool) in bulk. A [`Packet`] owns
//! the page that it was received into: it may be held, sent to another thread, transmitted again,
//! or dropped anywhere, and its page returns to the pool. With a driver that supports it, the card
//! writes to these pages itself (zero-copy); otherwise the kernel copies each packet once.
//!
//! ```no_run
//! use pinfold_xdp::{Interface, Redirect, Socket};
//! use std::time::Duration;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let interface = Interface::named("veth1")?;
//! let mut socket = Socket::options().queue(0).open(&interface)?;
//! socket.redirect(&Redirect::attach(&interface)?)?; // from here on, packets of queue 0 come here
//! let mut packets = Vec::new();
//! while socket.wait(Duration::from_secs(1))? {
//!     socket.receive(&mut packets, 64);
//!     for packet in packets.drain(..) {
//!         println!("{} bytes", packet.len());
//!         socket.recycle(packet); // elsewhere, a drop returns its page
//!     }
//! }
//! println!("{}", socket.stats()?);
//! # Ok(()) }
//! ```
//!
//! | module | contents |
//! | --- | --- |
//! | [`error`] | why a queue could not be opened, and the command that helps |
//! | [`mirror`] | the reply to a packet, with correct checksums |
//! | [`packet`] | a packet and its page |
//! | [`probe`] | whether this machine and process can do it, and the command that lets them |
//! | [`protocol`] | what a packet is |
//! | [`redirect`] | the program on the interface |
//! | [`socket`] | one queue: receive, transmit, recycle, wait |
//! | [`stats`] | what was received, what the kernel dropped, who holds pages |
//! | [`system`] | what the kernel offers: interfaces, programs, sockets, and the calls |
//!
//! There is no `unsafe` above the rings, which own every chunk that the kernel may write to or
//! read, and [`system`].
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

pub mod error;
pub mod mirror;
pub mod packet;
pub mod probe;
pub mod protocol;
pub mod redirect;
mod rings;
pub mod socket;
pub mod stats;
pub mod system;

pub use error::{OpenError, SocketError, TransmitError};
pub use packet::{Packet, PacketPage};
pub use protocol::Protocol;
pub use redirect::Redirect;
pub use socket::{ChunkSize, Copying, Options, Socket};
pub use stats::SocketReport;
pub use system::{Attached, Interface, LinkType, RingSizes, VlanTags};
