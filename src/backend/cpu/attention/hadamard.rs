//! Rotation by a Hadamard matrix, which is its own inverse.

/// Multiplies a head by the orthonormal Hadamard matrix of its size; where that is no power of two, parts of it, each as
/// long as the largest power of two that divides the size.
pub(super) fn rotate(head: &mut [f32]) {
    let size = 1usize << head.len().trailing_zeros().min(usize::BITS - 1);
    let scale = 1. / (size as f32).sqrt();
    for part in head.chunks_exact_mut(size) {
        let mut half = 1;
        while half < size {
            for pair in part.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (low, high) in low.iter_mut().zip(high) {
                    (*low, *high) = (*low + *high, *low - *high);
                }
            }
            half *= 2;
        }
        part.iter_mut().for_each(|number| *number *= scale);
    }
}

#[cfg(test)]
mod tests {
    use super::rotate;

    #[test]
    fn twice_is_nothing_and_lengths_stay() {
        for len in [1, 2, 8, 64, 80, 96, 128, 256, 7] {
            let head: Vec<f32> = (0..len).map(|i| (i as f32 * 0.7).sin()).collect();
            let mut rotated = head.clone();
            rotate(&mut rotated);
            let square = |head: &[f32]| head.iter().map(|x| x * x).sum::<f32>();
            assert!((square(&rotated) / square(&head).max(1e-9) - 1.).abs() < 1e-5 || len == 1, "{len}");
            rotate(&mut rotated);
            assert!(rotated.iter().zip(&head).all(|(a, b)| (a - b).abs() < 1e-6), "{len}");
        }
        let mut one = [1., 0., 0., 0.];
        rotate(&mut one);
        assert_eq!(one, [0.5; 4]);
    }
}
