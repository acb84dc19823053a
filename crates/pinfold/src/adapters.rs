//! Other crates' types over DMA memory, each behind a feature of its own and off unless asked for.
//!
//! | feature | what it gives |
//! | --- | --- |
//! | `bytes` | `bytes::Bytes` from a buffer that a device has filled, without a copy |
//! | `allocator-api2` | `Vec` and `Box` in an arena, and a `Vec` as what is mapped for a device |
//! | `io-uring` | entries for a program's own ring, by the memory that they move |
//! | `vm-memory` | guest memory over an arena |
//!
//! They keep the one rule of this crate's memory: where a device may write, nobody holds a reference. So the first two
//! refuse an arena that is exposed whole, or that another process may have (a memfd); what gives no reference,
//! as guest memory, takes any. A DMA pool is no allocator here for the same reason: its chunks are mapped as long as the pool has them.
//!
//! # What is not here
//!
//! `embedded-dma`. Its `ReadBuffer` and `WriteBuffer` yield the processor's address and nothing else, and a driver
//! that is written to them gives that address to the device. That is right where both see memory at the same place;
//! behind an IOMMU it is an address that the device does not know, or, worse, that of another mapping. The traits
//! have no room for the address that a mapping has, and a type that gave it in place of a pointer would break their contract
//! ("a pointer that references the actual buffer").

#[cfg(feature = "allocator-api2")]
pub mod allocator;
#[cfg(feature = "bytes")]
pub mod bytes;
#[cfg(feature = "io-uring")]
pub mod io_uring;
#[cfg(feature = "vm-memory")]
pub mod vm_memory;
