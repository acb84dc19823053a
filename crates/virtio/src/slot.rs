//! Where the `Hal`'s functions, which have no receiver, find their stack.

use crate::account::Stats;
use crate::stack::{NoStack, Stack};
use pinfold::arena::{ArenaBuilder, BuildError};
use pinfold::{Arena, Domain};
use pinfold_core::dma_pool::CreateError;
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A place for one stack: a type that names a static [`Slot`].
///
/// [`Process`] is the one that is there already. A second device, in a domain of its own, has a place of its own:
///
/// ```
/// use pinfold_virtio::{Place, Slot};
///
/// struct Second;
/// impl Place for Second {
///     fn slot() -> &'static Slot {
///         static SLOT: Slot = Slot::new();
///         &SLOT
///     }
/// }
/// ```
pub trait Place: 'static {
    /// The slot: always the same one.
    fn slot() -> &'static Slot;
}

/// The place of a process that has one device.
#[derive(Clone, Copy, Debug)]
pub enum Process {}

impl Place for Process {
    fn slot() -> &'static Slot {
        static SLOT: Slot = Slot::new();
        &SLOT
    }
}

/// What a [`Place`] names. Opaque.
#[derive(Debug, Default)]
pub struct Slot(RwLock<Option<Tenant>>);

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

#[derive(Debug)]
struct Tenant {
    stack: Stack,
    /// Of all that were ever installed, which.
    id: u64,
    /// Whether its [`Installed`] is gone: it stays until the driver has given back what it has.
    orphaned: bool,
}

impl Slot {
    /// An empty slot.
    pub const fn new() -> Self {
        Self(RwLock::new(None))
    }

    /// What `act` makes of the stack, if there is one.
    pub(crate) fn with<R>(&self, act: impl FnOnce(&Stack) -> R) -> Option<R> {
        let tenant = self.read();
        let tenant = tenant.as_ref()?;
        Some(act(&tenant.stack))
    }

    /// The same, for calls that may give back the last thing that an orphan waits for.
    pub(crate) fn with_last<R>(&self, act: impl FnOnce(&Stack) -> R) -> Option<R> {
        let leaves = |tenant: &Tenant| tenant.orphaned && tenant.stack.is_idle();
        let (result, last) = {
            let tenant = self.read();
            let tenant = tenant.as_ref()?;
            (act(&tenant.stack), leaves(tenant))
        };
        if last {
            drop(self.write().take_if(|tenant| leaves(tenant)));
        }
        Some(result)
    }

    /// The same for calls that take something new: an orphan gives nothing more.
    pub(crate) fn with_owned<R>(&self, act: impl FnOnce(&Stack) -> R) -> Option<R> {
        let tenant = self.read();
        let tenant = tenant.as_ref().filter(|tenant| !tenant.orphaned)?;
        Some(act(&tenant.stack))
    }

    fn read(&self) -> RwLockReadGuard<'_, Option<Tenant>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Option<Tenant>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why no stack was installed. Nothing has changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InstallError {
    /// There is one in this place.
    #[error("there is a stack in this place already: {account}; finish() it, or name another Place")]
    Occupied {
        /// What that one holds.
        account: Stats,
    },
    /// There is no memory for it.
    #[error(transparent)]
    Arena(#[from] BuildError),
    /// There is no memory for the pool's account.
    #[error(transparent)]
    Pool(#[from] CreateError),
}

/// Puts a stack into the place `P`: an arena of its own, as `arena` says but exposed per use, in `domain`.
///
/// # Errors
/// [`InstallError`].
pub fn install<P: Place>(domain: &Domain, arena: ArenaBuilder) -> Result<Installed<P>, InstallError> {
    let mut slot = P::slot().write();
    if let Some(tenant) = &*slot {
        return Err(InstallError::Occupied { account: tenant.stack.account() });
    }
    let stack = Stack::new(domain, arena).map_err(|no| match no {
        NoStack::Arena(error) => InstallError::Arena(error),
        NoStack::Pool(error) => InstallError::Pool(error),
    })?;
    let arena = stack.arena().clone();
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    *slot = Some(Tenant { stack, id, orphaned: false });
    Ok(Installed { arena, id, place: PhantomData })
}

/// A stack in its place. [`finish`](Self::finish) takes it away.
///
/// Dropping it does so too; where a driver still has something, that stays and can be given back, but nothing new is
/// had, and the place is taken until the last of it is back.
pub struct Installed<P: Place> {
    arena: Arena,
    id: u64,
    place: PhantomData<fn() -> P>,
}

/// A driver has not given everything back. The stack is still in its place.
#[derive(thiserror::Error)]
#[error("not everything came back: {account}")]
pub struct Leak<P: Place> {
    /// The stack.
    pub installed: Installed<P>,
    /// What it did, and what is out.
    pub account: Stats,
}

impl<P: Place> Installed<P> {
    /// The arena. Buffers of it are shared with the device where they lie, where they are shared in whole pages.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// What the stack has done so far, and what it holds.
    pub fn account(&self) -> Stats {
        P::slot().with(Stack::account).unwrap_or_default()
    }

    /// Takes the stack away: the leak check.
    ///
    /// # Errors
    /// [`Leak`], with the stack, where a driver still has rings, or a payload is still shared.
    pub fn finish(self) -> Result<Stats, Leak<P>> {
        let mut slot = P::slot().write();
        let account = slot.as_ref().map(|tenant| tenant.stack.account()).unwrap_or_default();
        if slot.as_ref().is_some_and(|tenant| !tenant.stack.is_idle()) {
            drop(slot);
            return Err(Leak { installed: self, account });
        }
        // The drop of `self`, which follows, finds the place empty.
        *slot = None;
        drop(slot);
        Ok(account)
    }
}

impl<P: Place> Drop for Installed<P> {
    fn drop(&mut self) {
        let mut slot = P::slot().write();
        // A place that `finish` has emptied may have another's stack by now.
        let Some(tenant) = slot.as_mut().filter(|tenant| tenant.id == self.id) else { return };
        if tenant.stack.is_idle() {
            *slot = None;
        } else {
            tracing::warn!(account = %tenant.stack.account(), "a stack goes before its driver");
            tenant.orphaned = true;
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
        f.debug_struct("Leak").field("account", &self.account).finish_non_exhaustive()
    }
}
