//! The steps that a state allows, and their effects.

use crate::state::{
    Buffer, DOMAIN, Entry, FLIGHTS, Flight, Flushes, Owner, State, Ticket, UNITS, Use, WINDOWS,
    add, all_of, leaf_of, members,
};
use crate::{Action, Caches, Mistake, Protocol};

/// The numbers of `count` things.
fn numbers(count: usize) -> impl Iterator<Item = u8> {
    0..count as u8
}

impl Protocol {
    pub(crate) fn units(&self) -> usize {
        if self.caches == Caches::TwoUnits { UNITS } else { 1 }
    }

    /// Appends every step that is possible in `state`.
    pub(crate) fn steps(&self, state: &State, actions: &mut Vec<Action>) {
        for (owner, number) in state.owners.iter().zip(0..) {
            self.steps_of(state, number, owner, actions);
        }
        self.steps_of_polls(state, actions);
        self.steps_of_units(state, actions);
    }

    fn steps_of(&self, state: &State, number: u8, owner: &Owner, actions: &mut Vec<Action>) {
        match *owner {
            Owner::Idle => {
                for (buffer, at) in
                    numbers(state.buffers.len()).flat_map(|b| numbers(WINDOWS).map(move |a| (b, a)))
                {
                    let mine = state.pins[usize::from(at)].is_none_or(|pin| pin == number);
                    let free = state.addresses[usize::from(at)].is_none();
                    let page = self.page_for(state, at).is_some();
                    if state.buffers[usize::from(buffer)] == Buffer::Program && mine && free && page
                    {
                        actions.push(Action::Map { owner: number, buffer, at });
                    }
                }
                for (value, buffer) in state.buffers.iter().zip(0..) {
                    if matches!(value, Buffer::Mapped { .. }) {
                        actions.push(self.revoke(number, buffer));
                    }
                }
                for window in numbers(WINDOWS) {
                    let (pin, free) = (
                        state.pins[usize::from(window)],
                        state.addresses[usize::from(window)].is_none(),
                    );
                    if free && pin.is_none() && self.page_for(state, window).is_some() {
                        actions.push(Action::Pin { owner: number, window });
                    }
                    if free && pin == Some(number) {
                        actions.push(Action::Unpin { owner: number, window });
                    }
                }
            }
            Owner::Linked { .. } => {
                actions.push(Action::Leaf { owner: number });
                // Otherwise the same as to return and to revoke at once.
                if self.makes(Mistake::RollbackNotAwaited) {
                    actions.push(Action::RollBack { owner: number });
                }
            }
            Owner::RollingBack { buffer, .. } => actions.push(self.revoke(number, buffer)),
            Owner::Cleared { buffer, at, .. } => actions.push(match state.pins[usize::from(at)] {
                None => Action::Retire { owner: number },
                Some(_) => Action::Request { owner: number, buffer },
            }),
            Owner::Retired { buffer, .. } => {
                actions.push(Action::Request { owner: number, buffer });
            }
            Owner::Requested { buffer, .. } if self.makes(Mistake::FlushBeforeClear) => {
                actions.push(Action::Clear { owner: number, buffer });
            }
            Owner::Requested { .. } | Owner::Unpinned { .. } => {
                actions.push(Action::FlushRetired { owner: number });
            }
        }
    }

    /// The first step of a revocation.
    fn revoke(&self, owner: u8, buffer: u8) -> Action {
        if self.makes(Mistake::FlushBeforeClear) {
            Action::Request { owner, buffer }
        } else {
            Action::Clear { owner, buffer }
        }
    }

    /// Appends the actions of any thread that polls.
    fn steps_of_polls(&self, state: &State, actions: &mut Vec<Action>) {
        let in_flight = state.in_flight();
        let last = in_flight.checked_sub(1).and_then(|last| state.flights[last]);
        let taken = last.is_some_and(|last| !last.submitted);
        if state.open != 0 && in_flight < FLIGHTS && !taken {
            actions.push(Action::TakeBatch);
        }
        if taken && !state.aborted {
            actions.push(Action::Submit);
        }
        if state.aborted {
            actions.push(Action::Recover);
        } else if state.flights[0].is_some_and(|first| first.submitted && self.has_ended(&first)) {
            actions.push(Action::Publish);
        }
        for (value, buffer) in state.buffers.iter().zip(0..) {
            if let Buffer::Revoked { ticket, late, rollback, .. } = *value {
                let early = self.makes(Mistake::BufferEarly)
                    || rollback && self.makes(Mistake::RollbackNotAwaited)
                    || late && self.makes(Mistake::TimeoutIsCompletion);
                if (ticket == Ticket::Completed || early) && late {
                    actions.push(Action::ReleaseLate { buffer });
                } else if ticket == Ticket::Completed || early {
                    actions.push(Action::Poll { buffer });
                }
                // Who holds it changes nothing for a device: once is enough.
                let told = self.caches == Caches::DeviceTlb;
                if told && ticket != Ticket::Completed && !late {
                    actions.push(Action::TimeOut { buffer });
                }
            }
        }
        for (value, page) in state.pages.iter().zip(0..) {
            if let Use::Deferred(ticket) = value.used
                && (ticket == Ticket::Completed || self.makes(Mistake::TablePageEarly))
            {
                actions.push(Action::Reclaim { page });
            }
        }
    }

