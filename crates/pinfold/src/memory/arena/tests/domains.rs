//! Arenas without a domain, and in several.

use super::*;
use pinfold_core::access::{Bidirectional, FromDevice, ToDevice};
use pinfold_core::dma_pool::{ChunkSource, DmaPool};

fn unmapped(policy: MappingPolicy) -> ArenaMemory {
    Arena::builder()
        .size(2 << 20)
        .source(Source::Plain)
        .mapping_policy(policy)
        .build_unmapped()
        .unwrap()
}

#[test]
fn an_arena_without_a_domain_allocates_and_unmaps() {
    assert!(is_gone(|| {
        let memory = unmapped(MappingPolicy::PerUse);
        let addr = memory.addr();
        let mut buffer = memory.alloc(8192).unwrap();
        buffer.as_mut_slice().unwrap().fill(7);
        drop(memory);
        assert!(
            is_mapped(addr) && buffer.as_slice().unwrap()[8191] == 7,
            "a buffer keeps its arena"
        );
        drop(buffer);
        addr
    }));
}

#[test]
fn a_buffer_can_be_older_than_its_domain() {
    let memory = unmapped(MappingPolicy::PerUse);
    let mut buffer = memory.alloc(4096).unwrap();
    buffer.as_mut_slice().unwrap()[..5].copy_from_slice(b"early");
    let domain = soft();
    let unknown = domain.map(buffer, ToDevice).unwrap_err();
    assert!(matches!(unknown.error, BackendError::NotRegistered { .. }), "{unknown}");
    let _arena = memory.map_into(&domain).unwrap();
    let mapping = domain.map(unknown.payload.unwrap(), ToDevice).unwrap();
    let mut read = [0; 5];
    domain.port().unwrap().read(mapping.iova().start(), &mut read).unwrap();
    assert_eq!(&read, b"early");
}

#[test]
fn two_domains_reach_the_same_memory_at_their_own_addresses() {
    for policy in [MappingPolicy::PerUse, MappingPolicy::Whole] {
        let memory = unmapped(policy);
        let domains = [soft(), soft()];
        // So that the domains do not choose the same addresses.
        let _shift = domains[1].reserve_iova(2 << 20, 2 << 20).unwrap();
        let arenas = domains.each_ref().map(|domain| memory.map_into(domain).unwrap());
        assert_ne!(arenas[0].iova(), arenas[1].iova());
        assert_ne!(ChunkSource::domain(&arenas[0]), ChunkSource::domain(&arenas[1]));
        let buffer = memory.alloc(4096).unwrap();
        let fixed = arenas.each_ref().map(|arena| arena.iova_of(&buffer));
        assert_eq!(fixed.iter().all(Option::is_some), policy == MappingPolicy::Whole);
        // From one device to the other, without a copy.
        let mapping = domains[0].map(buffer, FromDevice).unwrap();
        assert_eq!(mapping.is_fixed(), policy == MappingPolicy::Whole);
        domains[0].port().unwrap().write(mapping.iova().start(), b"frame").unwrap();
        let buffer = mapping.unmap().unwrap();
        let mapping = domains[1].map(buffer, ToDevice).unwrap();
        let mut read = [0; 5];
        domains[1].port().unwrap().read(mapping.iova().start(), &mut read).unwrap();
        assert_eq!(&read, b"frame");
    }
}

#[test]
fn each_domain_reaches_the_chunks_of_its_own_pools_only() {
    let memory = unmapped(MappingPolicy::PerUse);
    let domains = [soft(), soft()];
    let arenas = domains.each_ref().map(|domain| memory.map_into(domain).unwrap());
    let builder = DmaPool::builder("ring").block(4096).align(4096);
    let pools = arenas.each_ref().map(|arena| builder.clone().build(arena).unwrap());
    let blocks = pools.each_ref().map(|pool| pool.alloc().unwrap());
    let ports = domains.each_ref().map(|domain| domain.port().unwrap());
    for (i, other) in [(0, 1), (1, 0)] {
        ports[i].write(blocks[i].iova(), b"mine").unwrap();
        let offset = blocks[i].iova().raw() - arenas[i].iova().raw();
        let there = arenas[other].iova().checked_add(offset).unwrap();
        assert!(ports[other].write(there, b"theirs").is_err());
    }
}

#[test]
fn mapping_twice_into_a_domain_returns_the_same_addresses() {
    let (memory, domain) = (unmapped(MappingPolicy::Whole), soft());
    let first = memory.map_into(&domain).unwrap();
    let second = first.map_into(&domain).unwrap();
    assert_eq!((first.iova(), domain.stats().static_mappings), (second.iova(), 1));
    assert!(first.is_same(&second));
}

/// Handles, buffers and domains are dropped in every order: the memory is unmapped from both
/// domains and the process.
#[test]
fn every_drop_order_unmaps_everywhere() {
    for policy in [MappingPolicy::PerUse, MappingPolicy::Whole] {
        for order in 0..24 {
            assert!(is_gone(|| {
                let memory = unmapped(policy);
                let addr = memory.addr();
                let domains = [soft(), soft()];
                let handles = domains.each_ref().map(|domain| memory.map_into(domain).unwrap());
                let iovas = handles.each_ref().map(|arena| arena.iova());
                let ports = domains.each_ref().map(|domain| domain.port().unwrap());
                let kept = domains.clone();
                let mut values: Vec<Box<dyn std::any::Any>> = vec![
                    Box::new(memory.alloc(4096).unwrap()),
                    Box::new(memory),
                    Box::new(handles),
                    Box::new(domains),
                ];
                let mut code = order;
                while !values.is_empty() {
                    let at = code % values.len();
                    code /= values.len();
                    drop(values.remove(at));
                }
                for (port, iova) in ports.iter().zip(iovas) {
                    assert!(port.write(iova, b"late").is_err());
                }
                assert!(kept.iter().all(|domain| domain.stats().static_mappings == 0));
                addr
            }));
        }
    }
}

#[test]
fn stress_threads_map_one_arena_into_many_domains() {
    let memory = unmapped(MappingPolicy::Whole);
    let domains: Vec<Domain> = (0..6).map(|_| soft()).collect();
    std::thread::scope(|scope| {
        for shift in 0..4 {
            let (memory, domains) = (&memory, &domains);
            scope.spawn(move || {
                for at in 0..domains.len() {
                    let domain = &domains[(at + shift) % domains.len()];
                    let arena = memory.map_into(domain).unwrap();
                    let buffer = memory.alloc(4096).unwrap();
                    let fixed = arena.iova_of(&buffer).unwrap();
                    let mapping = domain.map(buffer, Bidirectional).unwrap();
                    domain.port().unwrap().write(mapping.iova().start(), b"x").unwrap();
                    let _ = fixed;
                }
            });
        }
    });
    assert!(domains.iter().all(|domain| domain.stats().static_mappings == 1));
    drop(memory);
    assert!(domains.iter().all(|domain| domain.stats().static_mappings == 0));
}
