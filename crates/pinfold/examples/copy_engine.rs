//! The program of docs/guide.md, "Your first driver in fifteen minutes": a driver for an invented
//! copy engine, and a model of the engine behind the software IOMMU. Between this header and the
//! tests it is the blocks of that page, in their order.
//!
//! `cargo run -p pinfold --example copy_engine`, and with `-- limits` for the errors

use pinfold::Iova;
use pinfold::soft::{Fault, FaultKind, Port, SoftConfig};
use std::sync::mpsc::{self, Receiver};

// The offsets of the fields of a descriptor, which has 32 bytes and is little-endian.
const SOURCE: usize = 0; // u64: where the engine reads
const TARGET: usize = 8; // u64: where it writes
const LENGTH: usize = 16; // u32: how many bytes, 1 MiB at most
const STATUS: usize = 20; // u32, by the engine, written last: DONE or FAULTED
const DONE: u32 = 1;
const FAULTED: u32 = 2;

/// Carries out the descriptors whose addresses are written to SUBMIT.
fn engine_model(port: &Port, submit: &Receiver<Iova>) -> Result<(), Fault> {
    for descriptor in submit {
        let at = |offset: usize| Iova::new(descriptor.raw() + offset as u64);
        let source = Iova::new(u64::from_le(port.read_u64(at(SOURCE))?));
        let target = Iova::new(u64::from_le(port.read_u64(at(TARGET))?));
        let length = u32::from_le(port.read_u32_acquire(at(LENGTH))?).min(1 << 20);
        let mut data = vec![0; length as usize];
        let moved = port.read(source, &mut data).and_then(|()| port.write(target, &data));
        let status = if moved.is_ok() { DONE } else { FAULTED };
        port.write_u32_release(at(STATUS), status.to_le())?;
    }
    Ok(())
}

use pinfold::dma_pool::{Block, PoolLocal};
use pinfold::requests::{End, Ended, Limits, Policy, Requests, Token};
use pinfold::{Access, Arena, Buffer, DmaPool, Domain};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Writes an address to SUBMIT.
type Submit = Box<dyn FnMut(Iova) -> Outcome<()> + Send>;

struct Driver {
    requests: Requests<Buffer, 2>,
    descriptors: PoolLocal,
    submit: Submit,
    in_flight: Vec<(Token, Block)>,
}

impl Driver {
    fn new(domain: &Domain, arena: &Arena, submit: Submit) -> Outcome<Self> {
        let pool = DmaPool::builder("descriptors").block(32).align(32).build(arena)?;
        let requests = Requests::new(domain, Policy::Batch, 32, Limits::default())?;
        Ok(Self { requests, descriptors: pool.local(), submit, in_flight: Vec::new() })
    }
}

impl Driver {
    fn submit(&mut self, source: Buffer, target: Buffer) -> Outcome<()> {
        let length = u32::try_from(source.len().min(target.len()))?;
        let descriptor = self.descriptors.alloc_zeroed()?;
        let token = self.requests.begin([(source, Access::READ), (target, Access::WRITE)])?;
        let memory = descriptor.memory();
        for (at, segment) in [SOURCE, TARGET].into_iter().zip(self.requests.segments(token)?) {
            memory.write_u64(at, segment.iova.raw().to_le())?;
        }
        memory.write_u32(LENGTH, length.to_le())?;
        if let Err(error) = (self.submit)(descriptor.iova()) {
            drop(self.requests.refused(token)?); // the buffers, which the engine has not seen
            return Err(error);
        }
        self.in_flight.push((token, descriptor));
        Ok(())
    }
}

use std::time::{Duration, Instant};

impl Driver {
    /// Says which requests have completed, and appends those whose buffers come back.
    fn poll(&mut self, ended: &mut Vec<Ended<Buffer, 2>>) -> Outcome<()> {
        let mut index = 0;
        while let Some((token, descriptor)) = self.in_flight.get(index) {
            match u32::from_le(descriptor.memory().load_acquire_u32(STATUS)?) {
                0 => index += 1,
                DONE => {
                    self.requests.completed(*token)?;
                    self.descriptors.free(self.in_flight.remove(index).1);
                }
                _ => return Err("the engine could not reach a buffer".into()),
            }
        }
        self.requests.poll(ended);
        Ok(())
    }

    /// Polls until all buffers have come back, for 10 s at most: a source, its target, the next ...
    fn complete_all(&mut self) -> Outcome<Vec<Buffer>> {
        let (mut buffers, mut ended, start) = (Vec::new(), Vec::new(), Instant::now());
        while self.requests.in_flight() + self.requests.held() > 0 {
            self.poll(&mut ended)?;
            for request in ended.drain(..) {
                match request.end {
                    End::Quiesced => buffers.extend(request.payloads.into_iter().flatten()),
                    End::Late(error) | End::Lost(error) => return Err(error.into()),
                }
            }
            if start.elapsed() > Duration::from_secs(10) {
                return Err("the engine did not complete in 10 s".into());
            }
            std::thread::yield_now();
        }
        Ok(buffers)
    }
}

