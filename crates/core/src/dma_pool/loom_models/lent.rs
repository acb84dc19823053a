//! Memory of raw blocks, borrowed while the pool shrinks.

use super::*;

/// Memory of a block is borrowed through its address while its owner frees the block and the pool shrinks: the chunk stays if the
/// borrow began, and the borrow is refused if the chunk is gone.
#[test]
fn memory_lent_by_address_against_the_release_of_its_chunk() {
    check(|| {
        let (pool, mut a, x, y) = with_an_allocated_row();
        let source = Arc::new(UnsafeCell::new(true));
        // The second one finds the mark of the first.
        let borrows = [0, 1].map(|_| {
            let (pool, source) = (pool.clone(), source.clone());
            thread::spawn(move || {
                let (number, bit) = split(pool.geometry.index_of(x));
                let lent = pool.chunk.lend(pool.chunk.row(number).unwrap(), bit);
                // SAFETY: loom reports a concurrent release.
                assert!(!lent || source.with(|has_lent_run| unsafe { *has_lent_run }), "released before");
                lent
            })
        });
        assert!(pool.free(&mut a, x));
        assert!(pool.free(&mut a, y));
        pool.depot.retire(&mut a);
        let released = pool.depot.remove_if_whole(pool.chunk.rows(), || !pool.chunk.is_lent());
        if released {
            // SAFETY: loom reports a concurrent borrow.
            source.with_mut(|has_lent_run| unsafe { *has_lent_run = false });
        }
        let lent = borrows.map(|borrow| borrow.join().unwrap());
        assert!(!(released && lent.contains(&true)));
    });
}
