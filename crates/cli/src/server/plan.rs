//! How many threads a server has and how much memory: one budget for the whole server, from which
//! the rest follows.

use super::error::ServeError;
use crate::setup::memory;
use crate::units::ByteSize;
use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;

/// The budget of a machine with enough memory.
const USUAL: u64 = 64 << 20;
/// The part of the available memory that it is at most, unless the user asks for more.
const PART: u64 = 8;
/// The memory of a thread: fewer threads than processors are started where the budget does not have
/// that for each.
const THREAD: u64 = 4 << 20;
/// The least memory of a thread.
const LEAST: u64 = 2 << 20;
/// What a driver needs of the memory that may be locked for its queues.
const QUEUES: u64 = 6 << 20;

/// The longest request on any machine, which is what a client assumes that is told nothing ("Block
/// size constraints"). One for which there is less memory is served in parts.
pub(crate) const MAX_PAYLOAD: u32 = 32 << 20;

/// What a server may use of the machine that it runs on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    /// How many threads can run at the same time.
    pub(crate) processors: usize,
    /// The memory that is available to this process, bytes.
    pub(crate) memory: u64,
    /// How much of it may be locked, for a device that reaches it through an IOMMU; `None` without
    /// a limit.
    pub(crate) lockable: Option<u64>,
}

impl Machine {
    /// Returns this machine.
    pub(crate) fn here() -> Self {
        let lifted = rustix::thread::capabilities(None)
            .is_ok_and(|sets| sets.effective.contains(CapabilitySet::IPC_LOCK));
        let lockable = if lifted { None } else { getrlimit(Resource::Memlock).current };
        let processors = std::thread::available_parallelism().map_or(1, Into::into);
        Self { processors, memory: memory::allowed(), lockable }
    }
}

/// What the user asks for, and the target.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Asked {
    /// `--buffers`.
    pub(crate) buffers: Option<ByteSize>,
    /// `--threads`.
    pub(crate) threads: Option<usize>,
    /// The most queues that the target has, if that is known.
    pub(crate) queues: Option<usize>,
    /// Whether a device of this machine has to reach the memory.
    pub(crate) locks: bool,
}

/// The threads of a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Plan {
    /// How many there are.
    pub(crate) threads: usize,
    /// The payload memory of each, bytes.
    pub(crate) budget: usize,
}

impl Plan {
    /// Plans a server on `machine`.
    ///
    /// # Errors
    /// [`ServeError::Buffers`].
    pub(crate) fn new(asked: Asked, machine: Machine) -> Result<Self, ServeError> {
        let Asked { buffers, threads, queues, locks } = asked;
        let lockable =
            machine.lockable.filter(|_| locks).map_or(u64::MAX, |most| most.saturating_sub(QUEUES));
        let usual = USUAL.min(machine.memory / PART).min(lockable);
        let total = buffers.map_or_else(
            || usual.max(LEAST.saturating_mul(threads.unwrap_or(1) as u64)),
            |ByteSize(asked)| asked,
        );
        let fitting = usize::try_from(total / THREAD).unwrap_or(usize::MAX);
        let most = machine.processors.min(fitting).min(queues.unwrap_or(usize::MAX));
        let threads = threads.unwrap_or(most).max(1);
        let needed = LEAST.saturating_mul(threads as u64);
        let budget = usize::try_from(total / threads as u64).ok().filter(|_| total >= needed);
        let budget = budget.ok_or(ServeError::Buffers { asked: total, threads, needed })?;
        Ok(Self { threads, budget })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn plan(
        asked: Asked,
        processors: usize,
        memory: u64,
        lockable: Option<u64>,
    ) -> Result<(usize, u64), u64> {
        match Plan::new(asked, Machine { processors, memory, lockable }) {
            Ok(Plan { threads, budget }) => Ok((threads, budget as u64)),
            Err(ServeError::Buffers { needed, .. }) => Err(needed),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn the_defaults_hold_on_every_machine() {
        let (usual, device) = (Asked::default(), Asked { locks: true, ..Asked::default() });
        for (processors, threads) in [(1, 1), (2, 2), (8, 8), (16, 16), (64, 16), (256, 16)] {
            let each = 64 * MIB / threads as u64;
            assert_eq!(plan(usual, processors, 8 * GIB, Some(8 * MIB)), Ok((threads, each)));
            assert_eq!(plan(usual, processors, 512 * MIB, Some(8 * MIB)), Ok((threads, each)));
            assert_eq!(plan(device, processors, 8 * GIB, None), Ok((threads, each)));
            // 2 MiB of the 8 that may be locked, less than a thread usually has.
            assert_eq!(plan(device, processors, 8 * GIB, Some(8 * MIB)), Ok((1, 2 * MIB)));
            let queues = Some(3);
            let (threads, each) =
                plan(Asked { queues, ..usual }, processors, 8 * GIB, None).unwrap();
            assert_eq!((threads, each), (processors.min(3), 64 * MIB / threads as u64));
        }
        for processors in [1, 2, 8, 16, 64, 256] {
            for memory in [0, MIB, 32 * MIB, 100 * MIB, 512 * MIB, GIB, u64::MAX] {
                for lockable in [None, Some(0), Some(64 << 10), Some(8 * MIB), Some(u64::MAX)] {
                    for asked in [usual, device] {
                        let (threads, each) = plan(asked, processors, memory, lockable).unwrap();
                        assert!((1..=processors).contains(&threads) && each >= LEAST);
                        let total = threads as u64 * each;
                        assert!(
                            total <= USUAL && (total <= memory / PART || total == LEAST),
                            "{total}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn what_the_user_asks_for_is_used_or_refused() {
        let asked = |buffers: Option<u64>, threads| Asked {
            buffers: buffers.map(ByteSize),
            threads,
            ..Asked::default()
        };
        for processors in [1, 2, 64, 256] {
            let plan = |buffers, threads| {
                plan(asked(buffers, threads), processors, 512 * MIB, Some(8 * MIB))
            };
            assert_eq!(plan(None, Some(2)), Ok((2, 32 * MIB)));
            assert_eq!(plan(None, Some(256)), Ok((256, 2 * MIB)));
            assert_eq!(plan(Some(2 * MIB), None), Ok((1, 2 * MIB)));
            assert_eq!(
                plan(Some(8 * MIB), None),
                Ok((processors.min(2), 8 * MIB / processors.min(2) as u64))
            );
            assert_eq!(plan(Some(2 * MIB - 1), None), Err(2 * MIB));
            assert_eq!(plan(Some(4 * MIB - 1), Some(2)), Err(4 * MIB));
            assert_eq!(plan(Some(4 * MIB), Some(2)), Ok((2, 2 * MIB)));
        }
    }
}
