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

type Task<'t, T> = (Pin<Box<dyn Future<Output = T> + 't>>, Arc<Woken>);

fn task<'t, T>(future: impl Future<Output = T> + 't) -> Task<'t, T> {
    (Box::pin(future), Arc::default())
}

/// Polls a task once.
fn poll<T>((future, woken): &mut Task<'_, T>) -> Poll<T> {
    let waker = Waker::from(Arc::clone(woken));
    future.as_mut().poll(&mut Context::from_waker(&waker))
}

fn woken<T>((_, woken): &Task<'_, T>) -> usize {
    woken.0.load(Ordering::SeqCst)
}

/// A task is polled at first, and then once for each time that it is woken.
#[test]
fn a_task_is_woken_when_its_flush_completes_and_not_before() {
    let (mock, domain, drops) = domain();
    let revoke = |pages| domain.map(Buf::new(pages, &drops), Bidirectional).unwrap().revoke();
    let (first, second) = (revoke(1), revoke(2));
    let tickets = [first.ticket(), second.ticket()];
    let bytes = async |revoked: Revoked<Buf>| -> Result<usize, BackendError> {
        let buf = revoked.await?;
        Ok(buf.memory().len())
    };
    let (mut first, mut second) = (task(bytes(first)), task(bytes(second)));
    assert!(poll(&mut first).is_pending() && poll(&mut second).is_pending());
    assert_eq!((woken(&first), woken(&second)), (0, 0));
    complete(&mock, tickets[0]);
    assert_eq!((woken(&first), woken(&second)), (1, 0));
    assert_eq!(poll(&mut first), Poll::Ready(Ok(4096)));
    complete(&mock, tickets[1]);
    assert_eq!((woken(&first), woken(&second)), (1, 1));
    assert_eq!(poll(&mut second), Poll::Ready(Ok(8192)));
    assert_eq!(
        (mock.waits.load(Ordering::SeqCst), domain.stats().unmaps),
        (0, 2),
        "nothing blocks"
    );
}

/// The flush completes while its task registers.
#[test]
fn a_flush_that_completes_beside_a_poll_is_found() {
    let (mock, domain, drops) = domain();
    let revoked = domain.map(Buf::new(1, &drops), Bidirectional).unwrap().revoke();
    set(&mock.completes_at_wake);
    let mut task = task(revoked.quiesced());
    assert!(poll(&mut task).is_ready());
}

/// The clock of the flush does not advance while the future is dropped.
#[test]
fn a_dropped_future_leaves_its_buffer_with_the_domain() {
    let (mock, domain, drops) = domain();
    let revoked = domain.map(Buf::new(1, &drops), Bidirectional).unwrap().revoke();
    let (ticket, iova) = (revoked.ticket(), revoked.iova());
    let mut dropped = task(revoked.quiesced());
    assert!(poll(&mut dropped).is_pending());
    drop(dropped);
    let stats = domain.stats();
    assert_eq!((stats.deferred, stats.quarantined, drops.load(Ordering::SeqCst)), (1, 0, 0));
    assert_eq!(mock.waits.load(Ordering::SeqCst), 0, "it does not wait");
    let other = domain.map(Buf::new(1, &drops), Bidirectional).unwrap();
    assert!(!other.iova().overlaps(&iova), "its addresses are held");
    complete(&mock, ticket);
    assert_eq!((domain.release_late(), drops.load(Ordering::SeqCst)), (0, 1));
    set(&mock.obliging);
}

#[test]
fn a_dropped_future_of_a_quiesced_buffer_drops_it() {
    let (mock, domain, drops) = domain();
    let revoked = domain.map(Buf::new(1, &drops), Bidirectional).unwrap().revoke();
    complete(&mock, revoked.ticket());
    drop(revoked.quiesced());
    let stats = domain.stats();
    assert_eq!((stats.deferred, stats.live, drops.load(Ordering::SeqCst)), (0, 0, 1));
    assert_eq!(mock.waits.load(Ordering::SeqCst), 0);
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
    let ended = poll(&mut task(revoked.quiesced()));
    assert!(matches!(
        ended,
        Poll::Ready(Err(NotQuiesced { revoked: None, error: BackendError::NotRevoked }))
    ));
}

/// A future that has found its flush late gives the buffer back once; the next one waits for the
/// flush, is woken by it, and by nothing else.
#[test]
fn a_late_buffer_is_awaited_until_its_flush_completes() {
    let (mock, domain, drops) = domain();
    let late = domain.map(Buf::new(1, &drops), Bidirectional).unwrap().revoke().wait();
    let late = late.unwrap_err().revoked.expect("it is late");
    set(&mock.overdue);
    assert!(late.check().is_ready(), "a wait would end at once");
    let ticket = late.ticket();
    let mut again = task(late.quiesced());
    for _ in 0..3 {
        assert!(poll(&mut again).is_pending());
    }
    assert_eq!((woken(&again), mock.until.load(Ordering::SeqCst)), (0, 2));
    complete(&mock, ticket);
    assert_eq!(woken(&again), 3, "once for each poll: the mock keeps all");
    let Poll::Ready(Ok(buf)) = poll(&mut again) else { panic!("its flush has completed") };
    drop(buf);
    assert_eq!((domain.stats().deferred, drops.load(Ordering::SeqCst)), (0, 1));
}

/// The same of a future whose deadline passes while it waits: it resolves, and its buffer can be
/// awaited; and of one that can never complete.
#[test]
fn a_future_resolves_at_its_deadline_and_its_buffer_is_awaited() {
    let (mock, domain, drops) = domain();
    let mut first =
        task(domain.map(Buf::new(1, &drops), Bidirectional).unwrap().revoke().quiesced());
    assert!(poll(&mut first).is_pending());
    assert_eq!(mock.until.load(Ordering::SeqCst), 1);
    set(&mock.overdue);
    let Poll::Ready(Err(NotQuiesced { revoked: Some(late), .. })) = poll(&mut first) else {
        panic!("its deadline has passed")
    };
    let mut again = task(late.quiesced());
    assert!(poll(&mut again).is_pending());
    set(&mock.failed);
    let ended = poll(&mut again);
    assert!(matches!(ended, Poll::Ready(Err(NotQuiesced { revoked: None, .. }))));
    assert_eq!(domain.stats().quarantined, 1);
}