fn with_model() -> Outcome<()> {
    let domain = Domain::soft()?;
    let bus = domain.soft_bus().ok_or("not a software IOMMU")?;
    let arena = Arena::builder().size(4 << 20).build(&domain)?; // hugepages if available
    let (port, (register, submitted)) = (bus.port(), mpsc::channel());
    let engine = std::thread::spawn(move || engine_model(&port, &submitted));
    let submit = Box::new(move |address| Ok(register.send(address)?));
    let mut driver = Driver::new(&domain, &arena, submit)?;

    for fill in 1..=8 {
        let mut source = arena.alloc(4096)?;
        source.as_mut_slice()?.fill(fill);
        driver.submit(source, arena.alloc(4096)?)?;
    }
    let rogue = bus.port();
    let (last, _) = driver.in_flight.last().ok_or("eight are in flight")?;
    let kept = driver.requests.segments(*last)?.nth(1).ok_or("a source and a target")?.iova;
    rogue.write(kept, &[8; 16])?; // what the engine copies there

    let thread = std::thread::spawn(move || driver.complete_all());
    let mut buffers = thread.join().map_err(|_| "the driver panicked")??;
    for (number, [source, target]) in buffers.as_chunks_mut().0.iter_mut().enumerate() {
        println!("copy {number} identical: {}", source.as_slice()? == target.as_slice()?);
    }
    let fault = rogue.write(kept, b"late").err().ok_or("the write must fault")?;
    println!("{fault}");
    assert_eq!(fault.kind, FaultKind::NotMapped);
    engine.join().map_err(|_| "the engine panicked")??;
    Ok(())
}

impl Driver {
    /// Returns the buffers of all requests after a reset of the engine.
    fn after_reset(&mut self) -> Outcome<Vec<Buffer>> {
        self.requests.stopped();
        self.in_flight.drain(..).for_each(|(_, descriptor)| self.descriptors.free(descriptor));
        self.complete_all()
    }
}

fn limits() -> Outcome<()> {
    let domain = Domain::soft()?;
    let arena = Arena::builder().size(4 << 20).build(&domain)?;
    let refused = arena.alloc(8 << 20).err().ok_or("the arena has 4 MiB")?;
    println!("{refused}");

    // An engine that never answers.
    let mut driver = Driver::new(&domain, &arena, Box::new(|_| Ok(())))?;
    driver.submit(arena.alloc(4096)?, arena.alloc(4096)?)?;
    println!("{} buffers came back", driver.after_reset()?.len());

    // An IOMMU that hangs at its first flush.
    let domain = Domain::soft_with(SoftConfig { hang_from: Some(1), ..SoftConfig::default() })?;
    let arena = Arena::builder().size(4 << 20).build(&domain)?;
    let limits = Limits { flush: Duration::from_millis(20), ..Limits::default() };
    let mut requests = Requests::<_, 1>::new(&domain, Policy::Strict, 1, limits)?;
    let token = requests.begin([(arena.alloc(4096)?, Access::WRITE)])?;
    requests.completed(token)?;
    let mut ended = Vec::new();
    requests.poll(&mut ended);
    assert_eq!((ended.len(), requests.late()), (1, 1));
    for request in ended {
        if let End::Late(error) = request.end {
            println!("{error}");
        }
    }
    drop(requests); // or keep it, and poll again
    assert_eq!((domain.stats().deferred, domain.stats().quarantined), (1, 0));
    Ok(())
}

use pinfold::vfio::{Device, Options};

fn with_device(address: &str) -> Outcome<()> {
    let device = Device::open(address, &Options::new())?;
    let arena = Arena::builder().size(4 << 20).build(device.domain())?;
    let registers = device.bar(0)?;
    device.set_bus_master(true)?; // from here on it may access memory
    let submit = Box::new(move |address: Iova| Ok(registers.write64(0, address.raw())?));
    let mut driver = Driver::new(device.domain(), &arena, submit)?;
    driver.submit(arena.alloc_zeroed(4096)?, arena.alloc(4096)?)?;
    println!("{} buffers came back", driver.complete_all()?.len());
    Ok(())
}

fn main() -> std::process::ExitCode {
    let done = match std::env::args().nth(1).as_deref() {
        None => with_model(),
        Some("limits") => limits(),
        Some(address) => with_device(address),
    };
    // Its message: an error that `main` returned would print its fields.
    if let Err(error) = done {
        eprintln!("{error}");
        return std::process::ExitCode::FAILURE;
    }
    std::process::ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    /// Returns the blocks of Rust of a page, in their order.
    fn blocks(page: &str) -> Vec<&str> {
        let blocks = page.split("```rust\n").skip(1);
        blocks.filter_map(|rest| Some(rest.split_once("\n```")?.0)).collect()
    }

    #[test]
    fn the_example_is_the_blocks_of_the_guide_in_their_order() {
        let guide = blocks(include_str!("../../../docs/guide.md"));
        assert!(guide.len() > 5, "{} blocks of Rust", guide.len());
        let program = include_str!("copy_engine.rs").split_once("\n\n").unwrap().1;
        let left = guide.into_iter().fold(program, |program, block| {
            let after = program.trim_start().strip_prefix(block);
            after.unwrap_or_else(|| {
                panic!("docs/guide.md has this where the example differs:\n{block}")
            })
        });
        assert!(left.starts_with("\n\n#[cfg(test)]"), "more than the guide has: {left}");
    }

    #[test]
    fn the_program_of_the_guide_runs() {
        super::with_model().unwrap();
        super::limits().unwrap();
        super::with_device("no address").unwrap_err();
    }
}
