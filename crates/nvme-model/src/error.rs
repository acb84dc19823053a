//! Errors of the model controller.

use std::io;

/// Why the model controller could not be created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The block size is neither 512 nor 4096.
    #[error("unsupported block size of {block_bytes} bytes: the model supports 512 and 4096")]
    BlockSize {
        /// The requested size.
        block_bytes: u32,
    },
    /// The medium is smaller than one block.
    #[error("a medium of {bytes} bytes is smaller than one block of {block_bytes} bytes")]
    TooSmall {
        /// The medium's size.
        bytes: u64,
        /// The size of a block.
        block_bytes: u32,
    },
    /// A field of [`ModelConfig`](crate::ModelConfig) is out of range.
    #[error("{name} is {value}: the model supports {min} to {max}")]
    OutOfRange {
        /// The name of the field.
        name: &'static str,
        /// Its value.
        value: u64,
        /// The smallest valid value.
        min: u64,
        /// The largest valid value.
        max: u64,
    },
    /// The thread could not be started.
    #[error("cannot start the thread of the model controller: {}", pinfold::probe::threads::refusal(.0))]
    Thread(io::Error),
    /// The eventfd of an interrupt vector could not be created.
    #[error(
        "cannot create an eventfd for interrupt vector {vector} of the model controller: {error}{}",
        hint(error)
    )]
    Vector {
        /// The vector.
        vector: u16,
        /// The system error.
        error: io::Error,
    },
}

/// Names the limit of open files only if that refused.
fn hint(error: &io::Error) -> &'static str {
    const EMFILE: i32 = 24;
    if error.raw_os_error() == Some(EMFILE) { "; raise `ulimit -n`" } else { "" }
}
