//! Numbers of the emulator against exact arithmetic.

mod common;

use common::launch::{launch, params};
use common::oracle::{fixed, nearest, nearest_at, Random};
use half::{bf16, f16};
use pretend_cuda::emulator::Schedule;

fn arithmetic(bfloat16: bool, value: impl Fn(u16) -> f64 + Copy, operand: impl Fn(&mut Random) -> u16) {
    let mut random = Random::new(5);
    let n = 100_000;
    let mut operands = || -> Vec<u16> { (0..n).map(|_| operand(&mut random)).collect() };
    let (a, b, c) = (operands(), operands(), operands());
    let mut results = [vec![0u16; n], vec![0u16; n], vec![0u16; n], vec![0u16; n]];
    let [fused, product, sum, quotient] = &mut results;
    let params = params!(
        a.as_ptr(),
        b.as_ptr(),
        c.as_ptr(),
        fused.as_mut_ptr(),
        product.as_mut_ptr(),
        sum.as_mut_ptr(),
        quotient.as_mut_ptr(),
        n as u32,
        u32::from(bfloat16),
    );
    launch("toy_half_arithmetic", (n as u32).div_ceil(256), 256, 0, &params, Schedule::Forward).unwrap();
    for i in 0..n {
        let [x, y, z] = [a[i], b[i], c[i]].map(value);
        let product = fixed(x, 24) * fixed(y, 24);
        let is = |name: &str, got: u16, exact: i128| {
            let nearest = nearest(exact, got, value);
            assert_eq!(value(got), value(nearest), "{name} of {x}, {y}, {z}: {}", value(got));
        };
        is("fma", results[0][i], product + (fixed(z, 24) << 24));
        is("product", results[1][i], product);
        is("sum", results[2][i], (fixed(x, 24) + fixed(y, 24)) << 24);
        // |got - x / y| <= half a unit in the last place, without dividing: compare got y with x.
        if y != 0.0 && x != 0.0 {
            let got = value(results[3][i]);
            let unit = value(results[3][i] ^ 1) - got;
            assert!(
                !got.is_finite() || ((got * y - x) / y).abs() <= unit.abs() * 0.5000001,
                "{x} / {y}: {got}"
            );
        }
    }
}

#[test]
fn half_arithmetic_rounds_once() {
    arithmetic(
        false,
        |bits| f16::from_bits(bits).to_f64(),
        |random| loop {
            let bits = random.bits() as u16;
            if f16::from_bits(bits).is_finite() {
                return bits;
            }
        },
    );
}

#[test]
fn bfloat16_arithmetic_rounds_once() {
    // Multiples of 2^-24 below 2^16, which the oracle holds exactly.
    arithmetic(
        true,
        |bits| bf16::from_bits(bits).to_f64(),
        |random| {
            let exponent = 127 - 17 + random.bits() % 33;
            ((random.bits() % 2) << 15 | exponent << 7 | (random.bits() % 128)) as u16
        },
    );
}

#[test]
fn conversions_round_to_nearest_even() {
    let mut random = Random::new(7);
    let mut x: Vec<f32> =
        (0..50_000).map(|_| f32::from_bits(random.bits() as u32)).filter(|x| x.abs() < 1e5).collect();
    // Halfway between two halves and between two bfloat16, subnormal halves included.
    x.extend(
        (0..2000u32).flat_map(|i| [f32::from_bits(i << 16 | 0x4000_8000), (i as f32 + 0.5) * 2f32.powi(-24)]),
    );
    let n = x.len();
    let (mut half, mut bfloat) = (vec![0u16; n], vec![0u16; n]);
    let params = params!(x.as_ptr(), half.as_mut_ptr(), bfloat.as_mut_ptr(), n as u32);
    launch("toy_round", (n as u32).div_ceil(256), 256, 0, &params, Schedule::Forward).unwrap();
    for i in 0..n {
        if x[i].abs() < 2f32.powi(-60) {
            continue;
        }
        let exact = fixed(f64::from(x[i]), 100);
        assert_eq!(
            half[i],
            nearest_at(exact, 100, half[i], |bits| f16::from_bits(bits).to_f64()),
            "{}",
            x[i]
        );
        assert_eq!(
            bfloat[i],
            nearest_at(exact, 100, bfloat[i], |bits| bf16::from_bits(bits).to_f64()),
            "{}",
            x[i]
        );
    }
}

#[test]
fn bits() {
    let mut y = [0u32; 13];
    launch("toy_bits", 1, 1, 0, &params!(y.as_mut_ptr()), Schedule::Forward).unwrap();
    assert_eq!(y[0], 0x77553311);
    // Selectors 8, c, 0, 0 of bytes 80 00 00 00 7f 00 00 00: sign of byte 0, sign of byte 4, bytes 0 and 0.
    assert_eq!(y[1], 0x808000ff);
    assert_eq!(y[2], 0xf0123456);
    assert_eq!(y[3], 0xbcdef012);
    assert_eq!(y[4], 8);
    assert_eq!(y[5], 31);
    assert_eq!(y[6], 32);
    // 1 * 4 + -1 * 5 + 2 * 6 + 3 * 7 + 100
    assert_eq!(y[7], 132);
    assert_eq!(y[8] as i32, 2);
    assert_eq!(y[9] as i32, -3);
    assert_eq!(y[10], 7);
    assert_eq!(f32::from_bits(y[11]), 15.5);
    // 0x123456789abcdef0 * 0xfedcba9876543210, its bits 96 to 127
    assert_eq!(y[12], 0x121fa00a);
}