    fn steps_of_units(&self, state: &State, actions: &mut Vec<Action>) {
        let submitted = |flight: &&Flight| flight.submitted && !state.aborted;
        for (number, flight) in numbers(FLIGHTS).zip(&state.flights) {
            let Some(flight) = flight.as_ref().filter(submitted) else { continue };
            let device_first = self.makes(Mistake::DeviceTlbFirst);
            for unit in numbers(self.units()) {
                // Behind a fence, each waits for the other kind.
                if device_first && flight.device != 0 {
                    continue;
                }
                // With two units, each carries out a batch at once: with one, all orders are seen.
                let pending = members(flight.iotlb[usize::from(unit)]);
                let steps = if self.caches == Caches::TwoUnits { 1 } else { usize::MAX };
                let flush = |bit| Action::Flush { unit, flight: number, bit };
                actions.extend(pending.map(flush).take(steps));
            }
            if device_first || flight.iotlb == [0; UNITS] {
                let pending = members(flight.device);
                actions.extend(pending.map(|bit| Action::FlushDevice { flight: number, bit }));
            }
        }
        if state.flights[0].is_some_and(|first| first.submitted) && !state.aborted {
            actions.push(Action::Abort);
        }
    }

    /// Whether the queue reports that a batch has completed.
    fn has_ended(&self, flight: &Flight) -> bool {
        let units = if self.makes(Mistake::FirstUnitOnly) { 1 } else { UNITS };
        flight.iotlb[..units].iter().all(|pending| *pending == 0) && flight.device == 0
    }

    /// The table page that a map below `window` uses: the one that is linked or was retired there,
    /// else the first that is free.
    fn page_for(&self, state: &State, window: u8) -> Option<u8> {
        match state.directory[usize::from(window)] {
            Entry::Link(page) | Entry::Retired(page) => Some(page),
            Entry::Empty => numbers(state.pages.len())
                .find(|page| state.pages[usize::from(*page)].used == Use::Free),
        }
    }

