//! Other crates' types over DMA memory, each behind a feature of its own, off by default.
//!
//! | feature | contents |
//! | --- | --- |
//! | `bytes` | `bytes::Bytes` from a buffer that a device has filled, without a copy |
//! | `allocator-api2` | `Vec` and `Box` in an arena, and a `Vec` as a payload of a device |
//! | `io-uring` | entries for a program's own ring, from the memory to transfer |
//! | `vm-memory` | guest memory over an arena |
//!
//! All of them keep the rule that no reference to memory exists while a device may write it.
//! Therefore the first two refuse an arena that is mapped whole, or that another process may map (a
//! memfd). Guest memory, which yields no reference, accepts any arena. There is no allocator over a
//! DMA pool, since its chunks stay mapped.
//!
//! # Not supported: `embedded-dma`
//!
//! Its `ReadBuffer` and `WriteBuffer` yield the processor's address and nothing else, and a driver
//! that is written for them passes that address to the device. That is right where both see memory
//! at the same place; behind an IOMMU it is an address that the device does not know, or, worse,
//! that of another mapping. The traits have no place for the address of a mapping, and a type that
//! gave it in place of a pointer would break their contract ("a pointer that references the actual
//! buffer").

#[cfg(feature = "allocator-api2")]
pub mod allocator;
#[cfg(feature = "bytes")]
pub mod bytes;
#[cfg(feature = "io-uring")]
pub mod io_uring;
#[cfg(feature = "vm-memory")]
pub mod vm_memory;
