//! The system's side of `AF_XDP`: interfaces, the program that redirects packets, sockets, and
//! their memory.
//!
//! The crate `pinfold-xdp` builds packets on it, which own the pages that they are in. Here are
//! only what the kernel offers and the memory: a [`Umem`] is an arena as the kernel addresses it,
//! and the source of a page pool's chunks, so that a page's device address is what a ring's entry
//! holds.
//!
//! ```
//! use pinfold::xdp::{Interface, Umem};
//! use pinfold::{Arena, PagePool, page_pool::Config};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let umem = Umem::new(Arena::builder().size(4 << 20).build_unmapped()?);
//! let mut pool = PagePool::new(umem, "receive", Config::default())?;
//! let page = pool.alloc()?; // for the fill ring: its address in the UMEM is
//! assert!(page.iova().raw() < 4 << 20);
//! println!("{:?}", Interface::named("lo")?);
//! # Ok(()) }
//! ```
//!
//! | feature | since Linux | without it |
//! | --- | --- | --- |
//! | sockets, with a driver's program | 4.18 | none |
//! | need-wakeup flags | 5.4 | the kernel is called for each batch |
//! | a program that ends with its process (`BPF_LINK_CREATE`) | 5.9 | none |
//! | counters of full and empty rings | 5.9 | 0 |
//! | preferred busy polling | 5.11 | an error where it is requested |
//! | packets made by the kernel ([`Generator`]) | 5.18 | an error |

mod interface;
mod links;
mod program;
mod routes;
mod socket;

pub use crate::sys::netlink::NetlinkError;
pub use crate::sys::process::Privileges;
pub use crate::sys::xdp::RingMemory;
pub use interface::{
    CallError, Interface, LinkType, VlanTags, default_route_over, memlock_limit,
    missing_capabilities, privileges,
};
pub use links::RouteError;
pub use program::{Attached, Generator, Program};
pub use socket::{RawSocket, RingMemories, RingSizes, SocketStats, Umem};
