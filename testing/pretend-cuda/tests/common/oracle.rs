//! Exact arithmetic to test against: numbers times a power of two, as integers.

/// `x` times 2^`scale`, which is an integer.
pub fn fixed(x: f64, scale: i32) -> i128 {
    let scaled = x * 2f64.powi(scale);
    assert_eq!(scaled, scaled.trunc(), "{x} is no multiple of 2^-{scale}");
    scaled as i128
}

/// The format's number nearest to `exact` times 2^-48, ties to even, if `guess` is close to it.
pub fn nearest(exact: i128, guess: u16, value: impl Fn(u16) -> f64) -> u16 {
    // Neighbours of small numbers are finer.
    nearest_at(exact << 12, 60, guess, value)
}

/// The same for times 2^-`scale`. Beyond the largest number, infinity takes the place of the next one.
pub fn nearest_at(exact: i128, scale: i32, guess: u16, value: impl Fn(u16) -> f64) -> u16 {
    if exact == 0 {
        return if value(guess) == 0.0 { guess } else { 0 };
    }
    let candidates = [guess.wrapping_sub(1), guess, guess.wrapping_add(1)];
    let distance = |bits: &u16| {
        let x = value(*bits);
        let x = if x.is_infinite() { 2.0 * value(bits - 1) - value(bits - 2) } else { x };
        // Not finite: the neighbour of infinity, or of zero with the other sign.
        if x.is_nan() {
            (i128::MAX, 0)
        } else {
            ((fixed(x, scale) - exact).abs(), bits % 2)
        }
    };
    candidates.into_iter().min_by_key(distance).unwrap_or(guess)
}

/// Numbers that look random.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 32
    }

    /// From 0 to 1.
    pub fn number(&mut self) -> f64 {
        self.bits() as f64 / 2f64.powi(32)
    }
}