    /// Makes the step.
    pub(crate) fn step(&self, state: &mut State, action: Action) {
        match action {
            Action::Map { owner, buffer, at } => {
                state.buffers[usize::from(buffer)] = Buffer::Held;
                state.addresses[usize::from(at)] = Some(buffer);
                self.link(state, at);
                state.owners[usize::from(owner)] = Owner::Linked { buffer, at };
            }
            Action::Leaf { owner } | Action::RollBack { owner } => {
                let Owner::Linked { buffer, at } = state.owners[usize::from(owner)] else { return };
                self.write_leaf(state, at, Some(buffer));
                // Remembered where it makes a difference.
                let rollback = action == Action::RollBack { owner };
                state.owners[usize::from(owner)] = if rollback {
                    Owner::RollingBack { buffer, at }
                } else {
                    state.buffers[usize::from(buffer)] = Buffer::Mapped { at };
                    Owner::Idle
                };
            }
            Action::Clear { owner, buffer } => self.clear(state, owner, buffer),
            Action::Retire { owner } => {
                let Owner::Cleared { buffer, at, rollback } = state.owners[usize::from(owner)]
                else {
                    return;
                };
                self.retire(state, at);
                state.owners[usize::from(owner)] = Owner::Retired { buffer, at, rollback };
            }
            Action::Request { owner, buffer } => self.request(state, owner, buffer),
            Action::FlushRetired { owner } => self.flush_retired(state, owner),
            Action::Pin { owner, window } => {
                self.link(state, window);
                state.pins[usize::from(window)] = Some(owner);
            }
            Action::Unpin { owner, window } => {
                state.pins[usize::from(window)] = None;
                self.retire(state, window);
                state.owners[usize::from(owner)] = Owner::Unpinned { window };
            }
            Action::TakeBatch => {
                let number = state.in_flight();
                let (none, some) = (self.makes(Mistake::NoFlush), state.open);
                let flushes = if none { 0 } else { some };
                state.flights[number] = Some(self.batch(flushes, false));
                state.open = 0;
                let taken = Ticket::Flight(number as u8);
                state.renumber(|ticket| if ticket == Ticket::Open { taken } else { ticket });
            }
            Action::Submit => {
                let last = state.in_flight() - 1;
                if let Some(flight) = &mut state.flights[last] {
                    flight.submitted = true;
                }
            }
            Action::Publish => {
                state.flights.rotate_left(1);
                state.flights[FLIGHTS - 1] = None;
                state.renumber(|ticket| match ticket {
                    Ticket::Flight(0) => Ticket::Completed,
                    Ticket::Flight(number) => Ticket::Flight(number - 1),
                    other => other,
                });
            }
            Action::Abort if self.makes(Mistake::AbortIsCompletion) => {
                for flight in state.flights.iter_mut().flatten().filter(|flight| flight.submitted) {
                    *flight = Flight { submitted: true, ..Flight::default() };
                }
            }
            Action::Abort => state.aborted = true,
            Action::Recover => self.recover(state),
            Action::Poll { buffer } | Action::ReleaseLate { buffer } => {
                let Buffer::Revoked { at, .. } = state.buffers[usize::from(buffer)] else { return };
                // Released already where that is the mistake.
                let address = &mut state.addresses[usize::from(at)];
                if *address == Some(buffer) {
                    *address = None;
                }
                state.buffers[usize::from(buffer)] = Buffer::Program;
            }
            Action::TimeOut { buffer } => {
                if let Buffer::Revoked { late, .. } = &mut state.buffers[usize::from(buffer)] {
                    *late = true;
                }
            }
            Action::Reclaim { page } => self.reclaim(state, page),
            Action::Flush { unit, flight, bit } => {
                let (unit, flight) = (usize::from(unit), usize::from(flight));
                let Some(flight) = &mut state.flights[flight] else { return };
                let whole = self.caches == Caches::TwoUnits;
                let now = if whole { flight.iotlb[unit] } else { 1 << bit };
                flight.iotlb[unit] &= !now;
                for bit in members(now).map(usize::from) {
                    state.iotlb[unit][bit % WINDOWS] = 0;
                    if bit >= WINDOWS {
                        state.walker[unit][bit % WINDOWS] = 0;
                    }
                }
            }
            Action::FlushDevice { flight, bit } => {
                if let Some(flight) = &mut state.flights[usize::from(flight)] {
                    flight.device &= !(1 << bit);
                }
                state.device[usize::from(bit) % WINDOWS] = 0;
            }
        }
    }

    /// A batch that requests `flushes` of every cache.
    fn batch(&self, flushes: Flushes, submitted: bool) -> Flight {
        let second = if self.caches == Caches::TwoUnits { flushes } else { 0 };
        // A device's TLB has no links: its flushes name addresses.
        let addresses = (flushes | flushes >> WINDOWS) & ((1 << WINDOWS) - 1);
        let device = if self.caches == Caches::DeviceTlb { addresses } else { 0 };
        Flight { submitted, iotlb: [flushes, second], device }
    }

    fn link(&self, state: &mut State, window: u8) {
        let Some(page) = self.page_for(state, window) else { return };
        state.pages[usize::from(page)].used = Use::Linked;
        state.directory[usize::from(window)] = Entry::Link(page);
    }

    fn write_leaf(&self, state: &mut State, at: u8, leaf: Option<u8>) {
        if let Entry::Link(page) = state.directory[usize::from(at)] {
            state.pages[usize::from(page)].leaf = leaf;
        }
    }

    fn retire(&self, state: &mut State, window: u8) {
        let Entry::Link(page) = state.directory[usize::from(window)] else { return };
        let early = self.makes(Mistake::TablePageEarlyAt);
        state.pages[usize::from(page)].used = if early { Use::Free } else { Use::Retired };
        state.directory[usize::from(window)] =
            if early { Entry::Empty } else { Entry::Retired(page) };
    }

