//! Shares that return in any order.

use super::*;
use core::sync::atomic::AtomicU32;
use std::sync::Arc;

/// Counts its drops.
struct Value(Arc<AtomicU32>);
impl Drop for Value {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn value() -> (Shared<Value>, Arc<AtomicU32>) {
    let drops = Arc::new(AtomicU32::new(0));
    (Shared::new(Value(Arc::clone(&drops))), drops)
}

#[test]
fn the_last_share_frees_the_value_whichever_it_is() {
    // 0: the front, 1: an owner, 2: what it issued, 3: a clone
    for last in 0..4 {
        let (front, drops) = value();
        let mut owner = front.stock();
        let issued = owner.issue();
        let clone = front.clone();
        let mut all: Vec<Box<dyn core::any::Any>> =
            vec![Box::new(front), Box::new(owner), Box::new(issued), Box::new(clone)];
        let kept = all.swap_remove(last);
        drop(all);
        assert_eq!(drops.load(Ordering::SeqCst), 0);
        drop(kept);
        assert_eq!(drops.load(Ordering::SeqCst), 1);
    }
}

#[test]
fn an_owner_takes_more_shares_when_it_has_issued_them() {
    let (front, drops) = value();
    let mut owner = front.stock();
    owner.shares = 3;
    // SAFETY: the stock gave up all of its shares but 3 by the line above.
    drop(unsafe { Shared::release(owner.value.0, Stock::<Value>::SHARES - 3) });
    let issue = |_| {
        let share = owner.issue();
        assert!(owner.shares > 0, "the owner itself always has one");
        share
    };
    let issued: Vec<_> = (0..5).map(issue).collect();
    assert_eq!(owner.shares, Stock::<Value>::SHARES - 2);
    drop((front, owner));
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    drop(issued);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

#[test]
fn what_is_split_from_a_stock_keeps_the_value_and_returns() {
    let (front, drops) = value();
    let mut owner = front.stock();
    let mut part = owner.split(3);
    let issued = part.issue();
    assert_eq!((owner.shares, part.shares), (Stock::<Value>::SHARES - 3, 2));
    owner.merge(part);
    owner.take_back(issued);
    assert_eq!(owner.shares, Stock::<Value>::SHARES);
    // More than there are, and what belongs to another value.
    let most = u32::try_from(Stock::<Value>::SHARES).unwrap();
    let part = owner.split(most);
    assert_eq!((owner.shares, part.shares), (u64::from(most), u64::from(most)));
    let (other, other_drops) = value();
    owner.merge(other.stock());
    drop((front, owner, other));
    assert_eq!((drops.load(Ordering::SeqCst), other_drops.load(Ordering::SeqCst)), (0, 1));
    drop(part);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

#[test]
fn what_is_lent_keeps_the_value_until_it_is_taken_back() {
    let (front, drops) = value();
    let (mut owner, mut other) = (front.stock(), front.stock());
    owner.lend(0);
    owner.lend(3);
    assert_eq!(owner.shares, Stock::<Value>::SHARES - 3);
    drop((front, owner));
    for _ in 0..3 {
        // SAFETY: one of the three that were lent by a stock of the same value.
        unsafe { other.take_back_lent() };
    }
    assert_eq!(other.shares, Stock::<Value>::SHARES + 3);
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    drop(other);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

#[test]
fn a_value_is_taken_out_after_a_stock_and_what_it_issued() {
    let (front, drops) = value();
    let mut owner = front.stock();
    let issued = owner.issue();
    drop(owner);
    drop(issued);
    let inner = front.into_inner().unwrap();
    assert_eq!(drops.load(Ordering::SeqCst), 0);
    drop(inner);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

#[test]
fn a_share_of_another_value_is_released_there() {
    let (front, drops) = value();
    let (other, other_drops) = value();
    let mut owner = front.stock();
    owner.take_back(other);
    assert_eq!((drops.load(Ordering::SeqCst), other_drops.load(Ordering::SeqCst)), (0, 1));
    assert_eq!(owner.shares, Stock::<Value>::SHARES);
}

#[test]
fn stress_shares_are_dropped_everywhere() {
    let (front, drops) = value();
    crate::testing::scope(|scope| {
        for _ in 0..4 {
            let mut owner = front.stock();
            scope.spawn(move || {
                let (mut kept, mut sent) = (Vec::new(), Vec::new());
                for round in 0..2_000 {
                    kept.push(owner.issue());
                    sent.push(owner.issue());
                    if round % 3 == 0 {
                        owner.take_back(kept.swap_remove(0));
                    }
                }
                drop(owner);
                drop((kept, sent));
            });
        }
        drop(front);
    });
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}
