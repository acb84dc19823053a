//! When memory is mapped.

/// Which part of an arena, or of owned memory, the devices of its domains can reach.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum MappingPolicy {
    /// All of it, for its lifetime: mapped once, without table work afterwards. A device may write
    /// any byte at any time, so buffers lend no slices.
    Whole,
    /// Only what is in use: a pool's chunks while the pool has them, a buffer while it is mapped.
    #[default]
    PerUse,
}
