//! Sorting, compiled once for all types.

use std::cmp::Ordering;

/// Sorts indices by what `compare` says of them. The standard library's sort is compiled again for each type of items
/// and of closures, and is as much code as a whole module each time.
pub(crate) fn sort_indices(indices: &mut [usize], compare: &dyn Fn(usize, usize) -> Ordering) {
    indices.sort_unstable_by(|one, other| compare(*one, *other));
}
