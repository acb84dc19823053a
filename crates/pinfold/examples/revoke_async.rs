//! `cargo run -p pinfold --example revoke_async`
//!
//! Revocations awaited in `async` functions, without any particular executor: the one here is 20
//! lines, and sleeps until a flush completes. A task that is given up returns at once, and its
//! buffer stays with the domain until its flush has completed.

use pinfold::core::access::FromDevice;
use pinfold::soft::SoftConfig;
use pinfold::{Arena, Domain};
use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

type Task<'t> = Pin<Box<dyn Future<Output = Result<(), Box<dyn Error>>> + 't>>;

/// Set when any task can make progress, and the thread that runs them.
struct Ready(AtomicBool, Thread);

impl Wake for Ready {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
        self.1.unpark();
    }
}

/// Runs all tasks to completion in this thread.
fn run(mut tasks: Vec<Task<'_>>) -> Result<(), Box<dyn Error>> {
    let ready = Arc::new(Ready(AtomicBool::new(true), std::thread::current()));
    let waker = Waker::from(Arc::clone(&ready));
    let mut result = Ok(());
    while !tasks.is_empty() {
        if !ready.0.swap(false, Ordering::Acquire) {
            std::thread::park();
            continue;
        }
        tasks.retain_mut(|task| match task.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(done) => {
                result = std::mem::replace(&mut result, Ok(())).and(done);
                false
            }
            Poll::Pending => true,
        });
    }
    result
}

/// Maps a buffer, revokes it, and awaits it.
async fn transfer(
    domain: &Domain,
    arena: &Arena,
    name: &str,
    len: usize,
) -> Result<(), Box<dyn Error>> {
    let mut owner = domain.local();
    for round in 0..3 {
        let mapping = owner.map(arena.alloc(len)?, FromDevice)?;
        // ... the device writes here ...
        let buffer = mapping.revoke().await?;
        println!("{name}: round {round}: {} bytes quiesced", buffer.len());
    }
    Ok(())
}

fn main() -> std::process::ExitCode {
    // Its message: an error that `main` returned would print its fields.
    match example() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn example() -> Result<(), Box<dyn Error>> {
    // Slow flushes, so that the two tasks really overlap.
    let config = SoftConfig { flush_cost: Duration::from_millis(5), ..SoftConfig::default() };
    let domain = Domain::soft_with(config)?;
    let arena = Arena::builder().size(4 << 20).build(&domain)?;
    run(vec![
        Box::pin(transfer(&domain, &arena, "small", 4096)),
        Box::pin(transfer(&domain, &arena, "large", 1 << 20)),
    ])?;
    if domain.stats().live != 0 {
        return Err("a mapping is left".into());
    }

    // A program that gives up (the other branch of a `select!`) does not wait for the flush.
    let mut given_up = domain.map(arena.alloc(4096)?, FromDevice)?.revoke().quiesced();
    let mut context = Context::from_waker(Waker::noop());
    if Pin::new(&mut given_up).poll(&mut context).is_pending() {
        drop(given_up);
        println!("given up: {} buffer stays with the domain", domain.stats().deferred);
    }
    while domain.release_late() > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
