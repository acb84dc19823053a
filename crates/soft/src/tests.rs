//! Single ports, and what the random adversary (`crates/pinfold/tests/adversary`) finds, step by step.

mod harness;
mod ports;
mod promise;
mod tables;
