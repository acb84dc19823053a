//! The DMA memory stack for user space. (Skeleton.)

pub mod domain;
pub mod soft;

pub use domain::Domain;
