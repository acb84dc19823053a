//! Sockets on pairs of virtual interfaces, each test in a network namespace of its own. Skipped
//! with a message unless the tests run as root with `ip`.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;
mod lifetimes;
mod streams;
