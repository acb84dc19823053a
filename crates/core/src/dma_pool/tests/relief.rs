//! What an owner gives back and learns of, whichever calls it makes: each of its rows that moves is a reason to look.

use super::super::row::Fill;
use super::*;

pub(super) type Own<'p, 'h> = Local<&'h Heap, &'p DmaPool<&'h Heap>>;

/// How many rows an owner has that have no free block, and may have remote frees.
pub(super) fn spent(local: &Own<'_, '_>) -> usize {
    let (current, _) = local.owner.current.parts();
    let (rows, _) = local.owner.audit();
    rows.iter().filter(|&&row| current != Some(row) && row.listed() == Fill::Spent).count()
}

/// An owner, the blocks of its rows, and so many of the rows that it keeps although they are spent: it frees what it allocates.
pub(super) fn keeping<'p, 'h>(pool: &'p DmaPool<&'h Heap>, rows: usize) -> (Own<'p, 'h>, Vec<RawBlock>) {
    let mut local = pool.local();
    let mut blocks: Vec<_> = (0..rows * 64).map(|_| local.alloc_raw().unwrap()).collect();
    // What is left of the last rows that it got.
    while local.owner.current.parts().1 != 0 || local.owner.whole.len() != 0 {
        blocks.push(local.alloc_raw().unwrap());
    }
    for row in blocks.chunks(64).take(rows) {
        local.free_raw(row[5]).unwrap();
        assert_eq!(local.alloc_raw(), Ok(row[5]));
    }
    // One of them may be the current row.
    assert!(spent(&local) + 1 >= rows, "{} of {rows}", spent(&local));
    (local, blocks)
}

#[test]
fn an_owner_that_only_frees_has_no_surplus_of_rows() {
    let orders: [fn(&mut Vec<RawBlock>); 3] = [
        |_| (),
        |blocks| blocks.reverse(),
        |blocks| {
            let mut random = Random::new(5);
            (1..blocks.len()).rev().for_each(|i| blocks.swap(i, random.below(i + 1)));
        },
    ];
    for order in orders {
        for bulk in [false, true] {
            let heap = Heap::new(4 << 20);
            let pool = pool(&heap, 64);
            let (mut local, mut blocks) = keeping(&pool, 120);
            let rows = blocks.len() / 64;
            order(&mut blocks);
            for some in blocks.chunks(if bulk { 64 } else { 1 }) {
                match bulk {
                    true => local.free_bulk(some).unwrap(),
                    false => local.free_raw(some[0]).unwrap(),
                }
                assert_eq!(local.owner.surplus(), 0, "{} of {rows} rows", local.owner.audit().0.len());
            }
            let stats = pool.stats();
            assert!(stats.in_depot + 34 * 64 >= stats.blocks, "{stats:?}");
        }
    }
}

#[test]
fn remote_frees_are_announced_by_an_owner_that_makes_nothing_else() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let (mut local, blocks) = keeping(&pool, 100);
    let mut other = pool.local();
    for (row, blocks) in blocks.chunks(64).take(100).enumerate() {
        let before = pool.depot.notices();
        match row % 3 {
            0 => other.free_raw(blocks[7]).unwrap(),
            1 => other.free_bulk(&blocks[7..9]).unwrap(),
            _ => pool.free_raw(blocks[7]).unwrap(),
        }
        assert_ne!(pool.depot.notices(), before, "row {row}");
    }
    // Told of them, the owner no longer keeps such rows when it needs another one.
    local.alloc_raw().unwrap();
    assert_eq!(spent(&local), 0);
}

#[test]
fn a_call_for_many_learns_of_remote_frees() {
    for runs in [false, true] {
        let heap = Heap::new(4 << 20);
        let pool = pool(&heap, 64);
        let (mut local, blocks) = keeping(&pool, 100);
        // Whole rows, which calls for many take without another row becoming the current one.
        let (whole, rest) = blocks.split_at(4 * 64);
        local.free_bulk(whole).unwrap();
        (0..local.owner.stash.len()).for_each(|_| _ = local.alloc_raw().unwrap());
        assert!(local.owner.whole.len() >= 3 && local.owner.open.len() + local.owner.sparse.len() == 0);
        assert_eq!(local.owner.current.parts().1, 0);
        let mut take = || match runs {
            true => _ = local.alloc_run(NonZeroUsize::new(64).unwrap()).unwrap(),
            false => assert_eq!(local.fill(&mut [None; 64]), 64),
        };
        take();
        let mut other = pool.local();
        other.free_raw(rest[9]).unwrap();
        take();
        let current = local.owner.current.parts();
        assert!(spent(&local) == 0 && current.1 == 0, "{} rows are kept", spent(&local));
    }
}

/// The owner of rows that others free releases them when they are taken; the one that frees them itself keeps them.
#[test]
fn rows_that_are_taken_whole_are_kept_by_those_who_free_them() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    // So many that each owner may keep all of these.
    pool.set_limits(Limits { minimum: 32_768, maximum: u64::MAX }).unwrap();
    let (mut local, mut other) = (pool.local(), pool.local());
    let mut slots = [None; 8 * 64];
    assert_eq!(local.fill(&mut slots), slots.len());
    assert!(spent(&local) <= 1);
    other.free_slots(&mut slots).unwrap();
    // Fewer than all: it has whole rows left, and need not look at the others.
    assert_eq!(other.fill(&mut slots[..6 * 64]), 6 * 64);
    assert!(spent(&other) <= 1, "{} rows", spent(&other));
    other.free_slots(&mut slots).unwrap();
    assert_eq!(other.fill(&mut slots[..6 * 64]), 6 * 64);
    assert!(spent(&other) >= 4, "{} rows", spent(&other));
}

