//! [`Slot`] and [`Place`]: the way in which the functions of `Hal`, which have no receiver, find
//! their stack; installing and removing one.

use crate::stack::{Stack, StackError, Stats};
use pinfold::arena::{ArenaBuilder, BuildError};
use pinfold::{Arena, Domain};
use pinfold_core::dma_pool::CreateError;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A type that names a static [`Slot`] for one stack.
///
/// A constant, so that what a driver allocates and shares in a place is freed and unshared there: a
/// function could name another slot each time, and a payload that is unshared elsewhere would stay
/// within reach of its device. Types may name the same slot: then they have one stack together.
///
/// [`Process`] is the default. A second device in a domain of its own needs a place of its own:
///
/// ```
/// use pinfold_virtio::{Place, Slot};
///
/// struct Second;
/// static SLOT: Slot = Slot::new();
/// impl Place for Second {
///     const SLOT: &'static Slot = &SLOT;
/// }
/// ```
pub trait Place: 'static {
    /// The slot.
    const SLOT: &'static Slot;
}

/// The place for programs with one device.
#[derive(Clone, Copy, Debug)]
pub enum Process {}

static PROCESS: Slot = Slot::new();

impl Place for Process {
    const SLOT: &'static Slot = &PROCESS;
}

/// Holds the stack of a [`Place`]. Opaque.
#[derive(Debug, Default)]
pub struct Slot(RwLock<Option<InstalledStack>>);

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

#[derive(Debug)]
struct InstalledStack {
    stack: Stack,
    /// A number that no other stack has had.
    id: u64,
    /// Whether its [`Installed`] has been dropped: the stack then stays until the driver has freed
    /// everything.
    orphaned: bool,
}

impl Slot {
    /// Creates an empty slot.
    pub const fn new() -> Self {
        Self(RwLock::new(None))
    }

    /// Calls `act` with the stack, if there is one.
    pub(crate) fn with<R>(&self, act: impl FnOnce(&Stack) -> R) -> Option<R> {
        let installed = self.read();
        let installed = installed.as_ref()?;
        Some(act(&installed.stack))
    }

    /// Like `with`, for calls that may free the last object of an orphan, which is then removed.
    pub(crate) fn with_last<R>(&self, act: impl FnOnce(&Stack) -> R) -> Option<R> {
        let leaves = |installed: &InstalledStack| installed.orphaned && installed.stack.is_idle();
        let (result, last) = {
            let installed = self.read();
            let installed = installed.as_ref()?;
            (act(&installed.stack), leaves(installed))
        };
        if last {
            drop(self.write().take_if(|installed| leaves(installed)));
        }
        Some(result)
    }

    /// Like `with`, for calls that allocate, which an orphan refuses.
    pub(crate) fn with_owned<R>(&self, act: impl FnOnce(&Stack) -> R) -> Option<R> {
        let installed = self.read();
        let installed = installed.as_ref().filter(|installed| !installed.orphaned)?;
        Some(act(&installed.stack))
    }

    fn read(&self) -> RwLockReadGuard<'_, Option<InstalledStack>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Option<InstalledStack>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a stack cannot be installed. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InstallError {
    /// The place has a stack already.
    #[error(
        "cannot install a second stack in the place ({stats}): finish() the first, or use another Place"
    )]
    Occupied {
        /// Its counters.
        stats: Stats,
    },
    /// The arena could not be built.
    #[error(transparent)]
    Arena(#[from] BuildError),
    /// The pool could not be created.
    #[error(transparent)]
    Pool(#[from] CreateError),
}

/// Installs a stack in the place `P`: an arena as configured by `arena`, but mapped per use, in
/// `domain`.
///
/// # Errors
/// [`InstallError`].
pub fn install<P: Place>(
    domain: &Domain,
    arena: ArenaBuilder,
) -> Result<Installed<P>, InstallError> {
    let mut slot = P::SLOT.write();
    if let Some(installed) = &*slot {
        return Err(InstallError::Occupied { stats: installed.stack.stats() });
    }
    let stack = Stack::new(domain, arena).map_err(|no| match no {
        StackError::Arena(error) => InstallError::Arena(error),
        StackError::Pool(error) => InstallError::Pool(error),
    })?;
    let arena = stack.arena().clone();
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    *slot = Some(InstalledStack { stack, id, orphaned: false });
    Ok(Installed { arena, id, place: PhantomData })
}

/// An installed stack. [`finish`](Self::finish) removes it.
///
/// Dropping it removes the stack too. Memory that a driver still holds stays valid and can be
/// freed, but nothing new is allocated, and the place is occupied until everything has been freed.
pub struct Installed<P: Place> {
    arena: Arena,
    id: u64,
    place: PhantomData<fn() -> P>,
}

/// A driver has not freed everything. The stack is still installed.
#[derive(thiserror::Error)]
#[error("the driver has not freed everything: {stats}")]
pub struct Leak<P: Place> {
    /// The stack.
    pub installed: Installed<P>,
    /// Its counters.
    pub stats: Stats,
}

impl<P: Place> Installed<P> {
    /// Returns the arena. Its buffers are shared with the device in place, if in whole pages.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Returns the counters of the stack.
    pub fn stats(&self) -> Stats {
        P::SLOT.with(Stack::stats).unwrap_or_default()
    }

    /// Removes the stack, if nothing has leaked.
    ///
    /// # Errors
    /// [`Leak`], with the stack, if a driver still has rings or a payload is shared.
    pub fn finish(self) -> Result<Stats, Leak<P>> {
        let mut slot = P::SLOT.write();
        let stats = slot.as_ref().map(|installed| installed.stack.stats()).unwrap_or_default();
        if slot.as_ref().is_some_and(|installed| !installed.stack.is_idle()) {
            drop(slot);
            return Err(Leak { installed: self, stats });
        }
        // The drop of `self`, which follows, finds the place empty.
        *slot = None;
        drop(slot);
        Ok(stats)
    }
}

impl<P: Place> Drop for Installed<P> {
    fn drop(&mut self) {
        let mut slot = P::SLOT.write();
        // After `finish` the place may already have another stack.
        let Some(installed) = slot.as_mut().filter(|installed| installed.id == self.id) else {
            return;
        };
        if installed.stack.is_idle() {
            *slot = None;
        } else {
            tracing::warn!(stats = %installed.stack.stats(), "a stack is dropped before its driver");
            installed.orphaned = true;
        }
    }
}

impl<P: Place> fmt::Debug for Installed<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Installed").field("arena", &self.arena).finish_non_exhaustive()
    }
}

impl<P: Place> fmt::Debug for Leak<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leak").field("stats", &self.stats).finish_non_exhaustive()
    }
}
