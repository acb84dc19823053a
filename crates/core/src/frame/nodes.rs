//! A zone per NUMA node.

use super::zone::Zone;
use super::{Frame, FrameError, Order};
use crate::sync::{AtomicU64, CachePadded, Ordering};
use alloc::boxed::Box;
use alloc::vec::Vec;

/// From which node frames are to come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Preference {
    /// From any, in the order in which the nodes were given.
    #[default]
    Any,
    /// From this node, and from the others in their order where it has nothing left.
    Prefer(u32),
    /// From this node, or not at all.
    Strict(u32),
}

/// Where a run of frames was given.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Origin {
    /// The first frame: its number within its node's zone.
    pub frame: Frame,
    /// The node that it is of.
    pub node: u32,
    /// Whether another node was preferred.
    pub away: bool,
}

/// Why a set of nodes did not do what it was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodesError {
    /// There must be one node at least.
    #[error("a set of nodes has at least one node")]
    NoNode,
    /// A node is named once.
    #[error("node {node} was named twice")]
    Twice {
        /// The node.
        node: u32,
    },
    /// The set has no such node. A preference for it is refused too: what cannot be honoured is not forgotten.
    #[error("there is no zone for node {node}")]
    Unknown {
        /// The node.
        node: u32,
    },
    /// The zones have no such run: all of them, or the one that was asked for strictly.
    #[error("{0}")]
    Frame(#[from] FrameError),
}

/// What one node has given.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct NodeStats {
    /// Frames given to those who asked for this node, or for any.
    pub at_home: u64,
    /// Frames given to those who preferred another node.
    pub away: u64,
    /// Calls that preferred this node and got less from it than they asked for.
    pub missed: u64,
}

#[derive(Debug)]
struct Node {
    id: u32,
    zone: Zone,
    at_home: CachePadded<AtomicU64>,
    away: AtomicU64,
    missed: AtomicU64,
}

impl Node {
    fn count(&self, frames: u64, away: bool) {
        if frames > 0 {
            let counter = if away { &self.away } else { &*self.at_home };
            counter.fetch_add(frames, Ordering::Relaxed);
        }
    }
}

/// A zone for each NUMA node. Where the nodes' memory is, and which node a thread runs on, the caller knows.
///
/// What was asked for is done or refused, never changed silently: a frame of another node than the one preferred
/// says so ([`Origin::away`]) and is counted; a node that is asked for strictly gives, or nobody does.
#[derive(Debug)]
pub struct Nodes {
    nodes: Box<[Node]>,
}

impl Nodes {
    /// A set of zones, each with the number of its node as the system counts them, nearest first where it matters.
    ///
    /// # Errors
    /// [`NodesError::NoNode`], [`NodesError::Twice`].
    pub fn new(zones: impl IntoIterator<Item = (u32, Zone)>) -> Result<Self, NodesError> {
        let zero = || AtomicU64::new(0);
        let mut nodes: Vec<Node> = Vec::new();
        for (id, zone) in zones {
            if nodes.iter().any(|node| node.id == id) {
                return Err(NodesError::Twice { node: id });
            }
            nodes.push(Node { id, zone, at_home: CachePadded(zero()), away: zero(), missed: zero() });
        }
        if nodes.is_empty() { Err(NodesError::NoNode) } else { Ok(Self { nodes: nodes.into() }) }
    }

