//! `cargo run -p pinfold-nvme --example nvme_wait_epoll`
//!
//! Waits for completions in the program's own `epoll` loop, and collects the controller's events
//! there. It runs on the model controller: no hardware, no privileges.

use pinfold::core::access::FromDevice;
use pinfold::{Arena, Domain};
use pinfold_nvme::Interrupt;
use pinfold_nvme::driver::{Config, Controller, Outcome, Vector};
use pinfold_nvme_model::{MemoryMedia, ModelConfig, ModelController, Namespace};
use rustix::event::{Timespec, epoll};
use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::sync::Arc;

const REQUESTS: u32 = 64;
const BLOCKS: u32 = 8;

fn main() -> std::process::ExitCode {
    // Its message: an error that `main` returned would print its fields.
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let domain = Domain::soft()?;
    let arena = Arena::builder().size(8 << 20).build(&domain)?;
    let namespace = Namespace::new(Arc::new(MemoryMedia::new(64 << 20)?), 512)?;
    let config = ModelConfig { vectors: 2, ..ModelConfig::new(vec![namespace]) };
    let model = ModelController::spawn(domain.port().ok_or("not a software IOMMU")?, config)?;

    let controller = Controller::start(model.registers(), arena.clone(), Config::default())?;
    let interrupt: Arc<dyn Interrupt> = model.interrupt(1).ok_or("no interrupt vector 1")?;
    let mut queue = controller.create_queue_with(8, Vector { number: 1, interrupt })?;

    let poller = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let fd = queue.interrupt_fd().ok_or("the queue is polled")?;
    epoll::add(&poller, fd, epoll::EventData::new_u64(1), epoll::EventFlags::IN)?;

    let (mut submitted, mut completed, mut in_flight) = (0, 0, HashMap::new());
    while completed < REQUESTS {
        while submitted < REQUESTS && in_flight.len() < queue.depth() {
            let buffer = domain.map(arena.alloc(BLOCKS as usize * 512)?, FromDevice)?;
            let read = queue.read(1, u64::from(submitted * BLOCKS), BLOCKS, buffer)?;
            in_flight.insert(read.tag(), read);
            submitted += 1;
        }
        while let Some(completion) = queue.poll()? {
            let read = in_flight.remove(&completion.tag()).ok_or("an unknown request")?;
            let Outcome::Completed { payload, result } = read.finish(completion) else {
                return Err("a request timed out".into());
            };
            result?;
            drop(payload.unmap()?);
            completed += 1;
        }
        // Zero where a completion has arrived since the last poll.
        let limit = Timespec::try_from(queue.arm_interrupt())?;
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); 4];
        epoll::wait(&poller, &mut events, Some(&limit))?;
        // What the controller reports by itself: a program that runs for months reacts to it.
        for event in controller.events()? {
            if event.is_namespace_change() {
                println!("{} namespaces now", controller.scan_namespaces()?.len());
            } else {
                println!("the controller reports {event:?}");
            }
        }
    }
    println!("{completed} reads\n{}", queue.stats());
    Ok(())
}
