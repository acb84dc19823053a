//! Places that are reused, with a generation that tells the present occupant from earlier ones.

/// The number of a place, and its generation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    index: u32,
    generation: u32,
}

impl Key {
    /// Returns the key as one word, for interfaces that carry one.
    pub(crate) fn to_word(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// Returns the key of a word from [`to_word`](Self::to_word).
    pub(crate) fn from_word(word: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
        Self {
            index: u32::from_le_bytes([a, b, c, d]),
            generation: u32::from_le_bytes([e, f, g, h]),
        }
    }
}

/// Places for values. A key of a value that was removed finds nothing, even when its place has a
/// new occupant.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    places: Vec<(u32, Option<T>)>,
    vacant: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { places: Vec::new(), vacant: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Inserts a value. O(1) amortised.
    pub(crate) fn insert(&mut self, value: T) -> Key {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            u32::try_from(self.places.len() - 1).unwrap_or(u32::MAX)
        });
        let mut generation = 0;
        if let Some(place) = self.places.get_mut(index as usize) {
            place.1 = Some(value);
            generation = place.0;
        }
        Key { index, generation }
    }

    /// Returns the value of a key.
    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let (generation, value) = self.places.get_mut(key.index as usize)?;
        value.as_mut().filter(|_| *generation == key.generation)
    }

    /// Removes the value of a key.
    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        let (generation, value) = self.places.get_mut(key.index as usize)?;
        let value = value.take_if(|_| *generation == key.generation)?;
        *generation = generation.wrapping_add(1);
        self.vacant.push(key.index);
        Some(value)
    }

    /// Returns how many values there are.
    pub(crate) fn len(&self) -> usize {
        self.places.len() - self.vacant.len()
    }

    /// Returns the keys of all values. O(places).
    pub(crate) fn keys(&self) -> Vec<Key> {
        let occupied = self.places.iter().zip(0u32..).filter(|((_, value), _)| value.is_some());
        occupied.map(|((generation, _), index)| Key { index, generation: *generation }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_key_finds_nothing() {
        let mut slab = Slab::default();
        let (a, b) = (slab.insert('a'), slab.insert('b'));
        assert_eq!((slab.remove(a), slab.remove(a), slab.len()), (Some('a'), None, 1));
        let c = slab.insert('c');
        assert_eq!((c.index, slab.get_mut(a)), (a.index, None));
        assert_eq!(slab.get_mut(c), Some(&mut 'c'));
        assert_eq!(slab.keys(), [c, b]);
        assert_eq!(Key::from_word(c.to_word()), c);
    }
}
