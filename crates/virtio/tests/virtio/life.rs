//! The lifetime of a stack: installed once, out of memory, dropped while in use.

use crate::common::{Driver, Rig, place};
use pinfold::soft::SoftConfig;
use pinfold::{Arena, Domain};
use pinfold_virtio::model::{Disk, SECTOR};
use pinfold_virtio::{BOUNCED_BYTES, InstallError, PinfoldHal, Translated, install};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::time::Duration;
use virtio_drivers::device::blk::{BlkReq, BlkResp, VirtIOBlk};
use virtio_drivers::transport::{DeviceStatus, Transport};
use virtio_drivers::{BufferDirection, Error, Hal};

#[test]
fn a_place_has_one_stack() {
    place!(Here);
    let domain = Domain::soft().unwrap();
    let first = install::<Here>(&domain, Arena::builder().size(1 << 20)).unwrap();
    let refused = install::<Here>(&domain, Arena::builder().size(1 << 20)).unwrap_err();
    assert!(matches!(refused, InstallError::Occupied { .. }), "{refused}");
    assert!(first.finish().unwrap().is_clean());
    // An arena that cannot be built leaves the slot free.
    assert!(matches!(
        install::<Here>(&domain, Arena::builder()).unwrap_err(),
        InstallError::Arena(_)
    ));
    drop(install::<Here>(&domain, Arena::builder().size(1 << 20)).unwrap());
    install::<Here>(&domain, Arena::builder().size(1 << 20)).unwrap().finish().unwrap();
}

#[test]
fn a_leak_of_the_driver_is_reported_and_the_stack_stays() {
    place!(Here);
    let Rig { mut driver, disk, stack, domain: _domain } = Rig::<Here>::new(4 << 20);
    disk.hold();
    let (mut req, mut data, mut resp) = (BlkReq::default(), [0; SECTOR], BlkResp::default());
    // SAFETY: all three are neither moved nor accessed until the completion below.
    let token = unsafe { driver.read_blocks_nb(0, &mut req, &mut data, &mut resp) }.unwrap();
    let leak = stack.finish().unwrap_err();
    assert_eq!((leak.stats.dma_pages_live, leak.stats.shares_live), (2, 4), "{leak}");
    // The stack is still usable: the request completes.
    disk.serve();
    // SAFETY: the same three.
    unsafe { driver.complete_read_blocks(token, &req, &mut data, &mut resp) }.unwrap();
    drop(driver);
    assert!(leak.installed.finish().unwrap().is_clean());
}

#[test]
fn a_stack_dropped_first_stays_until_its_driver_has_freed_all() {
    place!(Here);
    let Rig { driver, disk, stack, domain } = Rig::<Here>::new(4 << 20);
    drop(stack);
    let again = || install::<Here>(&domain, Arena::builder().size(1 << 20));
    assert!(
        matches!(again().unwrap_err(), InstallError::Occupied { stats } if stats.dma_pages_live == 2)
    );
    assert_eq!(
        Driver::<Here>::new(Translated::new(disk.clone())).err(),
        Some(Error::DmaError),
        "another driver gets no rings"
    );
    drop(driver);
    again().unwrap().finish().unwrap();
}

#[test]
fn without_a_stack_a_driver_gets_no_rings() {
    place!(Nowhere);
    let disk = Disk::new(Domain::soft().unwrap().port().unwrap(), 4096);
    assert_eq!(Driver::<Nowhere>::new(Translated::new(disk)).err(), Some(Error::DmaError));
}