#[test]
fn rows_that_are_used_up_one_by_one_are_released() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let mut local = pool.local();
    let blocks: Vec<_> = (0..400 * 64).map(|_| local.alloc_raw().unwrap()).collect();
    for row in blocks.chunks(64) {
        local.free_bulk(&row[10..12]).unwrap();
    }
    let open = local.owner.open.len();
    assert!(open > 300, "{open} rows");
    // It has released all of them before, and nobody else frees.
    for _ in 0..2 * 390 {
        local.alloc_raw().unwrap();
        assert!(spent(&local) <= 128, "{} rows", spent(&local));
    }
}

#[test]
fn a_call_for_many_takes_the_blocks_of_partly_used_rows_first() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let (mut local, blocks) = keeping(&pool, 100);
    let (whole, rest) = blocks.split_at(4 * 64);
    local.free_bulk(&rest[20..30]).unwrap();
    local.free_bulk(whole).unwrap();
    let mut slots = [None; 74];
    assert_eq!(local.fill(&mut slots), 74);
    assert!(slots[..10].iter().flatten().eq(&rest[20..30]), "{slots:?}");
}

/// Those in rows with free blocks are looked for a few rows at a time, by an owner that only frees in others too.
#[test]
fn remote_frees_in_partly_used_rows_are_collected() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let mut other = pool.local();
    let (mut local, blocks) = keeping(&pool, 100);
    let (open, rest) = blocks[..100 * 64].split_at(50 * 64);
    open.chunks(64).for_each(|row| local.free_bulk(&row[10..12]).unwrap());
    open.chunks(64).for_each(|row| other.free_raw(row[20]).unwrap());
    rest.chunks(64).for_each(|row| local.free_bulk(&row[10..12]).unwrap());
    for row in open.chunks(64) {
        let site = pool.find(row[20]).unwrap().site;
        assert_ne!(site.row.avail() & 1 << site.bit, 0, "{:x}", site.row.avail());
    }
}

/// Two with each call that moves a row, as the module says, until each has been checked once.
#[test]
fn partly_used_rows_are_checked_two_at_a_time_and_once() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let mut other = pool.local();
    let (mut local, blocks) = keeping(&pool, 100);
    let (open, rest) = blocks[..100 * 64].split_at(50 * 64);
    open.chunks(64).for_each(|row| local.free_bulk(&row[10..12]).unwrap());
    assert_eq!(local.owner.open.len(), 50);
    open.chunks(64).for_each(|row| other.free_raw(row[20]).unwrap());
    let is_collected = |row: &&[RawBlock]| {
        let site = pool.find(row[20]).unwrap().site;
        site.row.avail() & 1 << site.bit != 0
    };
    for (moves, row) in (1..=26).zip(rest.chunks(64)) {
        local.free_bulk(&row[10..12]).unwrap();
        assert_eq!(open.chunks(64).filter(is_collected).count(), 50.min(2 * moves));
    }
    assert!(!local.owner.is_behind(pool.depot.news()), "it goes on although nothing is new");
}

#[test]
fn refused_frees_of_many_adopt_no_row() {
    let heap = Heap::new(4 << 20);
    let pool = pool(&heap, 64);
    let (mut busy, mut idle) = (pool.local(), pool.local());
    let blocks: Vec<_> = (0..100 * 64).map(|_| busy.alloc().unwrap()).collect();
    let raw: Vec<_> = blocks.iter().map(Block::as_raw).collect();
    for row in raw.chunks(64) {
        assert_eq!(idle.free_bulk(&row[3..9]).unwrap_err().freed, 0);
    }
    assert_eq!(idle.owner.audit().0.len(), 0);
}

/// Blocks that no fast path finds: those with gaps between them, those in debug mode, and runs of another owner.
#[test]
fn remote_frees_that_are_looked_up_are_announced() {
    let heap = Heap::new(4 << 20);
    let pools = [
        DmaPool::new(&heap, "gaps", 1000, 0, 4096).unwrap(),
        DmaPool::with_debug(&heap, "debug", 64, 0, 0).unwrap(),
    ];
    for pool in &pools {
        let (mut local, mut other) = (pool.local(), pool.local());
        let block = local.alloc_raw().unwrap();
        let before = pool.depot.notices();
        other.free_raw(block).unwrap();
        assert_ne!(pool.depot.notices(), before, "{}", pool.name());
    }
    let pool = pool(&heap, 64);
    let (mut local, mut other) = (pool.local(), pool.local());
    let run = local.alloc_run(NonZeroUsize::MIN).unwrap();
    let before = pool.depot.notices();
    other.free_run(run).unwrap();
    assert_ne!(pool.depot.notices(), before, "a run");
}

#[test]
fn an_owner_of_blocks_with_gaps_that_only_frees_has_no_surplus_of_rows() {
    let heap = Heap::new(16 << 20);
    let pool = DmaPool::new(&heap, "gaps", 1000, 0, 4096).unwrap();
    let mut local = pool.local();
    let blocks: Vec<_> = (0..120 * 64).map(|_| local.alloc_raw().unwrap()).collect();
    for &block in &blocks {
        local.free_raw(block).unwrap();
        assert_eq!(local.owner.surplus(), 0, "{} rows", local.owner.audit().0.len());
    }
    let stats = pool.stats();
    assert!(stats.in_depot + 34 * 64 >= stats.blocks, "{stats:?}");
}
