//! Packets, which own the memory that they are in.
//!
//! ```
//! # fn example(packets: Vec<pinfold_xdp::Packet>) {
//! for packet in packets {
//!     let mut headers = [0; 64];
//!     let headers = packet.peek(&mut headers); // a copy of the first bytes
//!     println!("{} bytes, {headers:x?}", packet.len());
//! } // each page returns to its pool here, on any thread
//! # }
//! ```
//!
//! A packet that has a page of its own becomes the payload of a device, without a copy:
//!
//! ```
//! use pinfold::{DmaMemory, access::ToDevice};
//! use pinfold_core::domain::{Domain, Pinned};
//!
//! # use pinfold_xdp::Packet;
//! # fn example(domain: &Domain, packet: Packet) -> Result<(), Box<dyn std::error::Error>> {
//! let page = packet.into_page().map_err(|_| "a part of a page")?;
//! page.memory().copy_from_slice(0, b"a header")?; // before `page.offset()`
//! let mapping = domain.map(page, ToDevice)?; // for as long as a disk reads it
//! # drop(mapping);
//! # Ok(()) }
//! ```

pub use crate::rings::{Packet, PacketPage};
