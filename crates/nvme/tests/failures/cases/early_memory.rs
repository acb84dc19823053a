//! Memory that exists, is registered with a ring and is filled before any device is open.

use crate::report::Report;
use pinfold::core::domain::MapError;
use pinfold::uring::RingBuffers;
use pinfold::{Arena, Buffer, Domain, MappingPolicy, ToDevice};
use std::error::Error;

const SLABS: usize = 8;
const SLAB: u64 = 4 << 20;
const BUFFER: usize = 64 << 10;
const DEVICES: usize = 2;

pub(super) fn run(report: &mut Report) -> Result<(), Box<dyn Error>> {
    report.section("here: memory first");
    let slabs = (0..SLABS)
        .map(|_| Arena::builder().size(SLAB).mapping_policy(MappingPolicy::Whole).build_unmapped())
        .collect::<Result<Vec<_>, _>>()?;
    let mut buffers = slabs.iter().map(|slab| slab.alloc(BUFFER)).collect::<Result<Vec<_>, _>>()?;
    for (buffer, value) in buffers.iter().zip(1..) {
        buffer.memory().fill(0, BUFFER, value)?;
    }
    report.figure("slabs without a device", slabs.len(), "");
    report.figure("bytes of them", slabs.iter().map(|slab| slab.len()).sum::<usize>(), "");
    let fixed: Vec<_> = slabs.iter().map(|slab| slab.fixed()).collect();
    let ring = io_uring::IoUring::new(8);
    let table = ring.map(|ring| RingBuffers::register(&ring, &fixed));
    let registered = match &table {
        Ok(Ok(table)) => table.bytes(),
        Ok(Err(error)) => {
            report.note(error);
            0
        }
        Err(error) => {
            report.note(format!("no io_uring here: {error}"));
            0
        }
    };
    report.figure("bytes registered with a ring meanwhile", registered, "");

    report.section("then the devices, one after the other");
    let (mut maps, mut read, mut refused) = (0, 0, 0);
    for number in 0..DEVICES {
        let domain = Domain::soft()?;
        let device = domain.port().ok_or("not a software IOMMU")?;
        // Before the slab is in the domain: an error that says what to call, and the buffer again.
        let mut kept = Vec::new();
        for buffer in buffers {
            let MapError { payload, error } = match domain.map(buffer, ToDevice) {
                Ok(_) => {
                    return Err("a buffer was mapped into a domain that its slab is not in".into());
                }
                Err(refused) => refused,
            };
            if refused == 0 {
                report.said("a map before the slab is in the domain", error);
            }
            refused += 1;
            kept.push(payload.ok_or("a refused map kept the buffer")?);
        }
        let arenas =
            slabs.iter().map(|slab| slab.map_into(&domain)).collect::<Result<Vec<_>, _>>()?;
        maps += domain.stats().static_mappings;
        let mut back: Vec<Buffer> = Vec::new();
        for (buffer, value) in kept.into_iter().zip(1..) {
            let mapping = domain.map(buffer, ToDevice)?;
            let mut bytes = vec![0; BUFFER];
            device.read(mapping.iova().start(), &mut bytes)?;
            read += bytes.iter().filter(|byte| **byte == value).count();
            back.push(mapping.unmap()?);
        }
        buffers = back;
        report.figure(
            ["slabs that the first device reaches", "slabs that the second device reaches"][number],
            arenas.len(),
            "",
        );
    }
    report.figure("maps for them, one for each slab and device", maps, "");
    report.figure("bytes that the devices read as the program wrote them", read, "");
    report.promise(
        "memory is independent of devices: each is mapped when the device is there",
        maps == (SLABS * DEVICES) as u64,
    );
    report.promise(
        "the devices read what was written before they existed",
        read == SLABS * DEVICES * BUFFER,
    );
    report.promise(
        "a map that comes too early is an error, and changes nothing",
        refused == SLABS * DEVICES,
    );
    Ok(())
}
