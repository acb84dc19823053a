//! The model controller as its user holds it.

use crate::bus::Bus;
use crate::config::ModelConfig;
use crate::engine::Engine;
use crate::error::ModelError;
use crate::faults::Faults;
use crate::registers::{ModelRegisters, RegisterFile};
use crate::stats::{Counters, ModelStats};
use pinfold_nvme::EventFd;
use pinfold_nvme::spec::Cap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{JoinHandle, Thread};

/// A model controller, running until it is dropped.
pub struct ModelController {
    shared: Arc<RegisterFile>,
    counters: Arc<Counters>,
    faults: Faults,
    vectors: Vec<Arc<EventFd>>,
    thread: Thread,
    join: Option<JoinHandle<()>>,
}

impl fmt::Debug for ModelController {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelController").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl ModelController {
    /// Starts a controller that reaches memory by `bus`. It is disabled, as after a reset.
    ///
    /// # Errors
    /// [`ModelError::OutOfRange`] naming the field, [`ModelError::Vector`], [`ModelError::Thread`].
    pub fn spawn(bus: impl Bus, config: ModelConfig) -> Result<Self, ModelError> {
        let check = |name, value: u64, min, max| match value {
            v if (min..=max).contains(&v) => Ok(()),
            value => Err(ModelError::OutOfRange { name, value, min, max }),
        };
        check("namespaces", config.namespaces.len() as u64, 1, 1024)?;
        check("mdts", config.mdts.into(), 0, 20)?;
        check("mqes", config.mqes.into(), 1, 65535)?;
        check("queues", config.queues.into(), 1, 255)?;
        check("timeout_500ms", config.timeout_500ms.into(), 1, 255)?;
        check("stride_shift", config.stride_shift.into(), 0, 8)?;
        check("vectors", config.vectors.into(), 0, 2048)?;
        let event = |vector| match EventFd::new() {
            Ok(event) => Ok(Arc::new(event)),
            Err(error) => Err(ModelError::Vector { vector, error }),
        };
        let vectors = (0..config.vectors).map(event).collect::<Result<Vec<_>, _>>()?;
        let cap = Cap::new(config.mqes, config.timeout_500ms, config.stride_shift);
        let shared = Arc::new(RegisterFile::new(cap, config.version, config.queues));
        let counters = Arc::new(Counters::default());
        let bus = Arc::new(bus);
        // The thread is needed by what the thread is given: it waits for its first message before it runs.
        let (send, receive) = std::sync::mpsc::channel::<Engine<_>>();
        let join = std::thread::Builder::new()
            .name("nvme-model".into())
            .spawn(move || {
                if let Ok(engine) = receive.recv() {
                    engine.run();
                }
            })
            .map_err(ModelError::Thread)?;
        let thread = join.thread().clone();
        let faults = {
            let (shared, thread) = (shared.clone(), thread.clone());
            Faults::new(bus.clone(), Box::new(move || shared.wake(&thread)))
        };
        let engine =
            Engine::new(shared.clone(), bus, (faults.clone(), vectors.clone()), counters.clone(), config);
        // The thread waits in `recv`, so it takes it; were it dead, `drop` would find out by joining.
        drop(send.send(engine));
        Ok(Self { shared, counters, faults, vectors, thread, join: Some(join) })
    }

    /// The register file, for the driver. It may outlive the controller: then it reads as all ones,
    /// like that of a device that was pulled out.
    pub fn registers(&self) -> ModelRegisters {
        ModelRegisters { shared: self.shared.clone(), thread: self.thread.clone() }
    }

    /// What interrupt vector `vector` arrives at, if there is one of this number.
    pub fn interrupt(&self, vector: u16) -> Option<Arc<EventFd>> {
        self.vectors.get(usize::from(vector)).cloned()
    }

    /// The handle by which faults are injected.
    pub fn faults(&self) -> Faults {
        self.faults.clone()
    }

    /// What it did so far.
    pub fn stats(&self) -> ModelStats {
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        ModelStats {
            commands: get(&self.counters.commands),
            errors: get(&self.counters.errors),
            bytes_read: get(&self.counters.bytes_read),
            bytes_written: get(&self.counters.bytes_written),
            interrupts: get(&self.counters.interrupts),
            doorbells: get(&self.shared.doorbells),
            bad_doorbells: get(&self.shared.bad_doorbells),
            shutdowns: get(&self.counters.shutdowns),
            early_changes: get(&self.shared.early_changes),
        }
    }
}

impl Drop for ModelController {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.thread.unpark();
        if let Some(join) = self.join.take() {
            // A panic of the model's thread has been printed; there is nobody else to tell.
            drop(join.join());
        }
    }
}
