//! What the facts mean: good, limited or missing, and what mends it.

use super::{Facts, Finding};

impl Facts {
    /// One finding a thing, in the order in which memory goes to a device.
    pub fn findings(&self) -> Vec<Finding> {
        Vec::new()
    }
}
