//! `cargo run -p pinfold --example vfio_check BDF`
//!
//! Checks the guarantees of the VFIO and iommufd backends on a real device:
//! `vfio_check BDF [WHAT]`. The device must be an NVMe controller that is bound to `vfio-pci`; it
//! is not written to.
//!
//! `WHAT` is `device` (registers, memory, interrupts; the default), `entries` (the limit of entries
//! was lowered to 16: `echo 16 > /sys/module/vfio_iommu_type1/parameters/dma_entry_limit`),
//! `memlock` (run by a user without `CAP_IPC_LOCK`, under `ulimit -l 8192`) or `charge` (what the
//! kernel charges for a mapping, and what was forecast; needs a hugepage of 2 MiB). A word
//! `iommufd`, `type1` or `noiommu` selects the interface. `with=BDF` puts a second device into the
//! same domain.

use pinfold::arena::Residency;
use pinfold::core::access::Bidirectional;
use pinfold::core::domain::BackendError;
use pinfold::folios::Survey;
use pinfold::vfio::{Device, IommuInterface, Options};
use pinfold::{Arena, Domain, MappingPolicy, OwnedMemory, Source};
use std::error::Error;
use std::process::ExitCode;

/// Whether a guarantee holds.
pub(crate) type Outcome = Result<(), Box<dyn Error>>;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Checks as the words say. Also used by the tests of `pinfold check`.
pub(crate) fn run(words: &[String]) -> Outcome {
    let has = |word: &str| words.iter().any(|w| w == word);
    let address = words
        .first()
        .ok_or("usage: vfio_check BDF [device|entries|memlock|charge] [type1|iommufd]")?;
    let interfaces = [
        ("type1", IommuInterface::Type1),
        ("iommufd", IommuInterface::Iommufd),
        ("noiommu", IommuInterface::NoIommu),
    ];
    let named = interfaces.iter().find(|(word, _)| has(word));
    let interface = named.map_or(IommuInterface::Best, |(_, interface)| *interface);
    let options = match interface {
        // SAFETY: the controller is left disabled, so it makes no access, whatever is mapped and
        // unmapped below.
        IommuInterface::NoIommu => unsafe { Options::new().without_iommu() },
        interface => Options::new().interface(interface),
    };
    let device = Device::open(address, &options)?;
    let attachment = device.attachment();
    println!("{address}: {} ({:x?})", attachment.reason, attachment.limits);
    let second = words.iter().find_map(|word| word.strip_prefix("with="));
    let second = second.map(|name| Device::open_in(name, device.domain(), &options)).transpose()?;
    if let Some(second) = &second {
        println!("{}: {}", second.address(), second.attachment().reason);
        registers(second)?;
        check(
            "a device can be opened once",
            Device::open(&second.address().to_string(), &Options::new()).is_err(),
        )?;
    }
    match () {
        () if has("entries") => entries(device.domain())?,
        () if has("memlock") => memlock(device.domain())?,
        () if has("charge") => charge(device.domain())?,
        () if interface == IommuInterface::NoIommu => unprotected(&device)?,
        () => whole(&device)?,
    }
    let stats = device.domain().stats();
    check(
        "no mapping is left behind",
        stats.backend.entries == 0 && stats.backend.pinned_bytes == 0,
    )?;
    check("nothing is in quarantine", stats.quarantined == 0)?;
    println!("ok");
    Ok(())
}

fn check(what: &str, holds: bool) -> Outcome {
    println!("{}: {what}", if holds { "yes" } else { "NO" });
    if holds { Ok(()) } else { Err(format!("not so: {what}").into()) }
}

fn whole(device: &Device) -> Outcome {
    registers(device)?;
    memory(device.domain())?;
    late(device.domain())
}

fn registers(device: &Device) -> Outcome {
    let ids = device.ids()?;
    let bar = device.bar(0)?;
    let (cap, version) = (bar.read64(0)?, bar.read32(8)?);
    println!(
        "{ids:x?} {bar:?} CAP {cap:#x} VS {version:#x}, {} interrupts",
        device.max_interrupts()?
    );
    check(
        "it is an NVMe controller",
        ids.class >> 8 == 0x0108 && (1..=2).contains(&(version >> 16)),
    )?;
    check(
        "two halves are the whole",
        u64::from(bar.read32(4)?) << 32 | u64::from(bar.read32(0)?) == cap,
    )?;
    check(
        "accesses outside and across are refused",
        bar.read32(bar.len()).is_err() && bar.read32(2).is_err(),
    )?;
    device.set_bus_master(true)?;
    device.reset()?;
    check("it responds after a reset", bar.read64(0)? == cap)?;
    let irqs = device.interrupts(2)?;
    check("no spurious interrupt", irqs.iter().all(|irq| irq.take() == Ok(0)))?;
    check("interrupts can be enabled once", device.interrupts(1).is_err())?;
    drop(irqs);
    check("and again after they are disabled", device.interrupts(3)?.len() == 3)?;
    check("the kernel does not request the device", device.request()?.take() == Ok(0))?;
    check("more interrupts than the device has are refused", device.interrupts(100_000).is_err())
}

