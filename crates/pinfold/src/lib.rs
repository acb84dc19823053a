//! The DMA memory stack for user space.
//!
//! [`pinfold_core`] keeps the accounts; this crate gets the memory from Linux ([`arena`], [`buffer`]), keeps the
//! address spaces of devices ([`domain`], [`soft`]), moves files through io_uring ([`uring`]) and says what the machine offers ([`probe`]).

pub mod arena;
pub mod buffer;
pub mod domain;
pub mod probe;
pub mod soft;
mod sys;
pub mod uring;

pub use arena::{Arena, Exposure, Source};
pub use buffer::Buffer;
pub use domain::Domain;
pub use sys::Errno;
pub use sys::limits::MemlockLimit;
