//! The K types: scales of a super-block, which count a number that it has, are searched for with their codes.
//!
//! Each group's best scale (and bias) comes first, then the numbers that they count, then for each group the counts of the
//! smallest squared error near its best ones, then the numbers of the least squares for these codes, and so on as long as the
//! error falls.

use super::ggml::SUPER_BLOCK;
use super::ggml_blocks::half;
use super::ggml_super_layouts::{self as layouts, Codes, Steps};

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

/// What the K types with biases differ in: elements of a group, the largest code, the most that scales and biases count.
#[derive(Clone, Copy)]
pub(super) struct Affine {
    group: usize,
    most: f32,
    counts: f32,
    append: fn((f32, f32), &Steps, &Codes, &mut Vec<u8>),
}

pub(super) const Q2_K: Affine = Affine { group: 16, most: 3., counts: 15., append: layouts::q2_k };
pub(super) const Q4_K: Affine = Affine { group: 32, most: 15., counts: 63., append: layouts::q4_k };
pub(super) const Q5_K: Affine = Affine { group: 32, most: 31., counts: 63., append: layouts::q5_k };

impl Affine {
    fn codes(self) -> (f32, f32) {
        (0., self.most)
    }
}

/// Scale and bias of a group of the smallest squared error that is found, none below zero.
fn affine(of: Affine, group: Group, codes: &mut [f32]) -> (f32, f32) {
    let weights = group.weights;
    let low = weights.iter().copied().fold(0f32, f32::min);
    let high = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if high <= low {
        codes.fill(0.);
        return (0., -low);
    }
    let (mut best, mut least) = (((high - low) / of.most, -low), f32::INFINITY);
    for tenths in -10..=10i8 {
        let first = (high - low) / (of.most + f32::from(tenths) / 10.);
        nearest(group, (first, -low), of.codes(), codes);
        let fitted = least_squares(group, codes);
        let error = nearest(group, fitted, of.codes(), codes);
        if error < least {
            (best, least) = (fitted, error);
        }
    }
    nearest(group, best, of.codes(), codes);
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

/// Appends a block of 256 weights of one of the types with biases, and sets `values` to what it means.
pub(super) fn biased(of: Affine, weights: Group, blocks: &mut Vec<u8>, values: &mut [f32]) {
    let mut found = Found::new();
    let mut wanted = vec![(0., 0.); SUPER_BLOCK / of.group];
    for ((weights, codes), wanted) in
        weights.chunks_exact(of.group).zip(found.codes.chunks_exact_mut(of.group)).zip(&mut wanted)
    {
        *wanted = affine(of, weights, codes);
    }
    let most = |of: fn(&(f32, f32)) -> f32| wanted.iter().map(of).fold(0f32, f32::max);
    let mut units = (half(most(|group| group.0) / of.counts), half(most(|group| group.1) / of.counts));
    for _ in 0..ROUNDS {
        let attempt = counted(of, weights, &wanted, units);
        if attempt.error >= found.error {
            break;
        }
        let groups =
            weights.chunks_exact(of.group).zip(attempt.codes.chunks_exact(of.group)).zip(&mut wanted);
        groups.for_each(|((weights, codes), wanted)| *wanted = least_squares(weights, codes));
        units = fitted_units(of, weights, &attempt);
        found = attempt;
    }
    let (numbers, codes) = ((found.scale, found.bias), found.codes());
    let steps = found.steps.map(|(scale, bias)| (scale as u8, bias as u8));
    (of.append)(numbers, &steps, &codes, blocks);
    let groups = values.chunks_exact_mut(of.group).zip(found.codes.chunks_exact(of.group)).zip(found.steps);
    for ((values, codes), (step, bias)) in groups {
        let (scale, bias) = (found.scale * step, found.bias * bias);
        values.iter_mut().zip(codes).for_each(|(value, code)| *value = code * scale - bias);
    }
}

/// Counts of `units` and codes of the smallest squared error near the scales and biases that groups want.
fn counted(of: Affine, weights: Group, wanted: &[(f32, f32)], units: (f32, f32)) -> Found {
    let mut found = Found { scale: units.0, bias: units.1, error: 0., ..Found::new() };
    let groups =
        weights.chunks_exact(of.group).zip(found.codes.chunks_exact_mut(of.group)).zip(&mut found.steps);
    for (((weights, codes), steps), wanted) in groups.zip(wanted) {
        let (mut least, mut attempt) = (f32::INFINITY, vec![0.; of.group]);
        for scale in counts(wanted.0, units.0, (0., of.counts)) {
            for bias in counts(wanted.1, units.1, (0., of.counts)) {
                let parameters = (scale * units.0, bias * units.1);
                let error = nearest(weights, parameters, of.codes(), &mut attempt);
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
fn fitted_units(of: Affine, weights: Group, found: &Found) -> (f32, f32) {
    let mut sums = [0f64; 5];
    let groups = weights.chunks_exact(of.group).zip(found.codes.chunks_exact(of.group)).zip(&found.steps);
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

/// What the K types without biases differ in, which all have groups of 16: the smallest code and the least that scales count;
/// the largest are one nearer to zero.
#[derive(Clone, Copy)]
pub(super) struct Symmetric {
    least: f32,
    counts: f32,
    append: fn(f32, &[i8; 16], &Codes, &mut Vec<u8>),
}

pub(super) const Q3_K: Symmetric = Symmetric { least: -4., counts: -32., append: layouts::q3_k };
pub(super) const Q6_K: Symmetric = Symmetric { least: -32., counts: -128., append: layouts::q6_k };

/// Both ends of a range that reaches one further below zero than above.
fn ends(least: f32) -> (f32, f32) {
    (least, -least - 1.)
}

/// The scale of a group of the smallest squared error that is found, of either sign.
fn symmetric(of: Symmetric, group: Group, codes: &mut [f32]) -> f32 {
    let range = ends(of.least);
    let furthest = group.weights.iter().fold(0f32, |most, x| if x.abs() > most.abs() { *x } else { most });
    let (mut best, mut least) = (0., f32::INFINITY);
    for end in [range.0, range.1] {
        for tenths in -9..=9i8 {
            let first = furthest / (end + f32::from(tenths) / 10.);
            nearest(group, (first, 0.), range, codes);
            let Sums { squares, products, .. } = Sums::of(group, codes);
            let fitted = if squares > 0. { products / squares } else { 0. };
            let error = nearest(group, (fitted, 0.), range, codes);
            if error < least {
                (best, least) = (fitted, error);
            }
        }
    }
    best
}

/// Appends a block of 256 weights of one of the types without biases, and sets `values` to what it means.
pub(super) fn unbiased(of: Symmetric, weights: Group, blocks: &mut Vec<u8>, values: &mut [f32]) {
    let (mut found, mut wanted) = (Found::new(), [0.; 16]);
    let mut codes = [0.; 16];
    for (weights, wanted) in weights.chunks_exact(16).zip(&mut wanted) {
        *wanted = symmetric(of, weights, &mut codes);
    }
    let largest = wanted.iter().fold(0f32, |most, x: &f32| if x.abs() > most.abs() { *x } else { most });
    // Counts reach further below zero than above.
    let mut unit = half(largest / of.counts);
    for _ in 0..ROUNDS {
        let attempt = counted_symmetric(of, weights, &wanted, unit);
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
    let codes = found.codes.map(|code| (code - of.least) as u8);
    let steps = found.steps.map(|(step, _)| step as i8);
    (of.append)(found.scale, &steps, &codes, blocks);
    let groups = values.chunks_exact_mut(16).zip(found.codes.chunks_exact(16)).zip(found.steps);
    for ((values, codes), (step, _)) in groups {
        let scale = found.scale * step;
        values.iter_mut().zip(codes).for_each(|(value, code)| *value = code * scale);
    }
}

fn counted_symmetric(of: Symmetric, weights: Group, wanted: &[f32; 16], unit: f32) -> Found {
    let mut found = Found { scale: unit, error: 0., ..Found::new() };
    let groups = weights.chunks_exact(16).zip(found.codes.chunks_exact_mut(16)).zip(&mut found.steps);
    for (((weights, codes), steps), wanted) in groups.zip(wanted) {
        let (mut least, mut attempt) = (f32::INFINITY, [0.; 16]);
        for count in counts(*wanted, unit, ends(of.counts)) {
            let error = nearest(weights, (count * unit, 0.), ends(of.least), &mut attempt);
            if error < least {
                (least, *steps) = (error, (count, 0.));
                codes.copy_from_slice(&attempt);
            }
        }
        found.error += least;
    }
    found
}