#[test]
fn a_disk_behind_an_iommu_refuses_a_driver_without_platform() {
    place!(Here);
    let Rig { driver, disk, stack, domain: _domain } = Rig::<Here>::new(4 << 20);
    drop(driver);
    // Without `Translated` the driver does not notice the refusal and would hang at its first
    // request.
    drop(VirtIOBlk::<PinfoldHal<Here>, _>::new(disk.clone()).unwrap());
    assert!(!disk.get_status().contains(DeviceStatus::FEATURES_OK));
    drop(VirtIOBlk::<PinfoldHal<Here>, _>::new(Translated::new(disk.clone())).unwrap());
    assert!(disk.get_status().contains(DeviceStatus::FEATURES_OK));
    // The device refuses the features nevertheless.
    disk.refuse_all();
    let refused = VirtIOBlk::<PinfoldHal<Here>, _>::new(Translated::new(disk));
    assert_eq!(refused.err(), Some(Error::InvalidParam));
    assert!(stack.finish().unwrap().is_clean());
}

#[test]
fn missing_memory_is_an_error_for_rings_and_panics_for_payloads() {
    place!(Here);
    let mut rig = Rig::<Here>::new(64 << 10);
    let (iova, _) = PinfoldHal::<Here>::dma_alloc(1000, BufferDirection::Both);
    assert_eq!(iova, 0, "a refusal");
    let (iova, _) = PinfoldHal::<Here>::dma_alloc(usize::MAX, BufferDirection::Both);
    assert_eq!(iova, 0, "a refusal");
    let (data, live) = (vec![0; 128 << 10], rig.stack.stats().shares_live);
    // Through the `Hal`, because a driver is not usable after a panic.
    let shared = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the payload is valid and exclusive.
        unsafe {
            PinfoldHal::<Here>::share(data.as_slice().into(), BufferDirection::DriverToDevice)
        }
    }));
    let panic = shared.unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.contains("131072 bytes"), "{message}");
    assert_eq!(rig.stack.stats().shares_live, live, "nothing is half shared");
    rig.driver.read_blocks(0, &mut [0; SECTOR]).unwrap();
    rig.finish();
}

#[test]
fn invalid_frees_are_counted_and_change_nothing() {
    place!(Here);
    let rig = Rig::<Here>::new(4 << 20);
    let (iova, base) = PinfoldHal::<Here>::dma_alloc(2, BufferDirection::Both);
    let mut data = [0; 16];
    let dealloc = |iova, pages| {
        // SAFETY: mostly not what was allocated, on purpose: the address is looked up, and no
        // memory is accessed.
        unsafe { PinfoldHal::<Here>::dma_dealloc(iova, base, pages) }
    };
    assert_eq!((dealloc(iova, 1), dealloc(iova + 4096, 2)), (-1, -1));
    // SAFETY: as above.
    unsafe { PinfoldHal::<Here>::unshare(iova, data.as_mut_slice().into(), BufferDirection::Both) };
    assert_eq!((dealloc(iova, 2), dealloc(iova, 2)), (0, -1));
    let Rig { driver, disk, stack, domain } = rig;
    drop(driver);
    let stats = stack.finish().unwrap();
    assert_eq!((stats.invalid_frees, stats.is_clean()), (4, false));
    drop((disk, domain));
}

#[test]
fn rings_are_zeroed_when_their_frames_are_reused() {
    place!(Here);
    let domain = Domain::soft().unwrap();
    let stack = install::<Here>(&domain, Arena::builder().size(64 << 10)).unwrap();
    for _ in 0..40 {
        let (iova, base) = PinfoldHal::<Here>::dma_alloc(4, BufferDirection::Both);
        assert_ne!(iova, 0);
        for offset in (0..16384).step_by(8) {
            // SAFETY: inside the four pages, which only this test uses.
            let at = unsafe { base.add(offset) }.cast::<u64>();
            // SAFETY: as above, and aligned.
            assert_eq!(unsafe { at.replace(u64::MAX) }, 0);
        }
        // SAFETY: just allocated.
        assert_eq!(unsafe { PinfoldHal::<Here>::dma_dealloc(iova, base, 4) }, 0);
    }
    assert!(stack.finish().unwrap().is_clean());
}

