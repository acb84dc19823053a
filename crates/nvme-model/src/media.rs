//! Where the model controller stores its blocks: memory, or a file.

mod file;
mod medium;
mod memory;

pub use file::FileMedia;
pub use medium::{Media, MediaError, Sink, Source};
pub use memory::MemoryMedia;
