//! An owner's windows in which nothing is live: which of them it gives up, and what it remembers of
//! those that it has closed.

use super::*;
use crate::domain::owner::{Anyone, Caller, Owner};
use crate::domain::window::WINDOW_BYTES;
use crate::domain::window::{Addresses, Origin};

fn is_in_window(addresses: &Addresses) -> bool {
    matches!(addresses.origin, Origin::Window(_))
}

/// Allocates `count` single pages.
fn pages(domain: &Domain, owner: &mut Owner, count: usize) -> Vec<Addresses> {
    (0..count).map(|_| owner.alloc(&domain.space, 4096, || 4096).unwrap()).collect()
}

/// Opens a window, returns its only mapping, and closes it.
fn open_and_close(domain: &Domain, owner: &mut Owner) {
    let one = pages(domain, owner, 1).remove(0);
    assert!(is_in_window(&one));
    owner.release(&domain.space, one);
    assert!(owner.give_up_idle(&domain.space));
}

/// What is free there counts as live as long as it may be handed out next.
#[test]
fn the_window_of_the_current_run_is_given_up_when_nothing_else_is_live_in_it() {
    let (_mock, domain, _) = domain();
    let mut owner = domain.space.register_owner();
    let one = pages(&domain, &mut owner, 1).remove(0);
    owner.release(&domain.space, one);
    assert_eq!(domain.stats().windows, 1);
    assert!(owner.give_up_idle(&domain.space));
    assert_eq!(domain.stats().windows, 0);
}

#[test]
fn a_window_that_others_have_emptied_is_given_up() {
    let (_mock, domain, _) = domain();
    let mut owner = domain.space.register_owner();
    let all = pages(&domain, &mut owner, 512 + 1);
    let mut all = all.into_iter();
    all.by_ref().take(512).for_each(|addresses| Anyone.release(&domain.space, addresses));
    assert_eq!(domain.stats().windows, 2);
    assert!(owner.give_up_idle(&domain.space));
    assert_eq!(domain.stats().windows, 1, "that of the last page");
    all.for_each(|addresses| owner.release(&domain.space, addresses));
}

/// A map that fails tries again only where something was given up.
#[test]
fn a_window_is_given_up_once() {
    let (_mock, domain, _) = domain();
    let mut owner = domain.space.register_owner();
    assert!(!owner.give_up_idle(&domain.space), "there is none");
    open_and_close(&domain, &mut owner);
    assert!(!owner.give_up_idle(&domain.space), "it is closed");
    let one = pages(&domain, &mut owner, 1).remove(0);
    assert!(!owner.give_up_idle(&domain.space), "it is in use");
    owner.release(&domain.space, one);
    assert!(owner.give_up_idle(&domain.space));
}

/// As many as an owner may hold at once, and more: it holds none of them.
#[test]
fn windows_that_were_closed_do_not_count_as_held() {
    let (_mock, domain, _) = domain();
    let mut owner = domain.space.register_owner();
    (0..200).for_each(|_| open_and_close(&domain, &mut owner));
    assert_eq!(domain.stats().windows, 0);
}

/// An owner of few windows looks for what others have returned before it opens another one, however
/// many it has closed.
#[test]
fn the_places_of_windows_that_were_closed_are_used_again() {
    let (_mock, domain, _) = domain();
    let mut owner = domain.space.register_owner();
    (0..32).for_each(|_| open_and_close(&domain, &mut owner));
    let mut first = pages(&domain, &mut owner, 512);
    let start = first[0].iova.start();
    let last = first.pop().unwrap();
    first.into_iter().for_each(|addresses| owner.release(&domain.space, addresses));
    let second = pages(&domain, &mut owner, 512);
    Anyone.release(&domain.space, last);
    let third = pages(&domain, &mut owner, 1);
    assert_eq!((third[0].iova.start(), domain.stats().windows), (start, 2), "recycled");
    second.into_iter().chain(third).for_each(|addresses| owner.release(&domain.space, addresses));
}

