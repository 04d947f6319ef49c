//! Q4_K and Q6_K: scales of a super-block, which count a number that it has, are searched for with their codes.
//!
//! Each group's best scale (and bias) comes first, then the numbers that they count, then for each group the counts of the
//! smallest squared error near its best ones, then the numbers of the least squares for these codes, and so on as long as the
//! error falls.

use super::ggml::SUPER_BLOCK;
use super::ggml_blocks::{append_half, half, halves};

/// How often counts and the numbers that they count follow each other at most.
const ROUNDS: usize = 4;

/// Sums over a group of weights and codes, by how much columns count.
#[derive(Default)]
struct Sums {
    count: f32,
    codes: f32,
    squares: f32,
    weights: f32,
    products: f32,
}

impl Sums {
    fn of(Group { weights, columns }: Group, codes: &[f32]) -> Self {
        let terms = weights.iter().zip(columns).zip(codes);
        terms.fold(Self::default(), |sums, ((weight, column), code)| Self {
            count: sums.count + column,
            codes: sums.codes + column * code,
            squares: sums.squares + column * code * code,
            weights: sums.weights + column * weight,
            products: sums.products + column * weight * code,
        })
    }
}

/// Weights, and how much their columns count.
#[derive(Clone, Copy)]
pub(super) struct Group<'a> {
    pub weights: &'a [f32],
    pub columns: &'a [f32],
}

impl<'a> Group<'a> {
    fn chunks_exact(self, size: usize) -> impl Iterator<Item = Self> + use<'a> {
        let pairs = self.weights.chunks_exact(size).zip(self.columns.chunks_exact(size));
        pairs.map(|(weights, columns)| Self { weights, columns })
    }
}

/// Codes of the values `code * scale - bias`, and their squared error.
fn nearest(
    Group { weights, columns }: Group,
    (scale, bias): (f32, f32),
    (low, high): (f32, f32),
    codes: &mut [f32],
) -> f32 {
    let inverse = if scale == 0. { 0. } else { 1. / scale };
    let mut error = 0.;
    for ((code, weight), column) in codes.iter_mut().zip(weights).zip(columns) {
        *code = ((weight + bias) * inverse).round_ties_even().clamp(low, high);
        let difference = weight - (*code * scale - bias);
        error += column * (difference * difference);
    }
    error
}

/// Counts near a number: itself rounded, and its neighbours, within a range.
fn counts(number: f32, unit: f32, (low, high): (f32, f32)) -> impl Iterator<Item = f32> + Clone {
    let middle = if unit == 0. { 0. } else { (number / unit).round_ties_even().clamp(low, high) };
    [0., -1., 1.].into_iter().map(move |step| middle + step).filter(move |count| (low..=high).contains(count))
}

/// A super-block while it is searched for.
#[derive(Clone)]
struct Found {
    codes: [f32; SUPER_BLOCK],
    /// For each group what its scale counts, and its bias.
    steps: [(f32, f32); 16],
    scale: f32,
    bias: f32,
    error: f32,
}

impl Found {
    fn new() -> Self {
        Self { codes: [0.; SUPER_BLOCK], steps: [(0., 0.); 16], scale: 0., bias: 0., error: f32::INFINITY }
    }

    fn codes(&self) -> [u8; SUPER_BLOCK] {
        self.codes.map(|code| code as u8)
    }
}

const OF_Q4_K: (f32, f32) = (0., 15.);
const COUNTS_OF_Q4_K: (f32, f32) = (0., 63.);

/// Scale and bias of a group of the smallest squared error that is found, none below zero.
fn affine(group: Group, codes: &mut [f32]) -> (f32, f32) {
    let weights = group.weights;
    let low = weights.iter().copied().fold(0f32, f32::min);
    let high = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if high <= low {
        codes.fill(0.);
        return (0., -low);
    }
    let (mut best, mut least) = (((high - low) / 15., -low), f32::INFINITY);
    for tenths in -10..=10i8 {
        let first = (high - low) / (15. + f32::from(tenths) / 10.);
        nearest(group, (first, -low), OF_Q4_K, codes);
        let fitted = least_squares(group, codes);
        let error = nearest(group, fitted, OF_Q4_K, codes);
        if error < least {
            (best, least) = (fitted, error);
        }
    }
    nearest(group, best, OF_Q4_K, codes);
    best
}

