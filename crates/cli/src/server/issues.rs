//! Requests that wait for room in the target's queue: the clients in turn, each with its share.

use super::operation::Issue;
use super::slab::Key;
use std::collections::{HashMap, VecDeque};

/// The requests of one client.
#[derive(Default)]
struct Client {
    waiting: VecDeque<Issue>,
    at_target: usize,
}

/// The requests of all clients that wait for the target, and how many each has there.
#[derive(Default)]
pub(super) struct Issues {
    clients: HashMap<Key, Client>,
    /// Those with waiting requests: the next one first.
    turns: VecDeque<Key>,
}

impl Issues {
    /// Appends a request of `client`.
    pub(super) fn push(&mut self, client: Key, issue: Issue) {
        let entry = self.clients.entry(client).or_default();
        if entry.waiting.is_empty() {
            self.turns.push_back(client);
        }
        entry.waiting.push_back(issue);
    }

    /// Takes the next request that may be issued while the target's queue has room for `free` more;
    /// it counts as at the target until [`note_returned`](Self::note_returned).
    ///
    /// A client may have as many there as the queue has room for: alone it gets half of the queue,
    /// with others an equal share, and there is room for one that comes later, however long the
    /// requests of the others take. Of clients that come one after the other, each gets half of
    /// what is left: eight whose requests do not complete fill a queue of 128.
    pub(super) fn pop(&mut self, free: usize) -> Option<(Key, Issue)> {
        for _ in 0..self.turns.len() {
            let client = self.turns.pop_front()?;
            let Some(entry) = self.clients.get_mut(&client) else { continue };
            if entry.at_target < free
                && let Some(issue) = entry.waiting.pop_front()
            {
                entry.at_target += 1;
                if !entry.waiting.is_empty() {
                    self.turns.push_back(client);
                }
                return Some((client, issue));
            }
            self.turns.push_back(client);
        }
        None
    }

    /// Notes that a request of `client` has left the target, or did not get there.
    pub(super) fn note_returned(&mut self, client: Key) {
        if let Some(entry) = self.clients.get_mut(&client) {
            entry.at_target = entry.at_target.saturating_sub(1);
            if entry.at_target == 0 && entry.waiting.is_empty() {
                self.clients.remove(&client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::slab::Slab;
    use super::*;
    use crate::targets::record::IoDirection;
    use pinfold::{Arena, Source};

    /// Four clients with more requests than the queue holds, none of which completes, and one that
    /// comes last.
    #[test]
    fn who_comes_last_finds_room_in_the_queue() {
        let arena = Arena::builder().size(4 << 20).source(Source::Plain).build_unmapped().unwrap();
        let mut keys = Slab::default();
        for (depth, hogs, alone) in [(1, 0, 1), (2, 1, 1), (8, 1, 4), (128, 1, 64), (128, 4, 26)] {
            let mut issues = Issues::default();
            let clients: Vec<_> = (0..=hogs).map(|_| keys.insert(())).collect();
            let push = |issues: &mut Issues, client| {
                let buffer = arena.alloc(4096).unwrap();
                issues.push(client, Issue::new(client, IoDirection::Read, 0, 512, buffer));
            };
            let (last, hogs) = clients.split_last().unwrap();
            for &hog in hogs {
                (0..depth).for_each(|_| push(&mut issues, hog));
            }
            let mut taken = 0;
            while let Some((client, _)) = issues.pop(depth - taken) {
                assert_eq!(client, hogs[taken % hogs.len()], "in turn");
                taken += 1;
            }
            assert!(hogs.is_empty() || taken.div_ceil(hogs.len()) == alone, "{taken} of {depth}");
            push(&mut issues, *last);
            assert!(issues.pop(depth - taken).is_some_and(|(client, _)| client == *last));
            taken += 1;
            (0..taken - 1).for_each(|number| issues.note_returned(hogs[number % hogs.len()]));
            issues.note_returned(*last);
            while issues.pop(depth).is_some() {}
        }
    }
}
