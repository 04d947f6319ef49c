//! Rows in another order than that of the file: rotary embeddings of adjacent pairs against halves.

use std::sync::Arc;

/// Which stored row each row of a query or key projection is, for models that rotate element i of a head with
/// element i + `head_dim` / 2, if the file's model rotates element 2i with element 2i + 1.
pub(in crate::checkpoint) fn halves_of_pairs(heads: usize, head_dim: usize) -> Arc<[usize]> {
    let of_head = |head: usize| {
        let half = |first: usize| (0..head_dim / 2).map(move |pair| head * head_dim + 2 * pair + first);
        half(0).chain(half(1))
    };
    (0..heads).flat_map(of_head).collect()
}