#[test]
fn frames_that_a_hanging_iommu_keeps_are_quarantined() {
    place!(Here);
    let mut config = SoftConfig::default();
    (config.hang_from, config.timeout) = (Some(1), Duration::from_millis(2));
    let domain = Domain::soft_with(config).unwrap();
    let stack = install::<Here>(&domain, Arena::builder().size(1 << 20)).unwrap();
    let hal = |payload: &mut [u8]| {
        // SAFETY: the payload is valid and exclusive.
        let iova =
            unsafe { PinfoldHal::<Here>::share(payload.into(), BufferDirection::DeviceToDriver) };
        // SAFETY: the same one.
        unsafe {
            PinfoldHal::<Here>::unshare(iova, payload.into(), BufferDirection::DeviceToDriver)
        };
    };
    // A copy that is not bounced: the program owns its payload again, and the copy's frames are
    // quarantined.
    hal(&mut [0; BOUNCED_BYTES + 1]);
    let stats = stack.stats();
    let lost = BOUNCED_BYTES as u64 + 4096;
    assert_eq!((stats.shares_live, stats.quarantined_bytes), (0, lost));
    // A bounced payload needs no flush.
    hal(&mut [0; SECTOR]);
    assert_eq!(stack.stats().quarantined_bytes, lost);
    if std::env::var_os(IN_PLACE).is_some() {
        // The process must not continue: unwinding would free memory that the device can reach.
        let mut buffer = stack.arena().alloc(4096).unwrap();
        let unwound = catch_unwind(AssertUnwindSafe(|| hal(buffer.as_mut_slice().unwrap())));
        panic!("the process has continued: {unwound:?}");
    }
    let stats = stack.finish().unwrap();
    assert!(!stats.is_clean(), "{stats}");
    assert_eq!(
        domain.stats().quarantined_bytes,
        lost + 4096,
        "and the page of the bounced payload"
    );
}

/// Set in the process that shares a payload in place although the IOMMU hangs.
const IN_PLACE: &str = "PINFOLD_TEST_IN_PLACE";

#[test]
fn a_payload_that_stays_reachable_in_place_aborts_the_process() {
    let name = "life::frames_that_a_hanging_iommu_keeps_are_quarantined";
    let ended = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(IN_PLACE, "1")
        .output()
        .unwrap();
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&ended.status),
        Some(6),
        "SIGABRT: {ended:?}"
    );
    let stderr = String::from_utf8_lossy(&ended.stderr);
    assert!(stderr.contains("may still access 4096 bytes"), "{stderr}");
}

/// Memory of bounced payloads stays with its pool: it must leave some for rings and longer copies.
#[test]
fn copies_and_rings_have_memory_after_many_bounced_payloads() {
    place!(Here);
    let Rig { driver, stack, .. } = Rig::<Here>::new(2 << 20);
    let mut payloads = vec![[1_u8; BOUNCED_BYTES]; 100];
    let shared: Vec<_> = payloads
        .iter_mut()
        .map(|payload| {
            let payload = NonNull::from(payload as &mut [u8]);
            // SAFETY: valid, and not accessed until it is unshared below.
            (
                unsafe { PinfoldHal::<Here>::share(payload, BufferDirection::DeviceToDriver) },
                payload,
            )
        })
        .collect();
    assert_eq!(stack.stats().shares_bounced, 16, "an eighth of the arena; the others have frames");
    for (at, payload) in shared {
        // SAFETY: shared above at this address, with this direction.
        unsafe { PinfoldHal::<Here>::unshare(at, payload, BufferDirection::DeviceToDriver) };
    }
    let mut long = vec![1_u8; 1 << 20];
    let long = NonNull::from(long.as_mut_slice());
    // SAFETY: valid, and not accessed until it is unshared.
    let at = unsafe { PinfoldHal::<Here>::share(long, BufferDirection::DriverToDevice) };
    // SAFETY: the same.
    unsafe { PinfoldHal::<Here>::unshare(at, long, BufferDirection::DriverToDevice) };
    drop(driver);
    assert!(stack.finish().unwrap().is_clean());
}
