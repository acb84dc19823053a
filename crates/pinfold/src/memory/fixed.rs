//! Memory to be registered with a ring.

use pinfold_core::mem::DmaMemory;
use std::marker::PhantomData;

/// The address range of memory that is to be registered with a ring. It gives no access to the
/// memory.
///
/// Of an arena it is [`ArenaMemory::fixed`](crate::arena::ArenaMemory::fixed), of the program's own
/// memory [`OwnedMemory::fixed`](crate::OwnedMemory::fixed).
#[derive(Clone, Copy, Debug)]
pub struct Fixed<'m> {
    pub(crate) addr: usize,
    pub(crate) len: usize,
    lent: PhantomData<&'m ()>,
}

impl<'m> From<DmaMemory<'m>> for Fixed<'m> {
    fn from(memory: DmaMemory<'m>) -> Self {
        Self { addr: memory.addr(), len: memory.len(), lent: PhantomData }
    }
}
