//! The built program, run as a user runs it.

#[cfg(test)]
mod around;
#[cfg(test)]
mod bad_input;
#[cfg(test)]
mod check;
/// The client that the tests of the server use, too.
#[cfg(test)]
#[path = "../../src/server/client.rs"]
mod client;
#[cfg(test)]
mod common;
#[cfg(test)]
mod copy;
#[cfg(test)]
mod fixes;
#[cfg(test)]
mod io;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod nvme;
#[cfg(test)]
mod options;
#[cfg(test)]
mod receive;
#[cfg(test)]
mod receive_ends;
#[cfg(test)]
mod receive_links;
#[cfg(test)]
mod receive_queues;
#[cfg(test)]
mod receive_to;
#[cfg(test)]
mod replay;
#[cfg(test)]
mod serve;
#[cfg(test)]
mod serve_around;
#[cfg(test)]
mod serve_clients;
#[cfg(test)]
mod serve_faults;
#[cfg(test)]
mod serve_order;
#[cfg(test)]
mod serve_tls;
#[cfg(test)]
mod signals;
#[cfg(test)]
mod soak;
#[cfg(test)]
mod soak_serve;
/// The wire that the tests of `pinfold-xdp` use, too.
#[cfg(test)]
#[path = "../../../xdp/tests/veth/common.rs"]
#[allow(dead_code, reason = "not all of it is needed here")]
mod wire;
