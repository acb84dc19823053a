//! The accesses of a watched controller.

use super::*;
use crate::process::{Memory, Site};

const AT: u64 = 0x1000;

/// Has a controller write a dword where only some bytes are mapped, each a place and a length;
/// returns the bytes, and whether it was written.
fn written(scatter: Option<Random>, mapped: &[(u64, u64)]) -> ([u8; 4], bool) {
    let watch = Watch::new("test".to_owned(), Arc::default(), scatter);
    let space = Arc::new(Space::default());
    let memory = Arc::new(Memory::of(std::process::id()).unwrap());
    let target = Box::new([0u8; 4]);
    let vaddr = std::ptr::from_ref(&*target) as u64;
    for (at, len) in mapped {
        let span = Span::new(AT + at, *len).unwrap();
        let (memory, site) = (memory.clone(), Site::default());
        space.insert(Entry {
            span,
            vaddr: vaddr + at,
            read: true,
            write: true,
            memory,
            serial: 0,
            site,
        });
    }
    watch.attach(Some(space));
    watch.set_bus_master(true);
    let done =
        Bus::write_u32_release(&WatchedBus(Arc::new(watch)), Iova::new(AT), 0x4433_2211).is_ok();
    // As another process sees it: the compiler knows of no write.
    let mut bytes = [0; 4];
    memory.read(vaddr, &mut bytes).unwrap();
    drop(target);
    (bytes, done)
}

#[test]
fn the_byte_with_the_phase_is_written_last_and_alone() {
    for scatter in [None, Some(Random::new(3))] {
        let written = |mapped: &[(u64, u64)]| written(scatter.clone(), mapped);
        assert_eq!(written(&[(0, 4)]), ([0x11, 0x22, 0x33, 0x44], true));
        // All others are there before it.
        assert_eq!(written(&[(0, 2), (3, 1)]), ([0x11, 0x22, 0, 0x44], false));
        // It is not there if another one fails.
        assert_eq!(written(&[(2, 1)]), ([0; 4], false));
        assert_eq!(written(&[(0, 3)]), ([0x11, 0x22, 0, 0], false));
        assert_eq!(written(&[(2, 2)]), ([0; 4], false));
    }
}
