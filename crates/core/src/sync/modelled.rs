//! Loom's atomics, whose first value is written sequentially consistently.
//!
//! A sequentially consistent load of loom 0.7 does not read a value that was written sequentially
//! consistently and replaced by another such value. But it takes the value that an atomic is made
//! with for one that was written with release, and so may read it for ever. After one thread has
//! written `a` and another `b`, each could miss what the other wrote, which no machine does and no
//! structure here allows for. Hence the one thing that is done here: the first value is written
//! again. All operations are loom's own.
//!
//! Loom shows no load that reads what is written later; nor, to a sequentially consistent load, an
//! old value after a relaxed load that has read what the same thread wrote later. No structure here
//! relies on their order: what a relaxed load finds is where to look first.

use core::ops::Deref;
use core::sync::atomic::Ordering;
use loom::sync::atomic as checked;

macro_rules! modelled {
    ($($name:ident $value:ty)*) => {$(
        #[derive(Debug)]
        pub(crate) struct $name(checked::$name);

        impl $name {
            #[track_caller]
            pub(crate) fn new(value: $value) -> Self {
                let atomic = checked::$name::new(value);
                atomic.store(value, Ordering::SeqCst);
                Self(atomic)
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new(0)
            }
        }

        impl Deref for $name {
            type Target = checked::$name;
            fn deref(&self) -> &checked::$name {
                &self.0
            }
        }
    )*};
}

modelled! { AtomicU8 u8 AtomicU32 u32 AtomicU64 u64 }
