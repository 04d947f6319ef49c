//! The numbers of numpy's `RandomState`, with which sources of fixtures were drawn.

use sha2::{Digest, Sha256};

const SIZE: usize = 624;
const MIDDLE: usize = 397;

/// MT19937 and the polar method.
pub struct Random {
    state: [u32; SIZE],
    next: usize,
    spare: Option<f64>,
}

impl Random {
    /// Seeded by the first four bytes of the SHA-256 of a text, as the scripts do.
    pub fn seeded_by(text: &str) -> Self {
        let digest = Sha256::digest(text.as_bytes());
        Self::new(u32::from_le_bytes([digest[0], digest[1], digest[2], digest[3]]))
    }

    pub fn new(seed: u32) -> Self {
        let mut state = [seed; SIZE];
        for index in 1..SIZE {
            let last = state[index - 1];
            state[index] = 1_812_433_253u32.wrapping_mul(last ^ last >> 30).wrapping_add(index as u32);
        }
        Self { state, next: SIZE, spare: None }
    }

    fn word(&mut self) -> u32 {
        if self.next == SIZE {
            for index in 0..SIZE {
                let high = self.state[index] & 0x8000_0000 | self.state[(index + 1) % SIZE] & 0x7FFF_FFFF;
                let odd = if high & 1 == 1 { 0x9908_B0DF } else { 0 };
                self.state[index] = self.state[(index + MIDDLE) % SIZE] ^ high >> 1 ^ odd;
            }
            self.next = 0;
        }
        let mut word = self.state[self.next];
        self.next += 1;
        word ^= word >> 11;
        word ^= word << 7 & 0x9D2C_5680;
        word ^= word << 15 & 0xEFC6_0000;
        word ^ word >> 18
    }

    /// From 0 to 1, in steps of 2^-53.
    fn uniform(&mut self) -> f64 {
        let (high, low) = (self.word() >> 5, self.word() >> 6);
        (f64::from(high) * 67_108_864. + f64::from(low)) / 9_007_199_254_740_992.
    }

    /// A number of the standard normal distribution.
    pub fn normal(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        loop {
            let (x, y) = (2. * self.uniform() - 1., 2. * self.uniform() - 1.);
            let square = x * x + y * y;
            if square < 1. && square != 0. {
                let factor = (-2. * square.ln() / square).sqrt();
                self.spare = Some(factor * x);
                return factor * y;
            }
        }
    }
}
