//! The buffers and mappings that owners hold and pass to each other.

use super::world::Live;
use pinfold::Buffer;
use pinfold::soft::Random;
use pinfold_core::access::{Bidirectional, FromDevice, ToDevice};
use pinfold_core::domain::{DomainLocal, Mapping, Unrevoked};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) type Handle = DomainLocal;
pub(crate) type Revoked = pinfold_core::domain::Revoked<Buffer>;

/// A mapping of any direction.
pub(crate) enum Held {
    Read(Mapping<Buffer, ToDevice>),
    Write(Mapping<Buffer, FromDevice>),
    Both(Mapping<Buffer, Bidirectional>),
}

impl From<Held> for Unrevoked<Buffer> {
    fn from(held: Held) -> Self {
        match held {
            Held::Read(mapping) => mapping.into(),
            Held::Write(mapping) => mapping.into(),
            Held::Both(mapping) => mapping.into(),
        }
    }
}

/// Through what owners map, revoke and wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Through {
    /// The domain, which any thread may use.
    Domain,
    /// A handle of each owner, with windows of its own.
    Handles,
    /// Either, at random.
    Both,
}

impl Through {
    pub(crate) fn is_by_handle(self, random: &mut Random) -> bool {
        match self {
            Self::Domain => false,
            Self::Handles => true,
            Self::Both => random.one_in(2),
        }
    }
}

/// Mappings that owners have passed on, for any owner to take: live ones that no device may rely
/// on any more, and revoked ones.
#[derive(Default)]
pub(crate) struct Mail {
    mapped: Mutex<Vec<(Live, Held)>>,
    revoked: Mutex<Vec<(Live, Revoked)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Mail {
    /// The most of each kind that is handed on.
    const ROOM: usize = 8;

    /// Hands a mapping on, or returns it if there is no room.
    pub(crate) fn send(&self, mapping: (Live, Held)) -> Option<(Live, Held)> {
        let mut mapped = lock(&self.mapped);
        if mapped.len() == Self::ROOM {
            return Some(mapping);
        }
        mapped.push(mapping);
        None
    }

    /// Hands a revoked mapping on, or returns it if there is no room.
    pub(crate) fn send_revoked(&self, one: (Live, Revoked)) -> Option<(Live, Revoked)> {
        let mut revoked = lock(&self.revoked);
        if revoked.len() == Self::ROOM {
            return Some(one);
        }
        revoked.push(one);
        None
    }

    pub(crate) fn take(&self) -> Option<(Live, Held)> {
        lock(&self.mapped).pop()
    }

    pub(crate) fn take_revoked(&self) -> Option<(Live, Revoked)> {
        lock(&self.revoked).pop()
    }
}
