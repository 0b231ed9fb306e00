//! Values in the order of their numbers, such as the turns of a line.
//!
//! The tree has one type for all values. Trees of the standard library are compiled again for each type of value,
//! which was 8 % of the code that the compiler had to translate.

use std::collections::BTreeMap;

/// A map is shrunk when it holds few values and its capacity is above this number.
const SPARE: usize = 64;

/// Values by number. Each operation takes time in proportion to the logarithm of the number of values.
#[derive(Debug)]
pub(crate) struct NumberMap<T> {
    /// The index of each number's value.
    indices: BTreeMap<u64, usize>,
    /// The values with their numbers, in no order.
    values: Vec<(u64, T)>,
}

impl<T> Default for NumberMap<T> {
    fn default() -> Self {
        Self { indices: BTreeMap::new(), values: Vec::new() }
    }
}

impl<T> NumberMap<T> {
    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    pub(crate) fn has(&self, number: u64) -> bool {
        self.indices.contains_key(&number)
    }

    pub(crate) fn get(&self, number: u64) -> Option<&T> {
        self.values.get(*self.indices.get(&number)?).map(|(_, value)| value)
    }

    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        self.values.get_mut(*self.indices.get(&number)?).map(|(_, value)| value)
    }

    /// Sets the value of a number.
    pub(crate) fn insert(&mut self, number: u64, value: T) {
        match self.get_mut(number) {
            Some(former) => *former = value,
            None => {
                self.indices.insert(number, self.values.len());
                self.values.push((number, value));
            }
        }
    }

    /// Returns the first number and its value.
    pub(crate) fn first(&self) -> Option<(u64, &T)> {
        let (number, index) = self.indices.first_key_value()?;
        self.values.get(*index).map(|(_, value)| (*number, value))
    }

    /// Returns the value of the first number, for a change.
    pub(crate) fn first_mut(&mut self) -> Option<&mut T> {
        let (_, index) = self.indices.first_key_value()?;
        self.values.get_mut(*index).map(|(_, value)| value)
    }

    /// Returns the values of the first numbers, in their order.
    pub(crate) fn foremost(&self, count: usize) -> impl Iterator<Item = &T> {
        self.indices.values().take(count).filter_map(|index| self.values.get(*index)).map(|(_, value)| value)
    }

    /// Calls `change` with the values of the first numbers, in their order.
    pub(crate) fn change_foremost(&mut self, count: usize, mut change: impl FnMut(&mut T)) {
        for index in self.indices.values().take(count) {
            self.values.get_mut(*index).into_iter().for_each(|(_, value)| change(value));
        }
    }

    /// Returns the count of numbers before this number, or `None` if it is not among the first `count` numbers.
    pub(crate) fn position(&self, number: u64, count: usize) -> Option<usize> {
        self.indices.keys().take(count).position(|foremost| *foremost == number)
    }

    /// Returns the values, in no order.
    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.values.iter().map(|(_, value)| value)
    }

    /// Returns the values for a change, in no order.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.values.iter_mut().map(|(_, value)| value)
    }

    pub(crate) fn remove(&mut self, number: u64) -> Option<T> {
        let index = self.indices.remove(&number)?;
        self.take(index).map(|(_, value)| value)
    }

    pub(crate) fn pop_first(&mut self) -> Option<(u64, T)> {
        let (_, index) = self.indices.pop_first()?;
        self.take(index)
    }

    pub(crate) fn pop_last(&mut self) -> Option<(u64, T)> {
        let (_, index) = self.indices.pop_last()?;
        self.take(index)
    }

    /// Takes a value out, and moves the last value to its index.
    fn take(&mut self, index: usize) -> Option<(u64, T)> {
        let last = self.values.pop()?;
        let taken = match self.values.get_mut(index) {
            Some(value) => {
                self.indices.insert(last.0, index);
                std::mem::replace(value, last)
            }
            None => last,
        };
        if self.values.capacity() > SPARE && self.values.len() < self.values.capacity() / 8 {
            self.values.shrink_to(2 * self.values.len());
        }
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::random::mixed;

    #[test]
    fn number_map_does_what_a_tree_does() {
        let (mut map, mut tree) = (NumberMap::default(), BTreeMap::new());
        for step in 0..20_000 {
            let random = mixed(step);
            let (turn, most) = (random >> 8 & 0x3f, 1 + random as usize % 9);
            match random & 7 {
                0..3 => {
                    map.insert(turn, step);
                    tree.insert(turn, step);
                }
                3 => assert_eq!(map.remove(turn), tree.remove(&turn)),
                4 => assert_eq!(map.pop_first(), tree.pop_first()),
                5 => assert_eq!(map.pop_last(), tree.pop_last()),
                6 => {
                    map.change_foremost(most, |value| *value += 1);
                    tree.values_mut().take(most).for_each(|value| *value += 1);
                }
                _ => assert_eq!(map.get_mut(turn), tree.get_mut(&turn)),
            }
            assert_eq!(
                (map.len(), map.is_empty(), map.has(turn)),
                (tree.len(), tree.is_empty(), tree.contains_key(&turn))
            );
            assert_eq!(map.get(turn), tree.get(&turn));
            assert_eq!(map.first(), tree.first_key_value().map(|(turn, value)| (*turn, value)));
            assert!(map.foremost(most).eq(tree.values().take(most)));
            assert_eq!(map.position(turn, most), tree.keys().take(most).position(|foremost| *foremost == turn));
            assert_eq!(map.values().sum::<u64>(), tree.values().sum::<u64>());
        }
    }

    #[test]
    fn number_map_returns_its_memory() {
        let mut map = NumberMap::default();
        (0..10_000).for_each(|turn| map.insert(turn, turn));
        (0..9_990).for_each(|turn| _ = map.remove(turn));
        assert!(map.values.capacity() <= SPARE, "{}", map.values.capacity());
        assert!(map.foremost(10).eq(&(9_990..10_000).collect::<Vec<_>>()));
    }
}
