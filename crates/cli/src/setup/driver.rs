//! Starts the NVMe driver on a controller, and finds its namespace.

use super::error::OpenError;
use pinfold::{Arena, MappingPolicy, Source};
use pinfold_nvme::Registers;
use pinfold_nvme::driver::{Config, Controller, Namespace};
use pinfold_nvme::vfio::PciController;
use std::sync::Arc;
use std::time::Duration;

/// How long the driver waits for a completion.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A controller that has been started.
pub(crate) type Driver = Controller<Arc<dyn Registers>, Arena>;

/// Starts a controller with `queues` queues whose memory comes from `memory`.
pub(super) fn start(
    name: &str,
    registers: Arc<dyn Registers>,
    memory: Arena,
    queues: u16,
    retry_limit: Duration,
) -> Result<Driver, OpenError> {
    let config = Config { timeout: TIMEOUT, queues, retry_limit, ..Config::default() };
    Controller::start(registers, memory, config)
        .map_err(|error| OpenError::Driver { name: name.to_owned(), error })
}

/// Starts a real controller with a little memory of its own, to identify it.
pub(super) fn start_alone(name: &str, pci: &PciController) -> Result<Driver, OpenError> {
    let rings =
        Arena::builder().size(1 << 20).source(Source::Plain).mapping_policy(MappingPolicy::Whole);
    let rings = rings.build(pci.domain());
    let rings = rings.map_err(|error| OpenError::Rings { name: name.to_owned(), error })?;
    let Config { queues, retry_limit, .. } = Config::default();
    start(name, pci.registers(), rings, queues, retry_limit)
}

/// Returns the named namespace, or the first usable one.
pub(super) fn find_namespace(
    name: &str,
    controller: &Driver,
    nsid: Option<u32>,
) -> Result<Namespace, OpenError> {
    match nsid {
        None => controller
            .namespaces()
            .first()
            .copied()
            .ok_or_else(|| OpenError::NoNamespace(name.to_owned())),
        Some(nsid) => controller.namespace(nsid).map_err(|reason| OpenError::NoSuchNamespace {
            name: name.to_owned(),
            nsid,
            reason,
        }),
    }
}
