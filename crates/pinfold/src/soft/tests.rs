//! The promise, and proof that these tests would see it broken.

mod harness;
mod ports;
mod promise;
mod variants;
