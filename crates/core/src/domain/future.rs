//! Waiting for a revocation in an `async` function.

use super::owner::Anyone;
use super::payload::Pinned;
use super::revoked::{NotQuiesced, Revoked};
use core::fmt;
use core::future::{Future, IntoFuture};
use core::pin::Pin;
use core::task::{Context, Poll};

/// The future of a [`Revoked`]: resolves to the buffer when no device can reach it, or to the error
/// that [`Revoked::wait`] would return.
///
/// It needs no particular executor, and does not keep one busy: between polls it waits for the
/// backend to [wake](super::Backend::wake) it when the flush has completed or its deadline has
/// passed. Dropping it early never waits: the domain holds the buffer until its flush has
/// completed, as after a late flush ([`Domain::release_late`](super::Domain::release_late)).
#[must_use = "the buffer is held until its ticket has completed: await it"]
pub struct Quiesced<P: Pinned>(Option<Revoked<P>>);

/// Nothing in it is pinned in place.
impl<P: Pinned> Unpin for Quiesced<P> {}

impl<P: Pinned> Revoked<P> {
    /// Returns the future of the buffer: what `revoked.await` polls, for `block_on`, `select!` and
    /// the like, which take a `Future` and not an `IntoFuture`.
    pub fn quiesced(self) -> Quiesced<P> {
        Quiesced(Some(self))
    }
}

impl<P: Pinned> IntoFuture for Revoked<P> {
    type Output = Result<P, NotQuiesced<P>>;
    type IntoFuture = Quiesced<P>;

    fn into_future(self) -> Quiesced<P> {
        self.quiesced()
    }
}

impl<P: Pinned> Future for Quiesced<P> {
    type Output = Result<P, NotQuiesced<P>>;

    /// After completion it stays pending.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(revoked) = &self.0 else { return Poll::Pending };
        let mut checked = revoked.check();
        if checked.is_pending() {
            revoked.wake(context.waker());
            // It may have completed before the waker was registered.
            checked = revoked.check();
        }
        let Poll::Ready(result) = checked else { return Poll::Pending };
        let Some(revoked) = self.0.take() else { return Poll::Pending };
        let ended = revoked.quiesce_by(&mut Anyone, |_, _| result);
        Poll::Ready(ended.map(|(payload, _)| payload))
    }
}

impl<P: Pinned> Drop for Quiesced<P> {
    fn drop(&mut self) {
        if let Some(revoked) = self.0.take() {
            revoked.abandon();
        }
    }
}

impl<P: Pinned> fmt::Debug for Quiesced<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Quiesced").field(&self.0).finish()
    }
}
