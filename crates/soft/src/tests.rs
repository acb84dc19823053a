//! Single ports, and what the random adversary (`crates/pinfold/tests/adversary`) finds, step by
//! step.

mod harness;
mod nic;
mod ports;
mod promise;
mod tables;
mod tasks;