fn memory(domain: &Domain) -> Outcome {
    let whole =
        Arena::builder().size(64 << 20).mapping_policy(MappingPolicy::Whole).build(domain)?;
    println!("64 MiB from {} at {}", whole.report().source, whole.iova());
    check("an arena is one entry", domain.stats().backend.entries == 1)?;
    let arena = Arena::builder().size(16 << 20).build(domain)?;
    let mapped = domain.map(arena.alloc(1 << 20)?, Bidirectional)?;
    let iova = mapped.iova();
    check("a buffer is one entry", domain.stats().backend.entries == 2)?;
    check(
        "its address is not in the window for interrupts",
        iova.end().raw() <= 0xfee0_0000 || iova.start().raw() >= 0xfef0_0000,
    )?;
    let revoked = mapped.revoke();
    check("a revocation completes at once", revoked.is_quiesced())?;
    let mut buffer = revoked.wait().map_err(|refused| refused.error)?;
    check("the buffer is accessible again", buffer.as_mut_slice().is_ok())?;
    let mapped = domain.map(buffer, Bidirectional)?;
    check("its addresses are reused", mapped.iova() == iova)?;
    drop(mapped);
    let many: Vec<_> = (0..64)
        .map(|_| Ok(domain.map(arena.alloc(4096)?, Bidirectional)?))
        .collect::<Result<_, Box<dyn Error>>>()?;
    let mut revoked = Vec::new();
    domain.revoke_many(many, &mut revoked);
    check(
        "64 at once",
        revoked.iter().all(|r| r.is_quiesced()) && domain.stats().backend.entries == 1,
    )
}

/// Memory that exists before its device is known.
fn late(domain: &Domain) -> Outcome {
    let builder = Arena::builder().size(16 << 20).mapping_policy(MappingPolicy::Whole);
    let memory = builder.build_unmapped()?;
    let buffer = memory.alloc(1 << 20)?;
    let arena = memory.map_into(domain)?;
    check("an arena that is mapped later is one entry", domain.stats().backend.entries == 1)?;
    let locked = matches!(arena.report().residency, Residency::Locked);
    check("it is pinned by its mapping and not locked", !locked)?;
    let fixed = arena.iova_of(&buffer);
    let mapped = domain.map(buffer, Bidirectional)?;
    check(
        "its buffers are mapped with it",
        Some(mapped.iova().start()) == fixed && mapped.is_fixed(),
    )
}

/// Checks a device without translation.
fn unprotected(device: &Device) -> Outcome {
    registers(device)?;
    let domain = device.domain();
    check("the backend reports that there is none", domain.name() == "none")?;
    let two = Arena::builder()
        .size(2 << 20)
        .source(Source::Hugetlb2M)
        .mapping_policy(MappingPolicy::Whole);
    let arena = two.build(domain)?;
    println!("a hugepage at {}", arena.iova());
    check("hugetlb memory needs no pin", arena.report().residency == Residency::Hugetlb)?;
    check(
        "it is where a hugepage can be",
        arena.iova().raw() > 0 && arena.iova().raw() % (2 << 20) == 0,
    )?;
    let buffer = arena.alloc(8192)?;
    let fixed = arena.iova_of(&buffer);
    let mapped = domain.map(buffer, Bidirectional)?;
    check(
        "a buffer of it is mapped already",
        Some(mapped.iova().start()) == fixed && mapped.is_fixed(),
    )?;
    drop(mapped);
    let scattered = Arena::builder()
        .size(2 << 20)
        .source(Source::Plain)
        .mapping_policy(MappingPolicy::Whole)
        .build(domain);
    match scattered {
        // The device finds it at one address, so its pages are beside one another by chance.
        Ok(arena) => check("plain pages have an address", arena.iova().raw() > 0)?,
        Err(refused) => {
            println!("{refused}");
            check("scattered pages are refused", refused.to_string().contains("contiguous"))?;
        }
    }
    let per_use = Arena::builder().size(2 << 20).source(Source::Hugetlb2M).build(domain);
    println!("{}", per_use.as_ref().err().map(ToString::to_string).unwrap_or_default());
    check("a per-use arena is refused, because nothing can be revoked", per_use.is_err())
}

