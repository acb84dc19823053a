//! The interface that the workloads use, and the adapters that write to what was allocated.

use crate::error::BenchError;
use pinfold_core::dma_pool;
use pinfold_core::mem::DmaMemory;

/// A DMA pool.
pub(in crate::suite) type Pool = dma_pool::DmaPool;
/// An owner's handle to such a pool.
pub(in crate::suite) type PoolLocal = dma_pool::Local;

/// Something an allocator allocates.
pub(in crate::suite) trait Object {
    /// Returns the address that a device would be given.
    fn address(&self) -> u64;
}

/// An offset is its own address.
impl Object for u64 {
    #[inline(always)]
    fn address(&self) -> u64 {
        *self
    }
}

/// One owner's access to an allocator.
pub(in crate::suite) trait Handle {
    /// What it allocates.
    type Object: Object;
    /// Allocates an object.
    fn alloc(&mut self) -> Result<Self::Object, BenchError>;
    /// Frees an object.
    fn free(&mut self, object: Self::Object) -> Result<(), BenchError>;
    /// Frees objects: one by one, or by one call if there is one.
    #[inline(always)]
    fn free_many(&mut self, objects: &mut Vec<Self::Object>) -> Result<(), BenchError> {
        objects.drain(..).try_for_each(|object| self.free(object))
    }
}

/// A handle whose objects are memory.
pub(in crate::suite) trait AllocWritten: Handle {
    /// Allocates an object and writes one word of it.
    fn alloc_written(&mut self) -> Result<Self::Object, BenchError>;
}

/// Implements [`Handle`], and [`AllocWritten`] where `write` is given, each call inlined into its
/// loop.
macro_rules! handle {
    (
        [$($lifetime:lifetime),*] $handle:ty, $object:ty,
        |$this:ident| $alloc:expr, |$that:ident, $freed:ident| $free:expr
    ) => {
        impl<$($lifetime),*> $crate::suite::handle::Handle for $handle {
            type Object = $object;
            #[inline(always)]
            fn alloc(&mut self) -> Result<Self::Object, $crate::error::BenchError> {
                let $this = self;
                Ok($alloc)
            }
            #[inline(always)]
            fn free(&mut self, $freed: Self::Object) -> Result<(), $crate::error::BenchError> {
                let $that = self;
                $free;
                Ok(())
            }
        }
    };
    (
        [$($lifetime:lifetime),*] $handle:ty, $object:ty,
        |$this:ident| $alloc:expr, |$that:ident, $freed:ident| $free:expr, write |$owner:ident, $written:ident| $write:expr
    ) => {
        $crate::suite::handle::handle!(
            [$($lifetime),*] $handle, $object, |$this| $alloc, |$that, $freed| $free
        );

        impl<$($lifetime),*> $crate::suite::handle::AllocWritten for $handle {
            #[inline(always)]
            fn alloc_written(&mut self) -> Result<Self::Object, $crate::error::BenchError> {
                let $owner = self;
                let $written = $crate::suite::handle::Handle::alloc($owner)?;
                $write;
                Ok($written)
            }
        }
    };
}
pub(in crate::suite) use handle;

/// Writes one word of each object when it is allocated. Without the write, an allocator that keeps
/// its state elsewhere leaves the cache miss on the block to its user and looks faster than it is.
pub(in crate::suite) struct Written<H>(pub(in crate::suite) H);

impl<H: AllocWritten> Handle for Written<H> {
    type Object = H::Object;
    #[inline(always)]
    fn alloc(&mut self) -> Result<H::Object, BenchError> {
        self.0.alloc_written()
    }
    #[inline(always)]
    fn free(&mut self, object: H::Object) -> Result<(), BenchError> {
        self.0.free(object)
    }
    #[inline(always)]
    fn free_many(&mut self, objects: &mut Vec<H::Object>) -> Result<(), BenchError> {
        self.0.free_many(objects)
    }
}

/// A handle whose objects are offsets, and the memory at which they are written.
pub(in crate::suite) struct AtOffset<'m, H>(
    pub(in crate::suite) H,
    pub(in crate::suite) DmaMemory<'m>,
);

impl<H: Handle> Handle for AtOffset<'_, H> {
    type Object = H::Object;
    #[inline(always)]
    fn alloc(&mut self) -> Result<H::Object, BenchError> {
        self.0.alloc()
    }
    #[inline(always)]
    fn free(&mut self, object: H::Object) -> Result<(), BenchError> {
        self.0.free(object)
    }
}

impl<H: Handle> AllocWritten for AtOffset<'_, H> {
    #[inline(always)]
    fn alloc_written(&mut self) -> Result<H::Object, BenchError> {
        let object = self.0.alloc()?;
        let offset = object.address();
        // The size of the memory is a power of two and may be smaller than the range of the
        // offsets.
        self.1.write_u64(
            usize::try_from(offset).unwrap_or(usize::MAX) & (self.1.len() - 1),
            offset,
        )?;
        Ok(object)
    }
}
