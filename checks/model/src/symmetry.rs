//! Owners, windows, payloads and table pages are alike: a state in which two of a kind have changed
//! places has the same future. The exploration without a mistake keeps one state of those.

use crate::state::{Buffer, Entry, Flushes, Owner, Set, State, WINDOWS};

/// The kinds of which two are exchanged.
#[derive(Clone, Copy)]
struct Swap {
    owners: bool,
    windows: bool,
    buffers: bool,
    pages: bool,
}

fn number(number: u8, swap: bool) -> u8 {
    number ^ u8::from(swap)
}

/// Two members of a set change places.
fn set(set: Set, swap: bool) -> Set {
    if swap { (set & 1) << 1 | (set & 2) >> 1 } else { set }
}

fn flushes(flushes: Flushes, swap: bool) -> Flushes {
    let low = (1 << WINDOWS) - 1;
    set(flushes & low, swap) | set(flushes >> WINDOWS, swap) << WINDOWS
}

fn pair<T>(pair: &mut [T; 2], swap: bool) {
    if swap {
        pair.swap(0, 1);
    }
}

impl Swap {
    fn owner(self, owner: Owner) -> Owner {
        let b = |buffer| number(buffer, self.buffers);
        let w = |window| number(window, self.windows);
        match owner {
            Owner::Idle => Owner::Idle,
            Owner::Linked { buffer, at } => Owner::Linked { buffer: b(buffer), at: w(at) },
            Owner::RollingBack { buffer, at } => {
                Owner::RollingBack { buffer: b(buffer), at: w(at) }
            }
            Owner::Cleared { buffer, at, rollback } => {
                Owner::Cleared { buffer: b(buffer), at: w(at), rollback }
            }
            Owner::Retired { buffer, at, rollback } => {
                Owner::Retired { buffer: b(buffer), at: w(at), rollback }
            }
            Owner::Requested { buffer, at, rollback, early } => {
                Owner::Requested { buffer: b(buffer), at: w(at), rollback, early }
            }
            Owner::Unpinned { window } => Owner::Unpinned { window: w(window) },
        }
    }

    fn apply(self, state: &State) -> State {
        let mut next = state.clone();
        for owner in &mut next.owners {
            *owner = self.owner(*owner);
        }
        for buffer in &mut next.buffers {
            if let Buffer::Mapped { at } | Buffer::Revoked { at, .. } = buffer {
                *at = number(*at, self.windows);
            }
        }
        for buffer in next.addresses.iter_mut().flatten() {
            *buffer = number(*buffer, self.buffers);
        }
        for owner in next.pins.iter_mut().flatten() {
            *owner = number(*owner, self.owners);
        }
        for entry in &mut next.directory {
            if let Entry::Link(page) | Entry::Retired(page) = entry {
                *page = number(*page, self.pages);
            }
        }
        for buffer in next.pages.iter_mut().filter_map(|page| page.leaf.as_mut()) {
            *buffer = number(*buffer, self.buffers);
        }
        next.open = flushes(next.open, self.windows);
        for flight in next.flights.iter_mut().flatten() {
            flight.iotlb = flight.iotlb.map(|pending| flushes(pending, self.windows));
            flight.device = flushes(flight.device, self.windows);
        }
        for held in next.walker.as_flattened_mut() {
            *held = set(*held, self.pages);
        }
        for held in next.iotlb.as_flattened_mut().iter_mut().chain(&mut next.device) {
            *held = set(*held, self.buffers);
        }
        for unit in 0..next.walker.len() {
            pair(&mut next.walker[unit], self.windows);
            pair(&mut next.iotlb[unit], self.windows);
        }
        pair(&mut next.device, self.windows);
        pair(&mut next.addresses, self.windows);
        pair(&mut next.pins, self.windows);
        pair(&mut next.directory, self.windows);
        pair(&mut next.owners, self.owners);
        pair(&mut next.buffers, self.buffers);
        pair(&mut next.pages, self.pages);
        next
    }
}

/// The states that differ from `state` by such changes alone, itself included.
pub fn alike(state: &State) -> impl Iterator<Item = State> {
    let bit = |swaps: u8, bit: u8| swaps & (1 << bit) != 0;
    (0..16).map(move |swaps| {
        let swap = Swap {
            owners: bit(swaps, 0),
            windows: bit(swaps, 1),
            buffers: bit(swaps, 2),
            pages: bit(swaps, 3),
        };
        swap.apply(state)
    })
}

/// One of them, the same for all: of the payloads and of the pages the one that is used at the first
/// address is the first, and of what is left the least. (Payloads and pages that are used nowhere are
/// in no cache, so there is nothing to tell them apart.)
pub fn representative(state: &State) -> State {
    let page = |entry: &Entry| match *entry {
        Entry::Link(page) | Entry::Retired(page) => Some(page),
        Entry::Empty => None,
    };
    let ordered = |owners: bool, windows: bool| {
        let (mut addresses, mut directory) = (state.addresses, state.directory);
        pair(&mut addresses, windows);
        pair(&mut directory, windows);
        let buffers = addresses.iter().flatten().next() == Some(&1);
        let pages = directory.iter().find_map(page) == Some(1);
        Swap { owners, windows, buffers, pages }.apply(state)
    };
    let [a, b, c, d] =
        [(false, false), (true, false), (false, true), (true, true)].map(|(o, w)| ordered(o, w));
    a.min(b).min(c.min(d))
}
