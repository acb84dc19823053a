//! 64 queue pairs, and the memory of their PRP lists: at rest, and with requests in flight.

use crate::report::Report;
use pinfold::{Arena, Domain, FromDevice};
use pinfold_nvme::driver::{Config, Controller, Outcome};
use pinfold_nvme_model::{MemoryMedia, ModelConfig, ModelController, Namespace};
use std::collections::VecDeque;
use std::error::Error;
use std::sync::Arc;

const QUEUES: u16 = 64;
/// Requests in flight in each queue pair.
const DEPTH: usize = 16;
/// Sixteen pages: more than the two that a command has room for.
const TRANSFER: usize = 64 << 10;
const BLOCK: usize = 512;
const PAGE: u64 = 4096;
/// The published pool of a queue pair.
const PUBLISHED: u64 = 4 << 20;

pub(super) fn run(report: &mut Report) -> Result<(), Box<dyn Error>> {
    report.section("there");
    report.figure("bytes of lists for each queue pair, whatever is in flight", PUBLISHED, "");
    report.figure("queue pairs", QUEUES, "");
    report.figure("bytes of lists for all of them", PUBLISHED * u64::from(QUEUES), "");

    report.section("here, on the model controller");
    let domain = Domain::soft()?;
    let arena = Arena::builder().size(160 << 20).build(&domain)?;
    let namespace = Namespace::new(Arc::new(MemoryMedia::new(64 << 20)?), 512)?;
    let port = domain.port().ok_or("not a software IOMMU")?;
    let config = ModelConfig { queues: QUEUES, ..ModelConfig::new(vec![namespace]) };
    let model = ModelController::spawn(port, config)?;
    let config = Config { queues: QUEUES, ..Config::default() };
    let controller = Controller::start(model.registers(), arena.clone(), config)?;
    let mut queues =
        (0..QUEUES).map(|_| controller.create_queue(DEPTH)).collect::<Result<Vec<_>, _>>()?;
    let idle = controller.list_pool();
    report.figure("queue pairs", queues.len(), "");
    report.figure("bytes of lists without a request", idle.bytes, "");

    // Every queue pair is full of requests that need a list. Their lists stay in use until the
    // driver has seen the completions, so the count does not depend on the controller's speed.
    let mut requests = Vec::new();
    let blocks = u32::try_from(TRANSFER / BLOCK)?;
    for queue in &mut queues {
        let mut in_flight = VecDeque::new();
        for number in 0..DEPTH as u64 {
            let payload = domain.map(arena.alloc(TRANSFER)?, FromDevice)?;
            in_flight.push_back(queue.read(1, number * u64::from(blocks), blocks, payload)?);
        }
        queue.ring_doorbell();
        requests.push(in_flight);
    }
    let busy = controller.list_pool();
    let in_flight = queues.len() * DEPTH;
    report.figure("requests of 64 KiB in flight", in_flight, "");
    report.figure("bytes of lists in use", busy.in_use * PAGE, "");
    report.figure("bytes of lists allocated, free ones included", busy.bytes, "");

    let mut completed = 0;
    for (queue, requests) in queues.iter_mut().zip(requests) {
        let mut waiting: Vec<_> = requests.into();
        while !waiting.is_empty() {
            let completion = queue.wait()?.ok_or("no request is in flight")?;
            let tag = completion.tag();
            let place = waiting.iter().position(|request| request.tag() == tag);
            let request = waiting.swap_remove(place.ok_or("an unknown completion")?);
            match request.finish(completion) {
                Outcome::Completed { payload, result } => {
                    result?;
                    drop(payload.unmap()?);
                    completed += 1;
                }
                _ => return Err("a request timed out".into()),
            }
        }
    }
    let after = controller.list_pool();
    report.figure("requests completed", completed, "");
    report.figure("bytes of lists in use afterwards", after.in_use * PAGE, "");

    report.promise("a queue pair at rest has no list", idle.bytes == 0 && after.in_use == 0);
    report.promise(
        "a request in flight that needs a list has one page of it",
        busy.in_use == in_flight as u64 && completed == in_flight,
    );
    report.promise(
        "all queue pairs together take less than a tenth of the published memory",
        busy.bytes < PUBLISHED * u64::from(QUEUES) / 10,
    );
    Ok(())
}
