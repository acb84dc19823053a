use super::*;
use core::future::Future;
use core::pin::{Pin, pin};
use core::task::{Context, Poll, Waker};
use std::task::Wake;

/// Counts how often its task was woken.
#[derive(Default)]
struct Woken(AtomicUsize);
impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Polls all futures in turn until each is ready; `idle` runs after each round.
fn run_all<T>(
    mut futures: Vec<Pin<Box<dyn Future<Output = T> + '_>>>,
    mut idle: impl FnMut(),
) -> Vec<T> {
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    let mut results = Vec::new();
    while !futures.is_empty() {
        let before = woken.0.load(Ordering::SeqCst);
        let mut pending = 0;
        futures.retain_mut(|future| match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(result) => {
                results.push(result);
                false
            }
            Poll::Pending => {
                pending += 1;
                true
            }
        });
        assert_eq!(
            woken.0.load(Ordering::SeqCst) - before,
            pending,
            "what is pending has woken its task"
        );
        idle();
    }
    results
}

#[test]
fn two_revocations_are_awaited_beside_each_other() {
    let (mock, domain, drops) = domain();
    let revoke = |pages| domain.map(Buf::new(pages, &drops), Bidirectional).unwrap().revoke();
    let (first, second) = (revoke(1), revoke(2));
    let task = async |revoked: Revoked<Buf, &Domain>| -> Result<usize, BackendError> {
        let buf = revoked.await?;
        Ok(buf.memory().len())
    };
    let mut rounds = 0;
    let lens = run_all(vec![Box::pin(task(second)), Box::pin(task(first))], || {
        rounds += 1;
        complete(&mock, Ticket(rounds / 2));
    });
    assert_eq!(lens, [Ok(4096), Ok(8192)], "in the order of their tickets");
    assert_eq!(
        (rounds, mock.waits.load(Ordering::SeqCst), domain.stats().unmaps),
        (5, 0, 2),
        "nothing blocks"
    );
}

#[test]
fn a_future_ends_with_the_error_of_a_wait() {
    let (mock, domain, drops) = domain();
    let revoked = domain.map(Buf::new(1, &drops), Bidirectional).unwrap().revoke();
    set(&mock.failed);
    let mut future = pin!(revoked.quiesced());
    let waker = Waker::noop();
    let mut poll = || future.as_mut().poll(&mut Context::from_waker(waker));
    let Poll::Ready(Err(failed)) = poll() else { panic!("the unit has failed") };
    assert!(
        failed.revoked.is_none()
            && matches!(failed.error, BackendError::Flush(WaitError::UnitFailed { .. }))
    );
    assert!(poll().is_pending(), "after completion");
    assert_eq!((domain.stats().quarantined, drops.load(Ordering::SeqCst)), (1, 0));
}

#[test]
fn a_future_of_what_cannot_be_revoked_ends() {
    let (mock, domain, drops) = domain();
    set(&mock.refuse_revoke);
    let revoked = domain.map(Buf::new(1, &drops), Bidirectional).unwrap().revoke();
    let results = run_all(vec![Box::pin(revoked.quiesced())], || ());
    assert!(matches!(
        results[..],
        [Err(NotQuiesced { revoked: None, error: BackendError::NotRevoked })]
    ));
}
