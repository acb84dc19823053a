//! libpinfold: the C interface of Pinfold.
//!
//! Each function of `pinfold.h` is here, with the comment of the header. The parts that they share:
//!
//! | module | contents |
//! | --- | --- |
//! | `handle` | the tables that handles are indices of |
//! | `process` | children, other copies of the library, threads that are cancelled |
//! | `failure` | errno values and messages; the border that no panic crosses |
//! | `options` | structs that grow: their first field says how long the caller's is |
//! | [`slots`] | an owner's mappings, which C programs name |
//! | `region` | memory that C programs pass by address: which arena or registration it is in |
//! | [`block`] | memory with its two addresses |
//! | `readers` | a value that each thread reads under a lock of its own |
//! | `rings` | the places in io_urings that have an arena or a registration |
//! | `source` | an arena as the source of pools |
//! | `claims` | the real devices of this process: attached, or with a driver |
//! | `handed` | descriptors that C programs are given |
//! | `words` | messages of the crates below, in the words of C |
//! | `trace` | the hook that sees alloc, free, map and revoke |
//! | the others | the functions, by the object that they are of |
//!
//! A C program cannot be kept from using memory that it has freed, or that a device writes to. All
//! else is checked here: a stale, foreign or wrong-typed handle, an address that is not allocated,
//! a block that is freed twice, memory that is freed while a request or a mapping has it.

#![expect(non_camel_case_types, reason = "the names that C programs use")]

pub mod admin;
pub mod arena;
pub mod block;
pub mod cache;
mod claims;
pub mod device;
pub mod domain;
mod errno;
pub mod failure;
pub mod frames;
mod handed;
mod handle;
mod lists;
pub mod map;
pub mod nvme;
mod options;
pub mod owner;
pub mod pages;
pub mod pool;
pub mod port;
mod process;
pub mod queue;
mod readers;
mod region;
pub mod registered;
pub mod report;
pub mod requests;
mod rings;
pub mod slots;
mod source;
pub mod trace;
pub mod version;
mod words;

#[cfg(test)]
mod tests {
    /// `scripts/capi test` compiles and runs it.
    #[test]
    fn the_program_of_the_page_is_the_example() {
        let page = include_str!("../../../docs/c.md");
        assert!(
            page.contains(include_str!("../examples/first.c")),
            "docs/c.md differs from first.c"
        );
    }
}
