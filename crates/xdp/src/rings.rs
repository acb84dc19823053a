//! The four rings of a socket: what the process and the kernel pass each other, and who owns which chunk meanwhile.

mod chunk;
mod kernel;
mod page;
mod ring;
#[cfg(test)]
mod tests;

pub(crate) use chunk::Chunk;
pub(crate) use kernel::{Received, Rings};
pub use page::PacketPage;
