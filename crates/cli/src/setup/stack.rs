//! The memory stack of one run: a domain, an arena for what the drivers need, and an arena for the
//! data.

use super::memory::{BufferNeed, MemoryNeed};
use crate::args::{Memory, Protect, StackArgs};
use pinfold::arena::{AllocError, BuildError};
use pinfold::soft::Port;
use pinfold::uring::Fixed;
use pinfold::{Arena, Buffer, Domain, MappingPolicy, Source};
use pinfold_core::domain::BackendError;
use std::time::Duration;

/// Why the memory stack could not be set up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StackError {
    /// The address space could not be created.
    #[error("no I/O address space: {0}")]
    Domain(#[from] BackendError),
    /// An arena could not be allocated.
    #[error(
        "no DMA memory for {purpose}: {error}; lower {lower}, or choose other memory with --memory"
    )]
    Arena {
        /// `the data`, `the controllers' queues`.
        purpose: &'static str,
        /// The error.
        error: BuildError,
        /// The options that lower it.
        lower: &'static str,
    },
    /// A buffer could not be allocated.
    #[error("cannot allocate the data buffers: {0}")]
    Buffer(#[from] AllocError),
    /// More than 64 bits count.
    #[error("{count} buffers of {bytes} bytes exceed the largest arena (1 TiB): lower {lower}")]
    TooMuch {
        /// How many buffers.
        count: usize,
        /// Bytes of each.
        bytes: usize,
        /// The options that lower it.
        lower: &'static str,
    },
}

/// The memory stack of one run.
#[derive(Debug)]
pub(crate) struct Stack {
    /// The I/O address space that all controllers of the run are in.
    pub(crate) domain: Domain,
    /// Always mapped: queues and PRP lists.
    pub(crate) control: Option<Arena>,
    /// The data buffers, mapped as `--protect` says.
    pub(crate) data: Arena,
    /// The value of `--protect`.
    pub(crate) protect: Protect,
    /// For how long commands are retried.
    pub(crate) retry_limit: Duration,
    buffers: BufferNeed,
}

const HUGE: usize = 2 << 20;

/// Returns the size of a buffer of `bytes` bytes in an arena, so that all fit: a power of two of
/// frames up to 2 MiB, whole hugepages above.
fn allocated_bytes(bytes: usize) -> Option<usize> {
    if bytes > HUGE {
        bytes.checked_next_multiple_of(HUGE)
    } else {
        Some(bytes.max(4096).next_power_of_two())
    }
}

/// Returns an upper bound for a controller's queues, identify buffers and PRP lists.
fn control_bytes(BufferNeed { count, bytes, .. }: BufferNeed) -> u64 {
    let list_pages = (bytes as u64 / 4096).div_ceil(511) + 1;
    (count as u64).saturating_mul(list_pages * 4096).saturating_add(4 << 20)
}

impl Stack {
    /// Allocates a stack in `domain` for `buffers` and `controllers` controllers.
    pub(crate) fn build(
        args: StackArgs,
        domain: Domain,
        buffers: BufferNeed,
        controllers: u64,
    ) -> Result<Self, StackError> {
        let BufferNeed { count, bytes, lower } = buffers;
        let too_much = || StackError::TooMuch { count, bytes, lower };
        let allocated = allocated_bytes(bytes).ok_or_else(too_much)?;
        let data_bytes = allocated.checked_mul(count.max(1)).ok_or_else(too_much)?;
        let buffers = BufferNeed { bytes: allocated, ..buffers };
        Self::with_memory(args, domain, data_bytes as u64, buffers, controllers)
    }

