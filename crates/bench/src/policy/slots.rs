//! Values by token, in memory that grows by a piece at a time: nothing is moved, so no call pauses for a copy of all.

/// How many values a piece holds.
const PIECE: usize = 512;

/// Values by token.
#[derive(Debug)]
pub(super) struct Slots<T> {
    pieces: Vec<Vec<Option<T>>>,
    /// The tokens that are free.
    free: Vec<usize>,
}

impl<T> Slots<T> {
    pub(super) const fn new() -> Self {
        Self { pieces: Vec::new(), free: Vec::new() }
    }

    /// Stores a value and returns its token.
    #[inline]
    pub(super) fn put(&mut self, value: T) -> usize {
        if let Some(token) = self.free.pop() {
            if let Some(slot) = self.slot(token) {
                *slot = Some(value);
            }
            return token;
        }
        match self.pieces.last_mut().filter(|piece| piece.len() < PIECE) {
            Some(piece) => piece.push(Some(value)),
            None => {
                let mut piece = Vec::with_capacity(PIECE);
                piece.push(Some(value));
                self.pieces.push(piece);
            }
        }
        (self.pieces.len() - 1) * PIECE + self.pieces.last().map_or(0, Vec::len) - 1
    }

    /// Returns the value of a token, which is free then.
    #[inline]
    pub(super) fn take(&mut self, token: usize) -> Option<T> {
        let value = self.slot(token)?.take()?;
        self.free.push(token);
        Some(value)
    }

    fn slot(&mut self, token: usize) -> Option<&mut Option<T>> {
        self.pieces.get_mut(token / PIECE)?.get_mut(token % PIECE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_of_one_value_at_a_time() {
        let mut slots = Slots::new();
        let tokens: Vec<usize> = (0..3 * PIECE).map(|value| slots.put(value)).collect();
        assert!(tokens.iter().enumerate().all(|(at, token)| at == *token));
        assert_eq!((slots.take(PIECE), slots.take(PIECE), slots.take(4 * PIECE)), (Some(PIECE), None, None));
        assert_eq!((slots.put(7), slots.put(8)), (PIECE, 3 * PIECE));
        assert_eq!((slots.take(PIECE), slots.take(3 * PIECE), slots.take(0)), (Some(7), Some(8), Some(0)));
    }
}
