//! The four rings of a socket: what the process and the kernel pass each other, and who owns which
//! chunk meanwhile.

mod chunk;
mod kernel;
mod packet;
mod page;
mod ring;
#[cfg(test)]
mod tests;

pub(crate) use chunk::Chunk;
pub(crate) use kernel::{DRAIN, Rings};
pub use packet::Packet;
pub use page::PacketPage;