    /// Allocates a stack in `domain` with `data_bytes` bytes for the data, of which up to `buffers`
    /// are in flight.
    pub(crate) fn with_memory(
        args: StackArgs,
        domain: Domain,
        data_bytes: u64,
        buffers: BufferNeed,
        controllers: u64,
    ) -> Result<Self, StackError> {
        let mapping_policy = if args.protect == Protect::Static {
            MappingPolicy::Whole
        } else {
            MappingPolicy::PerUse
        };
        if let Some(limit) = args.held_limit {
            domain.set_held_limit(limit.0);
        }
        let mut builder = Arena::builder().size(data_bytes).mapping_policy(mapping_policy);
        if let Some(source) = source(args.memory) {
            builder = builder.source(source);
        }
        let (purpose, lower) = ("the data", buffers.lower);
        let data =
            builder.build(&domain).map_err(|error| StackError::Arena { purpose, error, lower })?;
        let control = if controllers > 0 {
            let size = controllers.saturating_mul(control_bytes(buffers));
            let builder = Arena::builder().size(size).mapping_policy(MappingPolicy::Whole);
            let purpose = "the controllers' queues";
            Some(builder.build(&domain).map_err(|error| StackError::Arena {
                purpose,
                error,
                lower,
            })?)
        } else {
            None
        };
        let StackArgs { protect, retry_limit, .. } = args;
        Ok(Self { domain, control, data, protect, retry_limit: retry_limit.0, buffers })
    }

    /// Returns the memory of all data buffers, to be registered with a ring.
    pub(crate) fn fixed(&self) -> Fixed<'_> {
        self.data.fixed()
    }

    /// Allocates the data buffers.
    pub(crate) fn buffers(&self) -> Result<Vec<Buffer>, StackError> {
        (0..self.buffers.count).map(|_| Ok(self.data.alloc(self.buffers.bytes)?)).collect()
    }

    /// Returns the port through which a model controller reaches memory.
    pub(crate) fn port(&self) -> Option<Port> {
        self.domain.port()
    }

    /// Returns the arenas with their names.
    pub(crate) fn arenas(&self) -> impl Iterator<Item = (&'static str, &Arena)> {
        std::iter::once(("data", &self.data))
            .chain(self.control.iter().map(|control| ("control", control)))
    }

    /// Returns the memory that such a stack needs, with targets that hold `targets` bytes.
    pub(crate) fn need(buffers: BufferNeed, controllers: u64, targets: u64) -> MemoryNeed {
        let each = allocated_bytes(buffers.bytes).map_or(u64::MAX, |bytes| bytes as u64);
        let data = each.saturating_mul(buffers.count.max(1) as u64);
        let control =
            if controllers > 0 { controllers.saturating_mul(control_bytes(buffers)) } else { 0 };
        MemoryNeed { buffers, arenas: data.saturating_add(control), targets }
    }
}

fn source(memory: Memory) -> Option<Source> {
    match memory {
        Memory::Auto => None,
        Memory::Hugetlb1g => Some(Source::Hugetlb1G),
        Memory::Hugetlb2m => Some(Source::Hugetlb2M),
        Memory::Thp => Some(Source::Thp),
        Memory::Plain => Some(Source::Plain),
        Memory::Memfd => Some(Source::Memfd),
        Memory::Memfd2m => Some(Source::Memfd2M),
        Memory::Memfd1g => Some(Source::Memfd1G),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn the_words_of_memory_are_those_of_the_sources() {
        let words: Vec<_> = Memory::value_variants()
            .iter()
            .filter_map(|kind| {
                Some((kind.to_possible_value()?.get_name().to_owned(), source(*kind)?))
            })
            .collect();
        assert!(words.iter().all(|(word, source)| word == source.name()), "{words:?}");
        // All but the caller's memory, which a command line cannot name.
        assert_eq!(words.len(), Source::ALL.len() - 1);
    }

    #[test]
    fn buffers_fill_an_arena_without_gaps() {
        for (bytes, allocated) in
            [(1, 4096), (512, 4096), (4097, 8192), (1 << 20, 1 << 20), (3 << 19, 2 << 20)]
        {
            assert_eq!(allocated_bytes(bytes), Some(allocated));
        }
        assert_eq!(allocated_bytes((2 << 20) + 1), Some(4 << 20));
        assert_eq!(allocated_bytes(usize::MAX), None);
    }
}
