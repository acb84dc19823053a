//! `cargo run --profile ci -p pinfold-capi --example border [instructions]`
//!
//! The cost of the border to C: the same work by calls of the Rust API and of the C functions, in
//! turns, as nanoseconds for each pair of an allocating and a freeing call, and for each block.
//! With `instructions`, counted by valgrind instead.

#![expect(clippy::cast_possible_truncation, reason = "constants that are small")]

use pinfold::dma_pool::{DmaPool, PoolLocal, RawBlock};
use pinfold::{Arena, ArenaLocal, Buffer, Domain, MappingPolicy};
use pinfold_capi::arena::{
    PF_POLICY_WHOLE, pf_alloc, pf_arena_create, pf_arena_opts, pf_arena_t, pf_free, pf_iova,
};
use pinfold_capi::block::pf_block_t;
use pinfold_capi::cache::{pf_cache_t, pf_get, pf_get_bulk, pf_pool_cache, pf_put, pf_put_bulk};
use pinfold_capi::domain::{pf_domain_soft, pf_domain_t};
use pinfold_capi::failure::pf_strerror_last;
use pinfold_capi::frames::{pf_frames_create, pf_frames_fill, pf_frames_free, pf_frames_t};
use pinfold_capi::pool::{pf_pool_create, pf_pool_opts, pf_pool_t};
use std::error::Error;
use std::ffi::{CStr, c_int, c_void};
use std::hint::black_box;
use std::process::Command;
use std::ptr::null_mut;
use std::time::Instant;

const BYTES: u64 = 64 << 20;
const BLOCK: usize = 2048;
const BLOCKS: usize = 32;
const FRAMES: usize = 64;
const ROUNDS: usize = 41;
const PAIRS: u32 = 20_000;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The objects of the Rust API.
struct Rust {
    arena: Arena,
    local: PoolLocal,
    raw: [RawBlock; BLOCKS],
    slots: [Option<RawBlock>; BLOCKS],
    frames: ArenaLocal,
    buffers: [Option<Buffer>; FRAMES],
}

impl Rust {
    fn new() -> Result<Self> {
        let domain = Domain::soft()?;
        let arena =
            Arena::builder().size(BYTES).mapping_policy(MappingPolicy::Whole).build(&domain)?;
        let mut local = DmaPool::builder("border").block(BLOCK).build(&arena)?.local();
        let mut slots = [None; BLOCKS];
        local.fill_all(&mut slots)?;
        // The blocks that were freed last are allocated first: these come back each time.
        let first = slots[0].ok_or("no block")?;
        let raw = slots.map(|slot| slot.unwrap_or(first));
        local.free_bulk(&raw)?;
        Ok(Self {
            frames: arena.local(),
            local,
            raw,
            slots: [None; BLOCKS],
            buffers: [const { None }; FRAMES],
            arena,
        })
    }
}

/// The handles of the C functions.
struct C {
    domain: *mut pf_domain_t,
    arena: *mut pf_arena_t,
    cache: *mut pf_cache_t,
    blocks: [pf_block_t; BLOCKS],
    frames: *mut pf_frames_t,
    slots: [*mut c_void; FRAMES],
}

fn check(code: c_int) -> Result<c_int> {
    if code >= 0 {
        return Ok(code);
    }
    // SAFETY: a C string of this thread, valid until its next call that fails.
    let why = unsafe { CStr::from_ptr(pf_strerror_last()) };
    Err(format!("{code}: {}", why.to_string_lossy()).into())
}

