//! Free extents in order of address, balanced, each subtree knowing its largest gap.
//!
//! An AVL tree over a slab: a node is an index, so that nothing is allocated when an extent is put in as long as
//! the slab has a spare node, and [`Slab::grow`] called in time prevents running out. Each subtree keeps
//! the largest length that fits in one of its extents at each of three alignments (the page sizes); the *first*
//! extent that fits is found on one way down. Because it is the first, a limit on the address needs no further
//! search: if the first does not end in time, none does.
//!
//! Adelson-Velsky and Landis, "An algorithm for the organization of information", 1962.

use alloc::collections::TryReserveError;
use alloc::vec::Vec;

/// The alignments, in granules, for which each subtree knows its largest gap: 4 KiB, 2 MiB, 1 GiB.
pub(super) const ALIGNS: [u64; 3] = [1, 1 << 9, 1 << 18];

/// The index that means "no node".
pub(super) const NIL: u32 = u32::MAX;

/// A run of granules, `start..end`, not empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Extent {
    pub(super) start: u64,
    pub(super) end: u64,
}

impl Extent {
    /// How many granules are left from the first multiple of `align`.
    fn room(self, align: u64) -> u64 {
        self.end.saturating_sub(self.start.next_multiple_of(align))
    }
}

#[derive(Clone, Copy, Debug)]
struct Node {
    extent: Extent,
    /// The largest room in this node's subtree at each of `ALIGNS`.
    best: [u64; 3],
    left: u32,
    right: u32,
    height: u8,
}

/// The nodes of all trees of a space, and the spare ones (a list threaded through `left`).
#[derive(Debug)]
pub(super) struct Slab {
    nodes: Vec<Node>,
    spare: u32,
    spares: usize,
    /// How many nodes have been visited in searches for a fit; what proves that they are not linear.
    #[cfg(test)]
    pub(super) visits: u64,
}

impl Slab {
    pub(super) fn new() -> Self {
        Self {
            nodes: Vec::new(),
            spare: NIL,
            spares: 0,
            #[cfg(test)]
            visits: 0,
        }
    }

    /// How many extents all trees of the slab hold.
    pub(super) fn used(&self) -> usize {
        self.nodes.len() - self.spares
    }

    /// How many extents can be put in before the slab must grow.
    pub(super) fn spares(&self) -> usize {
        self.spares
    }

    /// Makes the slab hold at least `extents` extents. Amortized O(1) for each.
    pub(super) fn grow(&mut self, extents: usize) -> Result<(), TryReserveError> {
        let Some(more) = extents.checked_sub(self.nodes.len()) else { return Ok(()) };
        // Clamped to `u32`: the space has 2^45 granules at most, but that many nodes never fit.
        self.nodes.try_reserve(more)?;
        for _ in 0..more {
            let Ok(new) = u32::try_from(self.nodes.len()) else { break };
            self.nodes.push(Node {
                extent: Extent { start: 0, end: 0 },
                best: [0; 3],
                left: self.spare,
                right: NIL,
                height: 1,
            });
            self.spare = new;
            self.spares += 1;
        }
        Ok(())
    }

    // Every index below is one that this slab made, and the slab never shrinks.
    fn node(&self, at: u32) -> &Node {
        &self.nodes[at as usize]
    }

    fn node_mut(&mut self, at: u32) -> &mut Node {
        &mut self.nodes[at as usize]
    }

    /// The first extent that has `len` granules from a multiple of `ALIGNS[class]`. O(log n).
    pub(super) fn first_fit(&mut self, root: u32, class: usize, len: u64) -> Option<Extent> {
        let mut at = root;
        if self.best(at)[class] < len {
            return None;
        }
        loop {
            #[cfg(test)]
            {
                self.visits += 1;
            }
            let node = self.node(at);
            if self.best(node.left)[class] >= len {
                at = node.left;
            } else if node.extent.room(ALIGNS[class]) >= len {
                return Some(node.extent);
            } else {
                at = node.right;
            }
        }
    }

    /// The largest room in a tree at each of `ALIGNS`.
    pub(super) fn best(&self, root: u32) -> [u64; 3] {
        if root == NIL { [0; 3] } else { self.node(root).best }
    }

    /// The last extent that starts at or before `granule`. O(log n).
    pub(super) fn at_or_before(&self, root: u32, granule: u64) -> Option<Extent> {
        let (mut at, mut found) = (root, None);
        while at != NIL {
            let node = self.node(at);
            if node.extent.start <= granule {
                found = Some(node.extent);
                at = node.right;
            } else {
                at = node.left;
            }
        }
        found
    }

    /// The first extent that starts at or after `granule`. O(log n).
    pub(super) fn at_or_after(&self, root: u32, granule: u64) -> Option<Extent> {
        let (mut at, mut found) = (root, None);
        while at != NIL {
            let node = self.node(at);
            if node.extent.start >= granule {
                found = Some(node.extent);
                at = node.left;
            } else {
                at = node.right;
            }
        }
        found
    }

