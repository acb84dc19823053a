//! What Pinfold replaces, written from public descriptions.

mod api;
pub mod block;
pub mod buddy;
pub mod inblock;
pub mod lifo;
pub mod linear;
pub mod lock;
pub mod malloc;
pub mod page_segments;
pub mod pages;
pub mod rbtree;

pub use api::{BaselineError, Blocks};

#[cfg(test)]
mod tests;