impl C {
    fn new() -> Result<Self> {
        let mut domain: *mut pf_domain_t = null_mut();
        let mut arena: *mut pf_arena_t = null_mut();
        let mut pool: *mut pf_pool_t = null_mut();
        let mut cache: *mut pf_cache_t = null_mut();
        let mut frames: *mut pf_frames_t = null_mut();
        // SAFETY: all zeros are a value of the options, which are integers and pointers.
        let zeros: pf_arena_opts = unsafe { std::mem::zeroed() };
        let arena_opts = pf_arena_opts {
            struct_size: size_of::<pf_arena_opts>(),
            size: BYTES,
            policy: PF_POLICY_WHOLE,
            ..zeros
        };
        // SAFETY: as above.
        let zeros: pf_pool_opts = unsafe { std::mem::zeroed() };
        let pool_opts =
            pf_pool_opts { struct_size: size_of::<pf_pool_opts>(), size: BLOCK, ..zeros };
        // SAFETY: the handle can be written.
        check(unsafe { pf_domain_soft(&raw mut domain) })?;
        // SAFETY: the options have their size, and the handle can be written; so below.
        check(unsafe { pf_arena_create(domain, &raw const arena_opts, &raw mut arena) })?;
        // SAFETY: as above.
        check(unsafe { pf_pool_create(arena, &raw const pool_opts, &raw mut pool) })?;
        // SAFETY: as above.
        check(unsafe { pf_pool_cache(pool, &raw mut cache) })?;
        // SAFETY: as above.
        check(unsafe { pf_frames_create(arena, &raw mut frames) })?;
        let mut block = pf_block_t { va: null_mut(), iova: 0, len: 0, tag: 0 };
        // Of which `pf_iova` is asked: it is the block of the pool that is allocated first.
        // SAFETY: a block, which is returned at once.
        check(unsafe { pf_get(cache, &raw mut block) })?;
        // SAFETY: as above.
        check(unsafe { pf_put(cache, &raw mut block) })?;
        let slots = [null_mut(); FRAMES];
        Ok(Self { domain, arena, cache, blocks: [block; BLOCKS], frames, slots })
    }
}

/// One kind of work, done by both interfaces.
struct Path {
    name: &'static str,
    calls: &'static str,
    blocks: u32,
    rust: fn(&mut Rust) -> Result<()>,
    c: fn(&mut C) -> Result<()>,
    /// The most that C may cost in proportion; none for calls that are only shown.
    limit: Option<f64>,
}

const PATHS: [Path; 5] = [
    Path {
        name: "blocks",
        calls: "pf_get_bulk, pf_put_bulk",
        blocks: BLOCKS as u32,
        rust: |rust| {
            rust.local.fill_all(&mut rust.slots)?;
            black_box(&mut rust.slots);
            rust.slots = [None; BLOCKS];
            rust.local.free_bulk(black_box(&rust.raw))?;
            Ok(())
        },
        c: |c| {
            let blocks = black_box(c.blocks.as_mut_ptr());
            // SAFETY: as many blocks as the number says.
            check(unsafe { pf_get_bulk(c.cache, blocks, BLOCKS as u32) })?;
            // SAFETY: as above.
            check(unsafe { pf_put_bulk(c.cache, blocks, BLOCKS as u32, null_mut()) })?;
            Ok(())
        },
        limit: Some(1.3),
    },
    Path {
        name: "frames",
        calls: "pf_frames_fill, pf_frames_free",
        blocks: FRAMES as u32,
        rust: |rust| {
            if rust.frames.fill(&mut rust.buffers) < FRAMES {
                return Err("no frame is left".into());
            }
            rust.frames.free_all(black_box(&mut rust.buffers));
            Ok(())
        },
        c: |c| {
            let slots = black_box(c.slots.as_mut_ptr());
            // SAFETY: as many slots as the number says.
            check(unsafe { pf_frames_fill(c.frames, slots, FRAMES as u32) })?;
            // SAFETY: as above.
            check(unsafe { pf_frames_free(c.frames, slots, FRAMES as u32) })?;
            Ok(())
        },
        limit: Some(1.3),
    },
    Path {
        name: "block",
        calls: "pf_get, pf_put",
        blocks: 1,
        rust: |rust| {
            let block = rust.local.alloc_raw()?;
            rust.local.free_raw(black_box(block))?;
            Ok(())
        },
        c: |c| {
            let block = black_box(c.blocks.as_mut_ptr());
            // SAFETY: a block.
            check(unsafe { pf_get(c.cache, block) })?;
            // SAFETY: a block.
            check(unsafe { pf_put(c.cache, block) })?;
            Ok(())
        },
        limit: None,
    },
    // C finds the address by the memory's, of which Rust's block has it.
    Path {
        name: "iova",
        calls: "pf_iova",
        blocks: 1,
        rust: |rust| {
            black_box(black_box(&rust.raw[0]).iova());
            Ok(())
        },
        c: |c| {
            let (block, mut iova) = (black_box(c.blocks[0]), 0);
            // SAFETY: the address can be written.
            check(unsafe { pf_iova(c.domain, block.va, BLOCK, &raw mut iova) })?;
            black_box(iova);
            Ok(())
        },
        limit: None,
    },
    Path {
        name: "page",
        calls: "pf_alloc, pf_free",
        blocks: 1,
        rust: |rust| {
            drop(black_box(rust.arena.alloc_zeroed(4096)?));
            Ok(())
        },
        c: |c| {
            // SAFETY: the address of the device is not wanted.
            let memory = unsafe { pf_alloc(c.arena, 4096, null_mut()) };
            check(pf_free(c.arena, black_box(memory)))?;
            Ok(())
        },
        limit: None,
    },
];

