//! What the first pass of a map or clear over several table pages has found, so that the second
//! does not walk again.

/// Table pages whose runs are remembered; the runs of more are found again by a walk. 8 pages of
/// leaves of 4 KiB are 16 MiB.
const REMEMBERED: usize = 8;

/// The first few of a sequence of values.
pub(super) struct Found<T> {
    values: [Option<T>; REMEMBERED],
    len: usize,
}

impl<T> Default for Found<T> {
    fn default() -> Self {
        Self { values: [const { None }; REMEMBERED], len: 0 }
    }
}

impl<T: Copy> Found<T> {
    /// Adds a value, unless there are too many.
    pub(super) fn push(&mut self, value: T) {
        if let Some(place) = self.values.get_mut(self.len) {
            *place = Some(value);
            self.len += 1;
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = T> {
        self.values.iter().copied().flatten()
    }
}
