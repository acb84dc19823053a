//! The drivers of `virtio-drivers`, on Pinfold's memory, against a model disk behind the software
//! IOMMU.
#![expect(clippy::unwrap_used, reason = "tests")]

mod common;
mod life;
mod reach;
mod roundtrip;
