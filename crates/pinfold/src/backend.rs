//! The backends of a [`Domain`](crate::Domain), independent of each other.
//!
//! `soft` and `vtd` keep their tables themselves. For `vfio` (type1) and `iommufd` the kernel keeps it, and `none`
//! has none: these three are an [`IommuContext`](context::IommuContext), a file each, below the
//! shared [`KernelTable`](kernel_table::KernelTable).

pub(crate) mod context;
pub(crate) mod error;
#[cfg(test)]
pub(crate) mod fake;
pub(crate) mod iommufd;
pub(crate) mod kernel_table;
pub(crate) mod none;
pub(crate) mod pinned;
#[cfg(feature = "soft")]
pub mod soft;
pub(crate) mod vfio;
#[cfg(feature = "vtd")]
pub(crate) mod vtd;