fn main() -> std::process::ExitCode {
    // Its message: an error that `main` returned would print its fields.
    match choose() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn choose() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words.as_slice() {
        [] => time(),
        ["instructions"] => instructions(),
        // The command that `instructions` runs under valgrind.
        ["run", name, by, pairs] => run(name, by, pairs.parse()?),
        _ => Err("usage: border [instructions]".into()),
    }
}

fn repeat<T>(on: &mut T, path: fn(&mut T) -> Result<()>, pairs: u32) -> Result<()> {
    (0..pairs).try_for_each(|_| path(on))
}

/// Returns the nanoseconds of one pair.
fn nanoseconds<T>(on: &mut T, path: fn(&mut T) -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    repeat(on, path, PAIRS)?;
    Ok(start.elapsed().as_nanos() as f64 / f64::from(PAIRS))
}

fn time() -> Result<()> {
    let (mut rust, mut c) = (Rust::new()?, C::new()?);
    println!("nanoseconds for a pair of calls: least, median, most of {ROUNDS} rounds in turns");
    for path in &PATHS {
        let (mut of_rust, mut of_c, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        repeat(&mut rust, path.rust, PAIRS)?;
        repeat(&mut c, path.c, PAIRS)?;
        for _ in 0..ROUNDS {
            let (one, other) = (nanoseconds(&mut rust, path.rust)?, nanoseconds(&mut c, path.c)?);
            of_rust.push(one);
            of_c.push(other);
            ratios.push(other / one);
        }
        println!("{} ({})", path.calls, count(path.blocks));
        for (by, times) in [("Rust", &mut of_rust), ("C", &mut of_c)] {
            times.sort_by(f64::total_cmp);
            let (least, median, most) = (times[0], times[ROUNDS / 2], times[ROUNDS - 1]);
            let each = median / f64::from(path.blocks);
            println!("  {by:<4} {least:8.1} {median:8.1} {most:8.1}   {each:6.2} each");
        }
        ratios.sort_by(f64::total_cmp);
        judge(path, ratios[ROUNDS / 2]);
    }
    Ok(())
}

fn count(blocks: u32) -> String {
    if blocks == 1 { "1 block".into() } else { format!("{blocks} blocks") }
}

fn judge(path: &Path, ratio: f64) {
    match path.limit {
        Some(limit) if ratio > limit => println!("  C / Rust {ratio:.2}, more than {limit}"),
        Some(limit) => println!("  C / Rust {ratio:.2}, at most {limit}"),
        None => println!("  C / Rust {ratio:.2}"),
    }
}

fn run(name: &str, by: &str, pairs: u32) -> Result<()> {
    let path = PATHS.iter().find(|path| path.name == name).ok_or("no such path")?;
    // Both are created, so that both runs differ in the calls only.
    let (mut rust, mut c) = (Rust::new()?, C::new()?);
    match by {
        "rust" => repeat(&mut rust, path.rust, pairs),
        _ => repeat(&mut c, path.c, pairs),
    }
}

fn instructions() -> Result<()> {
    println!("instructions for a pair of calls");
    for path in &PATHS {
        println!("{} ({})", path.calls, count(path.blocks));
        let (rust, c) = (counted(path.name, "rust")?, counted(path.name, "c")?);
        for (by, instructions) in [("Rust", rust), ("C", c)] {
            let each = instructions / f64::from(path.blocks);
            println!("  {by:<4} {instructions:8.1}   {each:6.2} each");
        }
        judge(path, c / rust);
    }
    Ok(())
}

/// Returns the instructions of one pair: of a thousand more, divided by a thousand.
fn counted(name: &str, by: &str) -> Result<f64> {
    let total = |pairs: u32| -> Result<f64> {
        let program = std::env::current_exe()?;
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(program);
        let output = valgrind.args(["run", name, by, &pairs.to_string()]).output()?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let collected = text.lines().find_map(|line| line.split_once("Collected :"));
        Ok(collected.ok_or(text.clone())?.1.trim().parse()?)
    };
    Ok((total(1100)? - total(100)?) / 1000.0)
}
