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
//! | [`address`], [`listener`], [`stream`] | where clients connect; accepting them; their sockets, and TLS on them |
//! | [`connection`], [`error`] | the state of a client; why it is gone, and why a server fails |
//! | [`payload`] | threads and memory of a server: the buffers of payloads, bounded and shared |
//! | [`operation`] | a request at the target; the order of the clients there |
//! | [`extents`] | the allocated parts of a file, found beside the event loops |
//! | [`event_loop`], [`receive`], [`transmit`], [`outgoing`] | one thread's connections: input, what is done for it, replies that wait to be sent |
//! | [`watch`] | changes of the served file by others |
//! | [`run`] | all threads, from the first connection to the last reply; `--run` and `--pidfile` |

pub(crate) mod address;
pub(crate) mod connection;
pub(crate) mod error;
pub(crate) mod event_loop;
pub(crate) mod extents;
pub(crate) mod listener;
pub(crate) mod operation;
pub(crate) mod outgoing;
pub(crate) mod payload;
mod receive;
pub(crate) mod run;
pub(crate) mod stream;
mod transmit;
pub(crate) mod watch;

#[cfg(test)]
mod client;
#[cfg(test)]
mod tests;
