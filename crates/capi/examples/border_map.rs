//! The cost of the border between C and Rust for mappings: 32 maps, and 32 revocations with one
//! flush and the wait for it, by libpinfold and by the Rust library.
//!
//! `cargo run --release -p pinfold-capi --example border_map`
//!
//! Both run interleaved in one process, on software IOMMUs of the same model. The instructions are
//! those that valgrind counts in the same functions, if it is installed.

use pinfold::{Arena, Buffer, Domain, DomainLocal, FromDevice, Mapping, Revoked};
use pinfold_capi::arena::{
    PF_POLICY_PER_USE, pf_alloc, pf_arena_create, pf_arena_opts, pf_arena_t,
};
use pinfold_capi::domain::{pf_domain_soft, pf_domain_t};
use pinfold_capi::map::{pf_dir, pf_map, pf_revoke_many};
use pinfold_capi::owner::{pf_owner_create, pf_owner_t, pf_ticket_t, pf_wait};
use pinfold_capi::slots::pf_map_t;
use std::error::Error;
use std::ffi::{c_int, c_void};
use std::process::Command;
use std::ptr::null_mut;
use std::time::Instant;

const COUNT: usize = 32;
const ROUNDS: u32 = 500;
const SAMPLES: usize = 41;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The Rust library's caller.
struct Rust {
    owner: DomainLocal,
    buffers: Vec<Buffer>,
    mappings: Vec<Mapping<Buffer, FromDevice>>,
    revoked: Vec<Revoked<Buffer>>,
}

impl Rust {
    fn new() -> Result<Self> {
        let domain = Domain::soft()?;
        let arena = Arena::builder().size(4 << 20).build(&domain)?;
        let buffers =
            (0..COUNT).map(|_| arena.alloc(4096)).collect::<std::result::Result<_, _>>()?;
        let (mappings, revoked) = (Vec::with_capacity(COUNT), Vec::with_capacity(COUNT));
        Ok(Self { owner: domain.local(), buffers, mappings, revoked })
    }

    #[inline(never)]
    fn map_by_rust(&mut self) -> Result<()> {
        for buffer in self.buffers.drain(..) {
            self.mappings.push(self.owner.map(buffer, FromDevice)?);
        }
        Ok(())
    }

    #[inline(never)]
    fn revoke_by_rust(&mut self) -> Result<()> {
        self.owner.revoke_many(self.mappings.drain(..), &mut self.revoked);
        for revoked in self.revoked.drain(..) {
            self.buffers.push(self.owner.wait(revoked)?);
        }
        Ok(())
    }
}

/// A caller of libpinfold.
struct C {
    owner: *mut pf_owner_t,
    memory: Vec<*mut c_void>,
    maps: [pf_map_t; COUNT],
}

fn ok(code: c_int) -> Result<()> {
    if code < 0 { Err(format!("libpinfold: {code}").into()) } else { Ok(()) }
}

