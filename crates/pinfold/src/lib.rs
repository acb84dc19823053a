//! The DMA memory stack for user space. (Skeleton.)

pub mod domain;
pub mod soft;
pub mod uring;

pub use domain::Domain;
