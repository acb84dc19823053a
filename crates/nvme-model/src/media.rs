//! Where the model controller stores its blocks: memory, or a file.

mod file;
mod medium;
mod memory;

pub use file::FileMedia;
pub use medium::{Media, MediaError, ReadSink, WriteSource};
pub use memory::MemoryMedia;
