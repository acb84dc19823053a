//! DMA memory without an operating system.
//!
//! `pinfold-core` keeps the accounts of memory that devices reach: which page frames are free
//! ([`frame`]), which blocks of them are handed out ([`dma_pool`]), which pages are
//! recycled with their mapping ([`page_pool`]), how a registered buffer is cut into what a
//! device takes ([`registered`], [`gather`]), which I/O virtual addresses are in use ([`iova`]), what the I/O page
//! tables say ([`table`]), when a device can no longer reach something ([`invalidate`]), and the life of a mapping
//! from first to last ([`domain`]).
//!
//! It makes no system call, starts no thread and reads no clock. What it needs from outside comes in by small
//! traits. It allocates in constructors and where something grows, never where something is freed, unmapped or
//! revoked.
//!
//! # Floors
//!
//! A module knows only the floors below its own.
//!
//! | floor | modules |
//! | --- | --- |
//! | 2 | [`domain`], [`registered`], [`gather`], [`dma_pool`], [`page_pool`] |
//! | 1 | [`frame`], [`iova`], [`table`], [`invalidate`], [`magazine`] |
//! | 0 | [`access`], [`addr`], [`mem`], [`share`], [`sync`] |
#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(any(test, loom, feature = "std")), no_std)]

extern crate alloc;

pub mod access;
pub mod addr;
pub mod dma_pool;
pub mod domain;
mod drop_guard;
pub mod frame;
pub mod gather;
pub mod invalidate;
pub mod iova;
#[cfg(any(test, feature = "known-bad"))]
pub mod known_bad;
#[cfg(not(any(test, feature = "known-bad")))]
#[expect(unreachable_pub, reason = "public with the feature")]
mod known_bad;
pub mod magazine;
pub mod mem;
pub mod page_pool;
pub mod registered;
pub mod share;
pub mod sync;
pub mod table;
#[cfg(test)]
#[cfg(not(loom))]
mod testing;
