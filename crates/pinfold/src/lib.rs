//! The DMA memory stack for user space. (Skeleton.)
