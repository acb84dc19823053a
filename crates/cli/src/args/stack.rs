//! The options of the memory stack, which several commands share.

use crate::units::{ByteSize, TimeSpan};
use clap::{Args, ValueEnum};
use std::time::Duration;

/// How the memory stack is used.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct StackArgs {
    /// When a controller can reach the data buffers
    #[arg(long, value_enum, default_value_t = Protect::Batch)]
    pub(crate) protect: Protect,

    /// The most bytes of buffers that wait for their flush: a completion that exceeds it waits, as
    /// with `--protect strict`, and 0 means that all do [default: no limit]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub(crate) held_limit: Option<ByteSize>,

    /// Over how many units the software IOMMU spreads the model controllers, in turns: each has a
    /// queue of its own, and a flush is complete when all have completed it. Not with vfio:BDF,
    /// which is behind the units of the machine [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..), allow_negative_numbers = true)]
    pub(crate) iommu_units: Option<u8>,

    /// For how long a command is sent again to a controller that permits it (its status has DNR
    /// clear, as of a namespace that is not ready): after the delay that the controller asks for,
    /// otherwise after 1 ms, 2 ms, and so on up to a second
    #[arg(long, value_name = "TIME", default_value = "10s", allow_negative_numbers = true)]
    pub(crate) retry_limit: TimeSpan,

    /// Where the DMA memory comes from
    #[arg(long, alias = "mem", value_enum, default_value_t = Memory::Auto)]
    pub(crate) memory: Memory,
}

impl Default for StackArgs {
    fn default() -> Self {
        let retry_limit = TimeSpan(Duration::from_secs(10));
        Self {
            protect: Protect::Batch,
            held_limit: None,
            iommu_units: None,
            retry_limit,
            memory: Memory::Auto,
        }
    }
}

/// When a controller can reach the data buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Protect {
    /// From submission to completion, with one flush for each request, which the job waits for, up
    /// to 50 ms, before it goes on
    Strict,
    /// From submission to completion, with one flush for each request (the queue merges those that
    /// it gets while it is busy); the buffer is held until the flush has completed, and the job
    /// goes on
    Revoke,
    /// From submission to completion, with one flush for all requests that complete together; the
    /// buffers are held until the flush has completed, and the job goes on
    Batch,
    /// Always: they are mapped once, and never flushed
    Static,
}

impl Protect {
    /// Returns the name as on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Strict => "strict",
            Self::Revoke => "revoke",
            Self::Batch => "batch",
            Self::Static => "static",
        }
    }
}

/// Where the DMA memory comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, serde::Serialize)]
pub(crate) enum Memory {
    /// The largest pages available
    #[serde(rename = "auto")]
    Auto,
    /// Reserved pages of 1 GiB
    #[serde(rename = "hugetlb-1g")]
    #[value(name = "hugetlb-1g")]
    Hugetlb1g,
    /// Reserved pages of 2 MiB
    #[serde(rename = "hugetlb-2m")]
    #[value(name = "hugetlb-2m")]
    Hugetlb2m,
    /// Transparent hugepages; the size is rounded up to 2 MiB
    #[serde(rename = "thp")]
    Thp,
    /// Pages of 4 KiB
    #[serde(rename = "plain")]
    Plain,
    /// A memory file, which can be shared with another process
    #[serde(rename = "memfd")]
    Memfd,
    /// A memory file on reserved pages of 2 MiB
    #[serde(rename = "memfd-2m")]
    #[value(name = "memfd-2m")]
    Memfd2m,
    /// A memory file on reserved pages of 1 GiB
    #[serde(rename = "memfd-1g")]
    #[value(name = "memfd-1g")]
    Memfd1g,
}
