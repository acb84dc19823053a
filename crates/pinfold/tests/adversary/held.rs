//! What owners hold and hand to each other.

use super::world::Live;
use pinfold::Buffer;
use pinfold::soft::Random;
use pinfold_core::access::{Bidirectional, FromDevice, ToDevice};
use pinfold_core::domain::{Domain, Local, Mapping, Unrevoked};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) type Handle<'d> = Local<&'d Domain>;
pub(crate) type Revoked<'d> = pinfold_core::domain::Revoked<Buffer, &'d Domain>;

/// A mapping of any direction.
pub(crate) enum Held<'d> {
    Read(Mapping<Buffer, ToDevice, &'d Domain>),
    Write(Mapping<Buffer, FromDevice, &'d Domain>),
    Both(Mapping<Buffer, Bidirectional, &'d Domain>),
}

impl<'d> From<Held<'d>> for Unrevoked<Buffer, &'d Domain> {
    fn from(held: Held<'d>) -> Self {
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

/// What owners have handed to whichever takes it: mappings that no device may rely on any more, and
/// revoked ones.
#[derive(Default)]
pub(crate) struct Mail<'d> {
    mapped: Mutex<Vec<(Live, Held<'d>)>>,
    revoked: Mutex<Vec<(Live, Revoked<'d>)>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'d> Mail<'d> {
    /// The most of each kind that is handed on.
    const ROOM: usize = 8;

    /// Hands a mapping on, or returns it if there is no room.
    pub(crate) fn send(&self, mapping: (Live, Held<'d>)) -> Option<(Live, Held<'d>)> {
        let mut mapped = lock(&self.mapped);
        if mapped.len() == Self::ROOM {
            return Some(mapping);
        }
        mapped.push(mapping);
        None
    }

    /// Hands a revoked mapping on, or returns it if there is no room.
    pub(crate) fn send_revoked(&self, one: (Live, Revoked<'d>)) -> Option<(Live, Revoked<'d>)> {
        let mut revoked = lock(&self.revoked);
        if revoked.len() == Self::ROOM {
            return Some(one);
        }
        revoked.push(one);
        None
    }

    pub(crate) fn take(&self) -> Option<(Live, Held<'d>)> {
        lock(&self.mapped).pop()
    }

    pub(crate) fn take_revoked(&self) -> Option<(Live, Revoked<'d>)> {
        lock(&self.revoked).pop()
    }
}
