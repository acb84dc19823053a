//! Namespaces of the model controller.

use crate::error::ModelError;
use crate::media::Media;
use std::fmt;
use std::sync::Arc;

/// A namespace of the model: a medium and its block size.
#[derive(Clone)]
pub struct Namespace {
    pub(crate) media: Arc<dyn Media>,
    block_shift: u32,
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Namespace({} blocks of {} bytes)", self.blocks(), self.block_bytes())
    }
}

impl Namespace {
    /// Creates a namespace on `media` with blocks of `block_bytes` (512 or 4096). A remainder at
    /// its end is not used.
    ///
    /// # Errors
    /// [`ModelError::BlockSize`] for another size, [`ModelError::TooSmall`] where there is not one
    /// block.
    pub fn new(media: Arc<dyn Media>, block_bytes: u32) -> Result<Self, ModelError> {
        if block_bytes != 512 && block_bytes != 4096 {
            return Err(ModelError::BlockSize { block_bytes });
        }
        let namespace = Self { block_shift: block_bytes.trailing_zeros(), media };
        match namespace.blocks() {
            0 => Err(ModelError::TooSmall { bytes: namespace.media.bytes(), block_bytes }),
            _ => Ok(namespace),
        }
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.media.bytes() >> self.block_shift
    }
    pub(crate) fn block_shift(&self) -> u32 {
        self.block_shift
    }
    pub(crate) fn block_bytes(&self) -> u64 {
        1 << self.block_shift
    }
}
