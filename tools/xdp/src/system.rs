//! The system's side of `AF_XDP`: interfaces, the program that redirects packets, sockets, and
//! their memory; and the system calls below them, each in a small function with the proof of its
//! unsafe block and the first kernel that has it.
//!
//! The rest of the crate builds packets on it, which own the pages that they are in. A [`Umem`] is
//! an arena as the kernel addresses it, and the source of a page pool's chunks, so that a page's
//! device address is what a ring's entry holds.
//!
//! ```
//! use pinfold_xdp::system::{Interface, Umem};
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

#![allow(unsafe_code)]

mod bpf;
mod calls;
mod interface;
mod links;
mod netdev;
mod netlink;
mod privileges;
mod program;
mod routes;
mod socket;

pub use calls::RingMemory;
pub(crate) use calls::try_all;
pub(crate) use interface::is_out_of_files;
pub use interface::{CallError, Interface, LinkType, VlanTags, default_route_over};
pub use links::RouteError;
pub use netlink::NetlinkError;
pub use privileges::Privileges;
pub(crate) use privileges::no_af_xdp;
pub use program::{Attached, Generator, Program};
pub use socket::{RawSocket, RingMemories, RingSizes, SocketStats, Umem};

/// Returns the error of the last libc call that failed in this thread.
fn last_errno() -> pinfold::Errno {
    pinfold::Errno::from(&std::io::Error::last_os_error())
}