/// Their windows have the same place, each among those of its owner.
#[test]
fn what_an_owner_returns_for_another_one_does_not_become_free_in_its_own_window() {
    let (_mock, domain, _) = domain();
    let (mut first, mut second) = (domain.space.register_owner(), domain.space.register_owner());
    let sent = pages(&domain, &mut first, 1).remove(0);
    let mut own = pages(&domain, &mut second, 512).into_iter();
    let kept = own.next().unwrap();
    second.release(&domain.space, sent);
    own.for_each(|addresses| second.release(&domain.space, addresses));
    let next = pages(&domain, &mut second, 512);
    assert!(next.iter().all(|addresses| !addresses.iova.overlaps(&kept.iova)), "it is in use");
    assert!(first.give_up_idle(&domain.space), "it has returned to its owner");
    next.into_iter().chain([kept]).for_each(|addresses| second.release(&domain.space, addresses));
    domain.space.retire_owner(&mut first);
    domain.space.retire_owner(&mut second);
    assert_eq!((domain.stats().windows, domain.stats().quarantined), (0, 0));
}

/// Too little to be worth a look at every window, as long as the domain has others.
#[test]
fn what_others_return_is_used_where_the_space_is_exhausted() {
    let mock = Arc::new(Mock::default());
    let domain = Domain::new(Box::new(mock), IovaSpace::new(26).unwrap()); // 32 windows, without the first page
    let mut owner = domain.space.register_owner();
    let mut all = pages(&domain, &mut owner, 32 * 512 - 1);
    assert_eq!(domain.stats().windows * WINDOW_BYTES, 31 * WINDOW_BYTES);
    assert!(owner.alloc(&domain.space, 4096, || 4096).is_err());
    let returned = all.swap_remove(5 * 512 + 7);
    assert!(is_in_window(&returned));
    let at = returned.iova;
    Anyone.release(&domain.space, returned);
    assert_eq!(pages(&domain, &mut owner, 1)[0].iova, at);
    all.into_iter().for_each(|addresses| owner.release(&domain.space, addresses));
}

/// An owner that makes no calls keeps one window, that of its next map; the others are any owner's.
#[test]
fn idle_owners_leave_a_space_of_32_bits_to_others() {
    const MIB: u64 = 1 << 20;
    let domain = Domain::new(Box::new(Arc::new(Mock::default())), IovaSpace::new(32).unwrap());
    let mut owners: Vec<_> = (0..128).map(|_| domain.space.register_owner()).collect();
    for owner in &mut owners {
        let all: Vec<_> =
            (0..32).map(|_| owner.alloc(&domain.space, MIB, || 4096).unwrap()).collect();
        all.into_iter().for_each(|addresses| owner.release(&domain.space, addresses));
    }
    // Anyone, another owner, and one of them.
    let long = Anyone.alloc(&domain.space, 24 * MIB, || 2 * MIB).unwrap();
    let mut other = domain.space.register_owner();
    let more: Vec<_> =
        (0..2048).map(|_| other.alloc(&domain.space, MIB, || 4096).unwrap()).collect();
    let own = owners[0].alloc(&domain.space, 24 * MIB, || 2 * MIB).unwrap();
    for addresses in more.into_iter().chain([long, own]) {
        other.release(&domain.space, addresses);
    }
    owners.iter_mut().chain([&mut other]).for_each(|owner| domain.space.retire_owner(owner));
    assert_eq!((domain.stats().windows, domain.space.iovas.stats().bytes_in_use), (0, 0));
}

/// The whole space is the windows of one owner: it gives up that of its current run too.
#[test]
fn an_owner_does_not_stand_in_its_own_way() {
    let domain = Domain::new(Box::new(Arc::new(Mock::default())), IovaSpace::new(22).unwrap());
    let mut owner = domain.space.register_owner();
    let one = pages(&domain, &mut owner, 1).remove(0);
    owner.release(&domain.space, one);
    assert_eq!(domain.stats().windows, 1);
    let bytes = 3 << 20; // more than is left
    let memory = Buf::new(usize::try_from(bytes).unwrap() / PAGE, &Arc::default());
    let all = domain.space.map_fresh(&mut owner, memory.memory(), Access::READ, None);
    let (reachable, error) = all.expect_err("the backend maps no more than 8 pages");
    assert!(reachable.is_none() && matches!(error, BackendError::NotRegistered { .. }), "{error}");
    assert_eq!(domain.stats().windows, 0);
}