/// Scale and bias of the smallest squared error with these codes, none below zero.
fn least_squares(group: Group, codes: &[f32]) -> (f32, f32) {
    let Sums { count, codes, squares, weights, products } = Sums::of(group, codes);
    let determinant = count * squares - codes * codes;
    let scale = (count * products - weights * codes) / determinant;
    let bias = (scale * codes - weights) / count;
    match determinant > 0. && bias >= 0. && scale >= 0. {
        true => (scale, bias),
        false if squares > 0. => ((products / squares).max(0.), 0.),
        false => (0., (-weights / count).max(0.)),
    }
}

/// Appends a block of 256 weights.
pub(super) fn q4_k(weights: Group, blocks: &mut Vec<u8>, values: &mut [f32]) {
    let mut found = Found::new();
    let mut wanted = [(0., 0.); 8];
    for ((weights, codes), wanted) in
        weights.chunks_exact(32).zip(found.codes.chunks_exact_mut(32)).zip(&mut wanted)
    {
        *wanted = affine(weights, codes);
    }
    let most = |of: fn(&(f32, f32)) -> f32| wanted.iter().map(of).fold(0f32, f32::max);
    let mut units = (half(most(|group| group.0) / 63.), half(most(|group| group.1) / 63.));
    for _ in 0..ROUNDS {
        let attempt = counted(weights, &wanted, units);
        if attempt.error >= found.error {
            break;
        }
        let groups = weights.chunks_exact(32).zip(attempt.codes.chunks_exact(32)).zip(&mut wanted);
        groups.for_each(|((weights, codes), wanted)| *wanted = least_squares(weights, codes));
        units = fitted_units(weights, &attempt);
        found = attempt;
    }
    // Scales and biases of six bits in twelve bytes: the higher bits of the last four are beside the first four.
    append_half(found.scale, blocks);
    append_half(found.bias, blocks);
    let steps = |group: usize| found.steps.get(group).map_or((0, 0), |step| (step.0 as u8, step.1 as u8));
    let groups = [0, 1, 2, 3].map(|group| (steps(group), steps(group + 4)));
    blocks.extend(groups.iter().map(|(first, second)| first.0 | second.0 >> 4 << 6));
    blocks.extend(groups.iter().map(|(first, second)| first.1 | second.1 >> 4 << 6));
    blocks.extend(groups.iter().map(|(_, second)| second.0 & 15 | second.1 << 4));
    found.codes().chunks_exact(64).for_each(|codes| halves(codes, blocks));
    let groups = values.chunks_exact_mut(32).zip(found.codes.chunks_exact(32)).zip(found.steps);
    for ((values, codes), (step, bias)) in groups {
        let (scale, bias) = (found.scale * step, found.bias * bias);
        values.iter_mut().zip(codes).for_each(|(value, code)| *value = code * scale - bias);
    }
}

/// Counts of `units` and codes of the smallest squared error near the scales and biases that groups want.
fn counted(weights: Group, wanted: &[(f32, f32); 8], units: (f32, f32)) -> Found {
    let mut found = Found { scale: units.0, bias: units.1, error: 0., ..Found::new() };
    let groups = weights.chunks_exact(32).zip(found.codes.chunks_exact_mut(32)).zip(&mut found.steps);
    for (((weights, codes), steps), wanted) in groups.zip(wanted) {
        let (mut least, mut attempt) = (f32::INFINITY, [0.; 32]);
        for scale in counts(wanted.0, units.0, COUNTS_OF_Q4_K) {
            for bias in counts(wanted.1, units.1, COUNTS_OF_Q4_K) {
                let parameters = (scale * units.0, bias * units.1);
                let error = nearest(weights, parameters, OF_Q4_K, &mut attempt);
                if error < least {
                    (least, *steps) = (error, (scale, bias));
                    codes.copy_from_slice(&attempt);
                }
            }
        }
        found.error += least;
    }
    found
}

/// The numbers of the least squares that these counts count, with these codes.
fn fitted_units(weights: Group, found: &Found) -> (f32, f32) {
    let mut sums = [0f64; 5];
    let groups = weights.chunks_exact(32).zip(found.codes.chunks_exact(32)).zip(&found.steps);
    for ((group, codes), (step, bias)) in groups {
        for ((weight, code), column) in group.weights.iter().zip(codes).zip(group.columns) {
            let root = f64::from(*column).sqrt();
            let (first, second) = (root * f64::from(code * step), root * f64::from(-bias));
            let weight = root * f64::from(*weight);
            for (sum, term) in sums.iter_mut().zip([
                first * first,
                first * second,
                second * second,
                first * weight,
                second * weight,
            ]) {
                *sum += term;
            }
        }
    }
    let [first, both, second, with_first, with_second] = sums;
    let determinant = first * second - both * both;
    let positive = |number: f64| half(number.max(0.) as f32);
    match (determinant.abs() > 1e-12 * first * second, first > 0.) {
        (true, _) => (
            positive((with_first * second - with_second * both) / determinant),
            positive((with_second * first - with_first * both) / determinant),
        ),
        (false, true) => (positive(with_first / first), found.bias),
        (false, false) => (found.scale, found.bias),
    }
}