impl C {
    fn new() -> Result<Self> {
        let (mut domain, mut owner, mut arena): (
            *mut pf_domain_t,
            *mut pf_owner_t,
            *mut pf_arena_t,
        ) = (null_mut(), null_mut(), null_mut());
        // SAFETY: the result is a local.
        ok(unsafe { pf_domain_soft(&raw mut domain) })?;
        // SAFETY: the result is a local.
        ok(unsafe { pf_owner_create(domain, &raw mut owner) })?;
        let opts = pf_arena_opts {
            struct_size: size_of::<pf_arena_opts>(),
            size: 4 << 20,
            va: null_mut(),
            sources: 0,
            policy: PF_POLICY_PER_USE,
            numa_node_plus_one: 0,
            reserved: 0,
        };
        // SAFETY: options and result are locals.
        ok(unsafe { pf_arena_create(domain, &raw const opts, &raw mut arena) })?;
        // SAFETY: NULL is allowed.
        let memory = (0..COUNT).map(|_| unsafe { pf_alloc(arena, 4096, null_mut()) }).collect();
        Ok(Self { owner, memory, maps: [pf_map_t { id: 0, r#gen: 0 }; COUNT] })
    }

    #[inline(never)]
    fn map_by_c(&mut self) -> Result<()> {
        for (map, va) in self.maps.iter_mut().zip(&self.memory) {
            let (mut iova, dir) = (0, pf_dir::PF_FROM_DEVICE as u32);
            // SAFETY: the results are locals.
            ok(unsafe { pf_map(self.owner, *va, 4096, dir, map, &raw mut iova) })?;
        }
        Ok(())
    }

    #[inline(never)]
    fn revoke_by_c(&mut self) -> Result<()> {
        let mut ticket = pf_ticket_t { seq: 0 };
        // SAFETY: the names are an array of 32, the result is a local.
        ok(unsafe { pf_revoke_many(self.owner, self.maps.as_ptr(), 32, &raw mut ticket) })?;
        ok(pf_wait(self.owner, ticket, u64::MAX))
    }
}

/// Runs one operation many times, each after its counterpart, and returns nanoseconds for one.
fn time<T>(
    subject: &mut T,
    mut timed: impl FnMut(&mut T) -> Result<()>,
    mut other: impl FnMut(&mut T) -> Result<()>,
    timed_first: bool,
) -> Result<f64> {
    let mut spent_ns = 0;
    for _ in 0..ROUNDS {
        if !timed_first {
            other(subject)?;
        }
        let begin = Instant::now();
        timed(subject)?;
        spent_ns += begin.elapsed().as_nanos();
        if timed_first {
            other(subject)?;
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "a few milliseconds")]
    Ok(spent_ns as f64 / f64::from(ROUNDS))
}

/// Counts the instructions of a function of this program, for one call, with valgrind.
fn instructions(function: &str) -> Option<u64> {
    let this = std::env::current_exe().ok()?;
    let count = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--collect-atstart=no"])
        .arg(format!("--toggle-collect=*{function}*"))
        .arg(this)
        .arg("count")
        .output()
        .ok()?;
    let said = String::from_utf8(count.stderr).ok()?;
    let total = said.lines().find_map(|line| line.split("Collected :").nth(1))?;
    Some(total.trim().parse::<u64>().ok()? / u64::from(ROUNDS))
}

fn show(what: &str, rust: &mut [f64], c: &mut [f64], names: [&str; 2]) {
    let mut medians = [0.0; 2];
    for (subject, times, median) in [("Rust", rust, 0), ("C", c, 1)] {
        times.sort_by(f64::total_cmp);
        let at = |at: usize| times.get(at).copied().unwrap_or(0.0);
        medians[median] = at(times.len() / 2);
        let (least, most) = (at(0), at(times.len() - 1));
        println!(
            "{what} {subject:4}  min {least:7.0}  median {:7.0}  max {most:7.0} ns",
            medians[median]
        );
    }
    println!("{what} C / Rust, medians of the time: {:.2}", medians[1] / medians[0]);
    match (instructions(names[0]), instructions(names[1])) {
        (Some(rust), Some(c)) => {
            #[expect(clippy::cast_precision_loss, reason = "some thousands")]
            let ratio = c as f64 / rust as f64;
            println!("{what} instructions: Rust {rust}, C {c}, C / Rust {ratio:.2}");
        }
        _ => println!("{what} instructions: not counted, valgrind is unavailable"),
    }
}

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

fn run() -> Result<()> {
    let (mut rust, mut c) = (Rust::new()?, C::new()?);
    if std::env::args().any(|word| word == "count") {
        for _ in 0..ROUNDS {
            rust.map_by_rust()?;
            rust.revoke_by_rust()?;
            c.map_by_c()?;
            c.revoke_by_c()?;
        }
        return Ok(());
    }
    let mut times = [const { Vec::new() }; 4];
    for _ in 0..SAMPLES {
        let [map_rust, map_c, revoke_rust, revoke_c] = &mut times;
        map_rust.push(time(&mut rust, Rust::map_by_rust, Rust::revoke_by_rust, true)?);
        map_c.push(time(&mut c, C::map_by_c, C::revoke_by_c, true)?);
        revoke_rust.push(time(&mut rust, Rust::revoke_by_rust, Rust::map_by_rust, false)?);
        revoke_c.push(time(&mut c, C::revoke_by_c, C::map_by_c, false)?);
    }
    let [map_rust, map_c, revoke_rust, revoke_c] = &mut times;
    show("32 maps               ", map_rust, map_c, ["map_by_rust", "map_by_c"]);
    let names = ["revoke_by_rust", "revoke_by_c"];
    show("32 revocations, 1 wait", revoke_rust, revoke_c, names);
    Ok(())
}