    /// The nodes' numbers, in their order.
    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.nodes.iter().map(|node| node.id)
    }

    fn node(&self, id: u32) -> Result<&Node, NodesError> {
        self.nodes.iter().find(|node| node.id == id).ok_or(NodesError::Unknown { node: id })
    }

    /// The zone of a node, for what is done on one node: its [`Local`](super::Local), its counters. O(nodes).
    ///
    /// # Errors
    /// [`NodesError::Unknown`].
    pub fn zone(&self, node: u32) -> Result<&Zone, NodesError> {
        Ok(&self.node(node)?.zone)
    }

    /// What a node has given through this set. O(nodes).
    ///
    /// # Errors
    /// [`NodesError::Unknown`].
    pub fn stats(&self, node: u32) -> Result<NodeStats, NodesError> {
        let node = self.node(node)?;
        Ok(NodeStats {
            at_home: node.at_home.load(Ordering::Relaxed),
            away: node.away.load(Ordering::Relaxed),
            missed: node.missed.load(Ordering::Relaxed),
        })
    }

    /// The nodes to try, in order, and the one preferred.
    fn route(
        &self,
        preference: Preference,
    ) -> Result<(Option<&Node>, impl Iterator<Item = &Node>), NodesError> {
        let (home, others) = match preference {
            Preference::Any => (None, true),
            Preference::Prefer(id) => (Some(self.node(id)?), true),
            Preference::Strict(id) => (Some(self.node(id)?), false),
        };
        let rest = self.nodes.iter().filter(move |node| others && home.is_none_or(|home| home.id != node.id));
        Ok((home, home.into_iter().chain(rest)))
    }

    /// One run of 2^order frames, as [`Zone::alloc`]. O(nodes) of those.
    ///
    /// # Errors
    /// [`NodesError::Unknown`] where the node named has no zone; [`NodesError::Frame`] where nobody who may give has
    /// such a run.
    pub fn alloc(&self, order: Order, preference: Preference) -> Result<Origin, NodesError> {
        let (home, mut route) = self.route(preference)?;
        let mut refused = NodesError::NoNode;
        let found = route.find_map(|node| match node.zone.alloc(order) {
            Ok(frame) => Some((node, frame)),
            Err(error) => {
                refused = error.into();
                None
            }
        });
        let missed = found.is_none_or(|(node, _)| home.is_some_and(|home| home.id != node.id));
        if let Some(home) = home.filter(|_| missed) {
            home.missed.fetch_add(1, Ordering::Relaxed);
        }
        let (node, frame) = found.ok_or(refused)?;
        node.count(order.frames().into(), missed);
        Ok(Origin { frame, node: node.id, away: missed })
    }

    /// Fills the empty slots only, and returns how many slots are full afterwards; each node down to its mark, as
    /// [`Zone::fill`]. O(slots + nodes).
    ///
    /// # Errors
    /// [`NodesError::Unknown`] where the node named has no zone; then no slot has changed.
    pub fn fill(&self, slots: &mut [Option<Origin>], preference: Preference) -> Result<usize, NodesError> {
        let (home, route) = self.route(preference)?;
        let mut holes = slots.iter_mut().filter(|slot| slot.is_none());
        let mut open = holes.by_ref().count();
        for node in route {
            let away = home.is_some_and(|home| home.id != node.id);
            let got = fill_at(node, slots, open, away);
            node.count(got as u64, away);
            open -= got;
            if open == 0 {
                break;
            }
            if home.is_some_and(|home| home.id == node.id) {
                node.missed.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(slots.len() - open)
    }

    /// Takes a run back. O(nodes + 2^order / 64).
    ///
    /// # Errors
    /// [`NodesError::Unknown`], and [`NodesError::Frame`] as for [`Zone::free`]; then nothing has changed.
    pub fn free(&self, run: Origin, order: Order) -> Result<(), NodesError> {
        Ok(self.node(run.node)?.zone.free(run.frame, order)?)
    }
}

/// Fills at most `open` holes from one node, by one bulk call for each 64 of them. Returns how many.
fn fill_at(node: &Node, slots: &mut [Option<Origin>], open: usize, away: bool) -> usize {
    let (mut got, mut left) = (0, open);
    let mut holes = slots.iter_mut().filter(|slot| slot.is_none());
    while left > 0 {
        let mut frames = [None; 64];
        let asked = left.min(frames.len());
        let some = frames.get_mut(..asked).unwrap_or_default();
        let filled = node.zone.fill(some);
        for (frame, slot) in some.iter().flatten().zip(holes.by_ref()) {
            *slot = Some(Origin { frame: *frame, node: node.id, away });
        }
        (got, left) = (got + filled, left - filled);
        if filled < asked {
            break;
        }
    }
    got
}
