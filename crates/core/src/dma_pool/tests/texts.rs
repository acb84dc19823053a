//! The texts of errors: each ends with what the program can do next.

use super::*;

#[test]
fn an_exhausted_source_names_what_makes_room() {
    let heap = Heap::new(4096);
    let pool = pool(&heap, 4096);
    let block = pool.alloc_raw().unwrap();
    let text = pool.alloc_raw().unwrap_err().to_string();
    assert!(text.ends_with(": drop idle `Local`s, free blocks, or give the source more memory"), "{text}");
    pool.free_raw(block).unwrap();
}

#[test]
fn limits_that_cannot_be_set_name_what_to_change() {
    let heap = Heap::new(4096);
    let pool = pool(&heap, 4096);
    let text = |minimum, maximum| pool.set_limits(Limits { minimum, maximum }).unwrap_err().to_string();
    let contradiction = text(2, 1);
    assert!(contradiction.ends_with("; lower the minimum, or raise the maximum"), "{contradiction}");
    let unavailable = text(2, 2);
    assert!(unavailable.contains("the pool has 1: "), "{unavailable}");
    assert!(unavailable.ends_with("; lower the minimum, or give the source more memory"), "{unavailable}");
    assert!(!unavailable.contains("free blocks"), "frees do not help: {unavailable}");
}

#[test]
fn wrong_frees_name_the_right_use() {
    let heap = Heap::new(4096);
    let pool = pool(&heap, 64);
    let block = pool.alloc_raw().unwrap();
    let other = RawBlock::from_parts(block.as_ptr(), Iova::new(7));
    let text = pool.free_raw(other).unwrap_err().to_string();
    assert!(text.ends_with(": pass both addresses as the pool returned them"), "{text}");
    pool.free_raw(block).unwrap();
    let text = pool.free_raw(block).unwrap_err().to_string();
    assert!(text.ends_with("; free each block once, and do not use it afterwards"), "{text}");
}