const OF_Q6_K: (f32, f32) = (-32., 31.);
const COUNTS_OF_Q6_K: (f32, f32) = (-128., 127.);

/// The scale of a group of the smallest squared error that is found, of either sign.
fn symmetric(group: Group, codes: &mut [f32]) -> f32 {
    let furthest = group.weights.iter().fold(0f32, |most, x| if x.abs() > most.abs() { *x } else { most });
    let (mut best, mut least) = (0., f32::INFINITY);
    for end in [-32f32, 31.] {
        for tenths in -9..=9i8 {
            let first = furthest / (end + f32::from(tenths) / 10.);
            nearest(group, (first, 0.), OF_Q6_K, codes);
            let Sums { squares, products, .. } = Sums::of(group, codes);
            let fitted = if squares > 0. { products / squares } else { 0. };
            let error = nearest(group, (fitted, 0.), OF_Q6_K, codes);
            if error < least {
                (best, least) = (fitted, error);
            }
        }
    }
    best
}

/// Appends a block of 256 weights.
pub(super) fn q6_k(weights: Group, blocks: &mut Vec<u8>, values: &mut [f32]) {
    let (mut found, mut wanted) = (Found::new(), [0.; 16]);
    let mut codes = [0.; 16];
    for (weights, wanted) in weights.chunks_exact(16).zip(&mut wanted) {
        *wanted = symmetric(weights, &mut codes);
    }
    let largest = wanted.iter().fold(0f32, |most, x: &f32| if x.abs() > most.abs() { *x } else { most });
    // Counts reach further below zero than above.
    let mut unit = half(largest / -128.);
    for _ in 0..ROUNDS {
        let attempt = counted_symmetric(weights, &wanted, unit);
        if attempt.error >= found.error {
            break;
        }
        let (mut cross, mut square) = (0f64, 0f64);
        let groups = weights.chunks_exact(16).zip(attempt.codes.chunks_exact(16)).zip(attempt.steps);
        for (((weights, codes), (step, _)), wanted) in groups.zip(&mut wanted) {
            let Sums { squares, products, .. } = Sums::of(weights, codes);
            if squares > 0. {
                *wanted = products / squares;
            }
            cross += f64::from(step) * f64::from(products);
            square += f64::from(step).powi(2) * f64::from(squares);
        }
        unit = if square > 0. { half((cross / square) as f32) } else { unit };
        found = attempt;
    }
    let stored = found.codes.map(|code| (code + 32.) as u8);
    for codes in stored.chunks_exact(128) {
        let low: Vec<_> = codes.iter().map(|code| code & 15).collect();
        halves(&low, blocks);
    }
    for codes in stored.chunks_exact(128) {
        let run = |run: usize, index: usize| codes.get(32 * run + index).map_or(0, |code| code >> 4);
        let four = |index| run(0, index) | run(1, index) << 2 | run(2, index) << 4 | run(3, index) << 6;
        blocks.extend((0..32).map(four));
    }
    blocks.extend(found.steps.iter().map(|(step, _)| (*step as i8) as u8));
    append_half(found.scale, blocks);
    let groups = values.chunks_exact_mut(16).zip(found.codes.chunks_exact(16)).zip(found.steps);
    for ((values, codes), (step, _)) in groups {
        let scale = found.scale * step;
        values.iter_mut().zip(codes).for_each(|(value, code)| *value = code * scale);
    }
}

fn counted_symmetric(weights: Group, wanted: &[f32; 16], unit: f32) -> Found {
    let mut found = Found { scale: unit, error: 0., ..Found::new() };
    let groups = weights.chunks_exact(16).zip(found.codes.chunks_exact_mut(16)).zip(&mut found.steps);
    for (((weights, codes), steps), wanted) in groups.zip(wanted) {
        let (mut least, mut attempt) = (f32::INFINITY, [0.; 16]);
        for count in counts(*wanted, unit, COUNTS_OF_Q6_K) {
            let error = nearest(weights, (count * unit, 0.), OF_Q6_K, &mut attempt);
            if error < least {
                (least, *steps) = (error, (count, 0.));
                codes.copy_from_slice(&attempt);
            }
        }
        found.error += least;
    }
    found
}