/// Maps until the limit of entries, which the kernel of this check sets to 16.
fn entries(domain: &Domain) -> Outcome {
    let limit = domain.stats().backend.entries_limit;
    println!("the kernel allows {limit:?} entries");
    check("the limit is reported in advance", limit == Some(16))?;
    let arena = Arena::builder().size(16 << 20).build(domain)?;
    let mut mapped = Vec::new();
    let error = loop {
        match domain.map(arena.alloc(4096)?, Bidirectional) {
            Ok(one) => mapped.push(one),
            Err(refused) => break refused.error,
        }
    };
    println!("{error}");
    check("all of them can be used", mapped.len() == 16)?;
    check("the error names the limit", matches!(error, BackendError::NoEntries { limit: 16, .. }))?;
    mapped.pop();
    check("a released one can be used again", domain.map(arena.alloc(4096)?, Bidirectional).is_ok())
}

/// 8 MiB may be locked.
fn memlock(domain: &Domain) -> Outcome {
    let arena = Arena::builder().size(32 << 20).source(Source::Plain).build(domain)?;
    println!("{:?}", arena.report().residency);
    let fits = domain.map(arena.alloc(4 << 20)?, Bidirectional)?;
    let refused =
        domain.map(arena.alloc(16 << 20)?, Bidirectional).err().ok_or("16 MiB were pinned")?;
    println!("{}", refused.error);
    let BackendError::LockedMemory { asked, limit, .. } = refused.error else {
        return Err("not the error of the limit".into());
    };
    check("the error names the request and the limit", (asked, limit) == (16 << 20, 8 << 20))?;
    check("the error returns the buffer", refused.payload.is_some())?;
    let late =
        domain.map(arena.alloc(6 << 20)?, Bidirectional).err().ok_or("4 and 6 MiB were pinned")?;
    println!("{}", late.error);
    check(
        "memory that is pinned already counts",
        matches!(late.error, BackendError::LockedMemory { .. }),
    )?;
    drop(fits);
    check(
        "unmapped memory may be pinned again",
        domain.map(arena.alloc(6 << 20)?, Bidirectional).is_ok(),
    )
}

/// Returns the bytes that count as locked or pinned by this process, by the kernel: type1 adds to
/// the first, iommufd to the second.
fn charged() -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mut sum = 0;
    for name in ["VmLck:", "VmPin:"] {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        sum += kib.ok_or(name)?.parse::<u64>()? << 10;
    }
    Ok(sum)
}

/// Compares the kernel's charge for mappings with the forecast.
fn charge(domain: &Domain) -> Outcome {
    let before = charged()?;
    let memory = OwnedMemory::from_vec(vec![1_u8; (5 << 20) + 100])?;
    let forecast = memory.survey()?.forecast();
    memory.map_into(domain, MappingPolicy::Whole)?;
    println!("{forecast}; by the kernel: {}", charged()? - before);
    check("memory is charged as was forecast", charged()? == before + forecast.mapping)?;
    memory.reclaim::<Vec<u8>>()?;
    check("and not when it is unmapped", charged()? == before)?;
    // Of hugepages a mapping is charged its own pages of 4 KiB, and the next one its own.
    let arena = Arena::builder().size(2 << 20).source(Source::Hugetlb2M).build(domain)?;
    let before = charged()?;
    let (mut sum, mut mapped) = (0, Vec::new());
    for pages in [5, 1, 64] {
        let buffer = arena.alloc(pages * 4096)?;
        let forecast = Survey::new(buffer.memory().addr(), buffer.len() as u64)?.forecast();
        check("a ring would be charged the hugepage", forecast.ring == 2 << 20)?;
        mapped.push(domain.map(buffer, Bidirectional)?);
        sum += forecast.mapping;
        println!("{forecast}; by the kernel for all: {}", charged()? - before);
        check("a part of a hugepage is charged as was forecast", charged()? == before + sum)?;
    }
    drop(mapped);
    check("and not when it is unmapped", charged()? == before)
}
