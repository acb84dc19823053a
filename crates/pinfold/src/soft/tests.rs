//! Ports by themselves, and what the random adversary (`tests/adversary`) catches, step by step.

mod harness;
mod ports;
mod promise;
