//! The model controller, from outside.

#[cfg(test)]
mod door;
