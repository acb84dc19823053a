//! The network block server: connections on one side, a target on the other, and memory that both
//! reach in between.
//!
//! Each event loop is a thread with its own queue at the target, its own share of the memory and
//! its own connections. A payload is received into a buffer that moves into the target's request;
//! what a read returns is sent from the buffer that the target filled. Nothing is received for
//! which there is no memory.
//!
//! | module | contents |
//! | --- | --- |
//! | [`address`], [`listener`], [`stream`], [`socket`], [`tls`] | where clients connect; accepting them; their sockets, and TLS on them |
//! | [`plan`], [`payload`], [`slab`] | threads and memory of a server; the memory of payloads, bounded and shared; places with generations |
//! | [`input`], [`outgoing`] | what was received and not used; replies that wait to be sent |
//! | [`connection`], [`ended`] | what is known of a client; why it is gone |
//! | [`operation`], [`issues`], [`extents`] | a request at the target; whose turn it is there; which parts of a file are allocated |
//! | [`event_loop`], [`receive`], [`incoming`], [`transmit`], [`streamed`] | one thread's connections, from input to replies |
//! | [`run`], [`command`] | all threads, from the first connection to the last reply; `--run` and `--pidfile` |

pub(crate) mod address;
pub(crate) mod command;
pub(crate) mod connection;
mod ended;
pub(crate) mod error;
pub(crate) mod event_loop;
pub(crate) mod extents;
mod incoming;
mod input;
mod issues;
pub(crate) mod listener;
pub(crate) mod operation;
pub(crate) mod outgoing;
pub(crate) mod payload;
pub(crate) mod plan;
mod receive;
pub(crate) mod run;
pub(crate) mod slab;
mod socket;
pub(crate) mod stats;
pub(crate) mod stream;
mod streamed;
pub(crate) mod tls;
mod transmit;

#[cfg(test)]
mod client;
#[cfg(test)]
mod tests;
