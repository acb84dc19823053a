//! Checks of a tree against its definition, for the tests.

use super::node::{
    ALIGNS, Extent, FAN, NIL, Node, REGION, REGION_SHIFT, Summary, room, slot_shift,
};
use super::tree::Tree;
use alloc::vec::Vec;

impl Tree {
    /// Checks every summary, that nothing entirely free has a child, that no node is lost, and the
    /// hints; the free runs of `part`, which is all of the tree.
    pub(super) fn check(&mut self, part: Extent) -> Vec<Extent> {
        self.settle();
        let (mut nodes, mut maps) = (0, 0);
        self.check_node(self.root, self.level, 0, &mut nodes, &mut maps);
        assert_eq!((nodes, maps), (self.nodes.used(), self.maps.used()));
        let mut runs: Vec<Extent> = Vec::new();
        self.walk(part, &mut |part, free| {
            match runs.last_mut() {
                Some(run) if free && run.end == part.start => run.end = part.end,
                _ if free => runs.push(part),
                _ => {}
            }
            true
        });
        for (class, &low) in self.low.iter().enumerate() {
            let before = |run: &&Extent| run.start >> REGION_SHIFT < low;
            for run in runs.iter().filter(before) {
                assert!(
                    run.len() < 1 << class,
                    "2^{class} granules fit at {run:?}, before region {low}"
                );
            }
        }
        assert!(self.low.is_sorted());
        let longest = runs.iter().map(|run| run.len()).max().unwrap_or(0);
        assert_eq!(self.longest_before(self.bounds.end), longest);
        for (class, align) in ALIGNS.into_iter().enumerate() {
            let most = runs.iter().map(|run| room(run.start, run.end, align)).max().unwrap_or(0);
            for len in [1, most / 2 + 1, most.max(1), most + 1] {
                let first = runs.iter().find(|run| room(run.start, run.end, align) >= len);
                assert_eq!(
                    self.first_fit(class, len),
                    first.map(|run| run.start.next_multiple_of(align))
                );
            }
        }
        runs
    }

    fn check_node(
        &self,
        at: u32,
        level: u32,
        base: u64,
        nodes: &mut usize,
        maps: &mut usize,
    ) -> Summary {
        *nodes += 1;
        let node = *self.nodes.get(at);
        for slot in 0..FAN {
            let (kid, part) = (node.kids[slot], Node::part(level, base, slot));
            let summary = if kid == NIL {
                Summary::uniform(part, !node.is_used(slot))
            } else if level == 1 {
                *maps += 1;
                self.check_region(kid, part)
            } else {
                self.check_node(kid, level - 1, part.start, nodes, maps)
            };
            assert_eq!(node.get(slot), summary, "level {level}, {part:?}");
            assert!(
                kid == NIL || summary.head < 1 << slot_shift(level),
                "free, and has a child: {part:?}"
            );
        }
        node.summary(level, base)
    }

    /// Summarises a region bit by bit.
    fn check_region(&self, map: u32, part: Extent) -> Summary {
        let free = |g: u64| self.maps.get(map).run_from(g % REGION).1;
        let run_at = |from: u64| (from..part.end).take_while(|&g| free(g)).count() as u64;
        let (mut best, mut tail, mut at) = ([0; 3], 0, part.start);
        while at < part.end {
            let run = run_at(at);
            for (best, align) in best.iter_mut().zip(ALIGNS) {
                *best = room(at, at + run, align).max(*best);
            }
            tail = if at + run == part.end { run } else { 0 };
            at += run + 1;
        }
        assert!(part.len() == REGION);
        Summary { head: run_at(part.start), tail, best }
    }
}
