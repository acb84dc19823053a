//! [`ModelController`]: starts the model, and gives access to its registers, interrupts, faults and
//! counters.

use crate::bus::Bus;
use crate::config::{Counters, ModelConfig, ModelError, ModelStats};
use crate::door::{Door, InterruptSink};
use crate::engine::{Engine, EngineParts};
use crate::faults::Faults;
use crate::registers::{ModelRegisters, RegisterFile};
use pinfold::Signals;
use pinfold_core::domain::DomainId;
use pinfold_nvme::EventFd;
use pinfold_nvme::spec::Cap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// The eventfds of a controller without another sink.
struct EventFds(Vec<Arc<EventFd>>);

impl InterruptSink for EventFds {
    fn raise(&self, vector: u16) {
        if let Some(event) = self.0.get(usize::from(vector)) {
            event.signal();
        }
    }
}

/// A model controller. It runs until it is dropped.
pub struct ModelController {
    registers: Arc<RegisterFile>,
    counters: Arc<Counters>,
    faults: Faults,
    vectors: Vec<Arc<EventFd>>,
    thread: Thread,
    domain: Option<DomainId>,
    join: Option<JoinHandle<()>>,
}

impl fmt::Debug for ModelController {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelController").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl ModelController {
    /// Starts a controller that accesses memory through `bus`. It is disabled, as after a reset.
    ///
    /// # Errors
    /// [`ModelError::OutOfRange`] naming the field, [`ModelError::Vector`], [`ModelError::Thread`].
    pub fn spawn(bus: impl Bus, config: ModelConfig) -> Result<Self, ModelError> {
        Self::spawn_behind(bus, config, Door::default())
    }

    /// Starts a controller as [`spawn`](Self::spawn) does, which a program reaches through `door`.
    ///
    /// # Errors
    /// Those of [`spawn`](Self::spawn).
    pub fn spawn_behind(
        bus: impl Bus,
        config: ModelConfig,
        door: Door,
    ) -> Result<Self, ModelError> {
        let check = |name, value: u64, min, max| match value {
            v if (min..=max).contains(&v) => Ok(()),
            value => Err(ModelError::OutOfRange { name, value, min, max }),
        };
        check("namespaces", config.namespaces.len() as u64, 1, 1024)?;
        check("mdts", config.mdts.into(), 0, 20)?;
        check("mpsmin", config.mpsmin.into(), 0, 4)?;
        check("mqes", config.mqes.into(), 1, 65535)?;
        check("queues", config.queues.into(), 1, 255)?;
        check("timeout_500ms", config.timeout_500ms.into(), 1, 255)?;
        check("stride_shift", config.stride_shift.into(), 0, 8)?;
        check("vectors", config.vectors.into(), 0, 2048)?;
        let event = |vector| match EventFd::new() {
            Ok(event) => Ok(Arc::new(event)),
            Err(error) => Err(ModelError::Vector { vector, error }),
        };
        let own = if door.interrupts.is_some() { 0 } else { config.vectors };
        let vectors = (0..own).map(event).collect::<Result<Vec<_>, _>>()?;
        let interrupts =
            door.interrupts.clone().unwrap_or_else(|| Arc::new(EventFds(vectors.clone())));
        let Cap(cap) = Cap::new(config.mqes, config.timeout_500ms, config.stride_shift);
        // MPSMIN in bits 51:48, MPSMAX in bits 55:52.
        let cap = Cap(cap | u64::from(config.mpsmin) << 48 | u64::from(config.mpsmin) << 52);
        let registers = RegisterFile::new(cap, config.version, config.queues, door.window);
        let registers = Arc::new(registers);
        let counters = Arc::new(Counters::default());
        let domain = bus.domain();
        let bus = Arc::new(bus);
        // The engine needs a handle of its own thread, which therefore waits for it.
        let (send, receive) = std::sync::mpsc::channel::<Engine<_>>();
        let thread = std::thread::Builder::new().name("nvme-model".into());
        let run = move || {
            if let Ok(engine) = receive.recv() {
                engine.run();
            }
        };
        let join = Signals::blocked_while(|| thread.spawn(run)).map_err(ModelError::Thread)?;
        let thread = join.thread().clone();
        let faults = {
            let (registers, thread) = (registers.clone(), thread.clone());
            Faults::new(bus.clone(), Box::new(move || registers.wake(&thread)))
        };
        let engine = Engine::new(
            EngineParts {
                registers: registers.clone(),
                bus,
                faults: faults.clone(),
                interrupts,
                observer: door.observer,
                counters: counters.clone(),
            },
            config,
        );
        // Cannot fail: the thread waits in `recv`.
        drop(send.send(engine));
        Ok(Self { registers, counters, faults, vectors, thread, domain, join: Some(join) })
    }

    /// Returns the registers, for the driver. They may outlive the controller: then they read as
    /// all ones, like those of a removed device.
    pub fn registers(&self) -> ModelRegisters {
        let (file, thread) = (self.registers.clone(), self.thread.clone());
        ModelRegisters { file, thread, domain: self.domain }
    }

    /// Returns the eventfd at which interrupt `vector` arrives, if the controller has that vector.
    pub fn interrupt(&self, vector: u16) -> Option<Arc<EventFd>> {
        self.vectors.get(usize::from(vector)).cloned()
    }

    /// Returns the handle for fault injection.
    pub fn faults(&self) -> Faults {
        self.faults.clone()
    }

    /// Resets the function: queues and commands in flight are gone, and when it returns the
    /// controller makes no more accesses until it is enabled.
    ///
    /// It waits for the command that is being executed, for at most a second. A controller that was
    /// removed is not reset.
    pub fn reset(&self) {
        const LIMIT: Duration = Duration::from_secs(1);
        let start = Instant::now();
        self.registers.request_reset();
        self.thread.unpark();
        while self.registers.is_reset_pending() && !self.is_removed() && start.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Returns whether the engine sleeps because it has found nothing to do but commands that are
    /// held. It may be about to look once more, so one answer proves nothing: for tests that wait
    /// until a controller is idle.
    pub fn is_idle(&self) -> bool {
        self.registers.is_parked()
    }

    /// Returns whether the controller was removed ([`Fault::Remove`](crate::Fault::Remove)).
    pub fn is_removed(&self) -> bool {
        self.registers.stop.load(Ordering::SeqCst)
    }

    /// Returns the counters of the controller.
    pub fn stats(&self) -> ModelStats {
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        ModelStats {
            commands: get(&self.counters.commands),
            errors: get(&self.counters.errors),
            bytes_read: get(&self.counters.bytes_read),
            bytes_written: get(&self.counters.bytes_written),
            interrupts: get(&self.counters.interrupts),
            doorbells: get(&self.registers.doorbell_writes),
            bad_doorbells: get(&self.registers.bad_doorbells),
            shutdowns: get(&self.counters.shutdowns),
            early_changes: get(&self.registers.early_changes),
        }
    }
}

impl Drop for ModelController {
    fn drop(&mut self) {
        self.registers.stop.store(true, Ordering::SeqCst);
        self.thread.unpark();
        if let Some(join) = self.join.take() {
            // A panic of the thread has been printed.
            drop(join.join());
        }
    }
}
