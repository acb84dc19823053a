//! DMA memory without an operating system.
//!
//! | module | contents |
//! | --- | --- |
//! | [`folio`], [`gather`] | buffers as few segments, and the segments as what a device accepts |
//! | [`dma_pool`], [`page_pool`] | descriptor blocks; pages that stay mapped while they are recycled |
//! | [`domain`] | I/O address spaces, and the life of a mapping: map, revoke, flush, reuse |
//! | [`frame`], [`iova`] | allocators of page frames and of I/O virtual addresses |
//! | [`table`], [`invalidate`] | I/O page tables, and when a device can no longer reach something |
//! | [`access`], [`addr`], [`counters`](mod@counters), [`mem`], [`share`], [`sync`] | directions, addresses, device-shared memory, shared handles, atomics |
//!
//! A module uses only modules in its own row and below. The crate makes no system call, starts no
//! thread and reads no clock: its environment comes in through small traits. It allocates in
//! constructors and when something grows, never on free, unmap or revoke, with two exceptions: a
//! buffer that is left with its [`domain`] until a late flush completes is boxed and listed there,
//! and freeing a part of an allocation of [I/O virtual addresses](iova) may need a map of the rest.
//!
//! Pools get their memory from a [`ChunkSource`](dma_pool::ChunkSource). In practice that is an
//! arena, `pinfold::Arena` of the crate `pinfold`: memory that is pinned and mapped for a device.
//! Without an operating system the program implements the trait.
//!
//! # Without the standard library
//!
//! The crate is `no_std` unless the feature `std` is enabled. It requires `alloc` (a global
//! allocator) and atomics of 64 bits with compare-and-swap (`target_has_atomic = "64"`): x86-64,
//! AArch64, RISC-V 64, and 32-bit targets that have them, such as ARMv7-A. Targets without, such as
//! Cortex-M, are not supported: emulated atomics (`portable-atomic`) take a lock or disable
//! interrupts, and the lock-free paths would no longer be lock-free. The example `no_std_pool` is a
//! pool with a source of its own over a static buffer.
//!
//! | feature | effect |
//! | --- | --- |
//! | `std` | locks that sleep (`std::sync::Mutex`) instead of spinning, and waits that yield and sleep |
//! | `count-rmw` | counts read-modify-writes and locks per thread (`sync::rmw_count`); implies `std`; for measurements |
//! | `known-bad` | known mistakes that a test can switch on; implies `std`; never in a product |
//! | `bench-internals` | fragments without counters, addresses without mappings, the size of a pool's own state; for benchmarks |
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(any(test, loom, feature = "std")), no_std)]

extern crate alloc;

pub mod access;
pub mod addr;
pub mod counters;
pub mod dma_pool;
pub mod domain;
mod drop_guard;
pub mod folio;
pub mod frame;
pub mod gather;
pub mod invalidate;
pub mod iova;
#[cfg(any(test, feature = "known-bad"))]
pub mod known_bad;
#[cfg(not(any(test, feature = "known-bad")))]
#[expect(unreachable_pub, reason = "public with the feature")]
mod known_bad;
mod magazine;
pub mod mem;
pub mod page_pool;
pub mod share;
pub mod sync;
pub mod table;
#[cfg(test)]
#[cfg(not(loom))]
mod testing;
