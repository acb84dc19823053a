//! Shares that are dropped by several threads.

use super::*;
use crate::sync::in_all_orders;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;

struct Value(Arc<AtomicU64>, crate::sync::UnsafeCell<u64>);
// SAFETY: the cell is written by each test's own protocol, which loom checks.
unsafe impl Send for Value {}
// SAFETY: as for `Send`.
unsafe impl Sync for Value {}
impl Drop for Value {
    fn drop(&mut self) {
        // Loom reports this write if a read by another share is not ordered before it.
        // SAFETY: the last share is gone.
        self.1.with_mut(|cell| unsafe { *cell = 1 });
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn read(value: &Value) -> u64 {
    // SAFETY: written in the drop only.
    value.1.with(|cell| unsafe { *cell })
}

fn model(check: impl Fn() + Sync + Send + 'static) {
    in_all_orders(|| loom::model(check));
}

/// An owner goes, what it issued is dropped by another thread, the front by a third: the value is
/// freed once, after all uses.
#[test]
fn loom_the_value_is_freed_once_after_all_uses() {
    model(|| {
        let drops = Arc::new(AtomicU64::new(0));
        let front = Shared::new(Value(Arc::clone(&drops), crate::sync::UnsafeCell::new(0)));
        let mut owner = front.stock();
        let issued = owner.issue();
        let user = thread::spawn(move || assert_eq!(read(&issued), 0));
        let owner = thread::spawn(move || {
            let share = owner.issue();
            assert_eq!(read(&share), 0);
            owner.take_back(share);
        });
        assert_eq!(read(&front), 0);
        drop(front);
        user.join().unwrap();
        owner.join().unwrap();
        assert_eq!(drops.load(Ordering::SeqCst), 1);
    });
}

/// The last share takes the value out after all uses by other shares: of a stock, and of what it
/// issued.
#[test]
fn loom_the_value_is_taken_out_after_all_other_uses() {
    model(|| {
        let drops = Arc::new(AtomicU64::new(0));
        let front = Shared::new(Value(Arc::clone(&drops), crate::sync::UnsafeCell::new(0)));
        let mut owner = front.stock();
        let issued = owner.issue();
        drop(owner);
        let user = thread::spawn(move || assert_eq!(read(&issued), 0));
        if let Some(value) = front.into_inner() {
            // SAFETY: taken out; loom reports it if the read above is not ordered before it.
            value.1.with_mut(|cell| unsafe { *cell = 0 });
        }
        user.join().unwrap();
        assert_eq!(drops.load(Ordering::SeqCst), 1);
    });
}
