//! The four rings of a socket: what the process and the kernel pass each other, and who owns which
//! chunk meanwhile.

mod kernel;
mod packet;
mod ring;
#[cfg(test)]
mod tests;

pub(crate) use kernel::{DRAIN, Rings};
pub use packet::{Packet, PacketPage};
pub(crate) use ring::Chunk;