    /// Takes a buffer to revoke it, and returns the window where it is mapped, and whether this is
    /// a rollback.
    fn take(&self, state: &mut State, owner: u8, buffer: u8) -> Option<(u8, bool)> {
        let taken = match (state.owners[usize::from(owner)], state.buffers[usize::from(buffer)]) {
            // Remembered where it makes a difference.
            (Owner::RollingBack { at, .. }, _) => (at, self.makes(Mistake::RollbackNotAwaited)),
            (Owner::Idle, Buffer::Mapped { at }) => (at, false),
            _ => return None,
        };
        state.buffers[usize::from(buffer)] = Buffer::Held;
        Some(taken)
    }

    fn clear(&self, state: &mut State, owner: u8, buffer: u8) {
        let number = usize::from(owner);
        if let Owner::Requested { buffer, at, rollback, early: Some(ticket) } = state.owners[number]
        {
            self.write_leaf(state, at, None);
            if state.pins[usize::from(at)].is_none() {
                self.retire(state, at);
                self.defer(state, at, ticket);
            }
            self.end_revocation(state, buffer, at, rollback, ticket);
            state.owners[number] = Owner::Idle;
        } else if let Some((at, rollback)) = self.take(state, owner, buffer) {
            self.write_leaf(state, at, None);
            state.owners[number] = Owner::Cleared { buffer, at, rollback };
        }
    }

    fn request(&self, state: &mut State, owner: u8, buffer: u8) {
        let number = usize::from(owner);
        let ticket = Ticket::Open;
        match state.owners[number] {
            Owner::Cleared { buffer, at, rollback } => {
                add(&mut state.open, leaf_of(at));
                self.end_revocation(state, buffer, at, rollback, ticket);
                state.owners[number] = Owner::Idle;
            }
            Owner::Retired { buffer, at, rollback } => {
                add(&mut state.open, leaf_of(at));
                state.owners[number] = Owner::Requested { buffer, at, rollback, early: None };
            }
            _ => {
                let Some((at, rollback)) = self.take(state, owner, buffer) else { return };
                add(&mut state.open, all_of(at));
                let early = Some(ticket);
                state.owners[number] = Owner::Requested { buffer, at, rollback, early };
            }
        }
    }

    fn flush_retired(&self, state: &mut State, owner: u8) {
        let owner = usize::from(owner);
        let window = match state.owners[owner] {
            Owner::Requested { buffer, at, rollback, .. } => {
                self.end_revocation(state, buffer, at, rollback, Ticket::Open);
                at
            }
            Owner::Unpinned { window } => window,
            _ => return,
        };
        let leaf_only = self.makes(Mistake::LeafFlushForTablePage);
        add(&mut state.open, if leaf_only { leaf_of(window) } else { all_of(window) });
        self.defer(state, window, Ticket::Open);
        state.owners[owner] = Owner::Idle;
    }

    /// Lets the page that was retired from `window` wait for `ticket`, unless it was brought back.
    fn defer(&self, state: &mut State, window: u8, ticket: Ticket) {
        if let Entry::Retired(page) = state.directory[usize::from(window)] {
            state.pages[usize::from(page)].used = Use::Deferred(ticket);
        }
    }

    fn end_revocation(
        &self,
        state: &mut State,
        buffer: u8,
        at: u8,
        rollback: bool,
        ticket: Ticket,
    ) {
        let pinned = state.pins[usize::from(at)].is_some();
        let early = if pinned { Mistake::WindowEarly } else { Mistake::IovaEarly };
        if self.makes(early) {
            state.addresses[usize::from(at)] = None;
        }
        state.buffers[usize::from(buffer)] = Buffer::Revoked { at, ticket, late: false, rollback };
    }

    /// Replaces what was in flight by a flush of the domain, with the last ticket. A batch that was
    /// taken out and not submitted stays behind it.
    fn recover(&self, state: &mut State) {
        state.aborted = false;
        let submitted = state.flights.iter().flatten().filter(|flight| flight.submitted).count();
        let taken = state.flights.into_iter().flatten().find(|flight| !flight.submitted);
        state.flights = [Some(self.batch(DOMAIN, true)), taken];
        state.renumber(|ticket| match ticket {
            Ticket::Flight(number) if usize::from(number) < submitted => Ticket::Flight(0),
            Ticket::Flight(_) => Ticket::Flight(1),
            other => other,
        });
    }

    fn reclaim(&self, state: &mut State, page: u8) {
        let home = state.directory.iter_mut().find(|entry| **entry == Entry::Retired(page));
        if let Some(home) = home {
            *home = Entry::Empty;
        }
        state.pages[usize::from(page)].used = Use::Free;
    }
}