    /// Puts an extent in; the new root. The caller made sure of a spare node: without one the extent is lost.
    #[must_use]
    pub(super) fn insert(&mut self, root: u32, extent: Extent) -> u32 {
        let new = self.spare;
        debug_assert_ne!(new, NIL, "the slab was not grown in time");
        if new == NIL {
            return root;
        }
        self.spare = self.node(new).left;
        self.spares -= 1;
        *self.node_mut(new) = Node { extent, best: [0; 3], left: NIL, right: NIL, height: 1 };
        self.refresh(new);
        self.hang(root, new)
    }

    fn hang(&mut self, root: u32, new: u32) -> u32 {
        if root == NIL {
            return new;
        }
        if self.node(new).extent.start < self.node(root).extent.start {
            let left = self.hang(self.node(root).left, new);
            self.node_mut(root).left = left;
        } else {
            let right = self.hang(self.node(root).right, new);
            self.node_mut(root).right = right;
        }
        self.balance(root)
    }

    /// Takes the extent that starts at `start` out; the new root.
    #[must_use]
    pub(super) fn remove(&mut self, root: u32, start: u64) -> u32 {
        if root == NIL {
            return NIL;
        }
        let Node { extent, left, right, .. } = *self.node(root);
        if start < extent.start {
            let left = self.remove(left, start);
            self.node_mut(root).left = left;
        } else if start > extent.start {
            let right = self.remove(right, start);
            self.node_mut(root).right = right;
        } else {
            self.node_mut(root).left = self.spare;
            self.spare = root;
            self.spares += 1;
            if right == NIL {
                return left;
            }
            let (first, rest) = self.take_first(right);
            self.node_mut(first).left = left;
            self.node_mut(first).right = rest;
            return self.balance(first);
        }
        self.balance(root)
    }

    /// Splits a tree in its first node and the rest.
    fn take_first(&mut self, root: u32) -> (u32, u32) {
        let Node { left, right, .. } = *self.node(root);
        if left == NIL {
            return (root, right);
        }
        let (first, rest) = self.take_first(left);
        self.node_mut(root).left = rest;
        (first, self.balance(root))
    }

    /// Changes the extent that starts at `start`, within the gap between its neighbours.
    pub(super) fn resize(&mut self, root: u32, start: u64, extent: Extent) {
        if root == NIL {
            return;
        }
        let node = self.node(root);
        if start < node.extent.start {
            self.resize(node.left, start, extent);
        } else if start > node.extent.start {
            self.resize(node.right, start, extent);
        } else {
            self.node_mut(root).extent = extent;
        }
        self.refresh(root);
    }

    fn height(&self, at: u32) -> u8 {
        if at == NIL { 0 } else { self.node(at).height }
    }

    /// Computes a node's summary of its subtree from its children.
    fn refresh(&mut self, at: u32) {
        let Node { extent, left, right, .. } = *self.node(at);
        let (a, b) = (self.best(left), self.best(right));
        let height = 1 + self.height(left).max(self.height(right));
        let node = self.node_mut(at);
        node.height = height;
        for (class, best) in node.best.iter_mut().enumerate() {
            *best = extent.room(ALIGNS[class]).max(a[class]).max(b[class]);
        }
    }

    /// Makes the heights of a node's children differ by 1 at most, where they differ by 2; the new root.
    fn balance(&mut self, at: u32) -> u32 {
        let Node { left, right, .. } = *self.node(at);
        let (l, r) = (self.height(left), self.height(right));
        if l > r + 1 {
            let Node { left: outer, right: inner, .. } = *self.node(left);
            if self.height(inner) > self.height(outer) {
                let new = self.rotate_left(left);
                self.node_mut(at).left = new;
            }
            return self.rotate_right(at);
        }
        if r > l + 1 {
            let Node { left: inner, right: outer, .. } = *self.node(right);
            if self.height(inner) > self.height(outer) {
                let new = self.rotate_right(right);
                self.node_mut(at).right = new;
            }
            return self.rotate_left(at);
        }
        self.refresh(at);
        at
    }

    fn rotate_right(&mut self, at: u32) -> u32 {
        let up = self.node(at).left;
        self.node_mut(at).left = self.node(up).right;
        self.node_mut(up).right = at;
        self.refresh(at);
        self.refresh(up);
        up
    }

    fn rotate_left(&mut self, at: u32) -> u32 {
        let up = self.node(at).right;
        self.node_mut(at).right = self.node(up).left;
        self.node_mut(up).left = at;
        self.refresh(at);
        self.refresh(up);
        up
    }

    /// Checks order, balance and what each subtree knows; the extents in order.
    #[cfg(all(test, not(loom)))]
    pub(super) fn check(&self, root: u32, into: &mut Vec<Extent>) {
        if root == NIL {
            return;
        }
        let node = *self.node(root);
        self.check(node.left, into);
        if let Some(last) = into.last() {
            assert!(last.end < node.extent.start, "abutting or disordered: {last:?} {:?}", node.extent);
        }
        into.push(node.extent);
        self.check(node.right, into);
        assert!(self.height(node.left).abs_diff(self.height(node.right)) <= 1);
        assert_eq!(node.height, 1 + self.height(node.left).max(self.height(node.right)));
        for (class, align) in ALIGNS.into_iter().enumerate() {
            let here = node.extent.room(align);
            assert_eq!(
                node.best[class],
                here.max(self.best(node.left)[class]).max(self.best(node.right)[class])
            );
        }
    }
}
