//! Every instruction set against the portable one: the values of codes, bit for bit.

use super::portable::Portable;
use super::*;
use crate::format::E2M1;

/// Codes whose highest bit is a sign.
struct Signed;

impl Table16 for Signed {
    const VALUES: [f32; 16] = E2M1;
}

/// Values with all bits of f32; code 0 is not zero.
struct Full;

impl Table16 for Full {
    const VALUES: [f32; 16] = {
        let mut values = [0.; 16];
        let mut code = 0;
        while code < 16 {
            values[code] = f32::from_bits(0xBF80_1234 ^ (code as u32 * 0x0123_4567));
            code += 1;
        }
        values
    };
}

/// Values that bf16 has; code 0 is not zero.
struct Upper;

impl Table16 for Upper {
    const VALUES: [f32; 16] = {
        let mut values = [0.; 16];
        let mut code = 0;
        while code < 16 {
            values[code] = f32::from_bits(Full::VALUES[code].to_bits() & 0xFFFF_0000);
            code += 1;
        }
        values
    };
}

/// Values of three bits, those of [`Full`].
struct Three;

impl Table16 for Three {
    const BITS: usize = 3;
    const VALUES: [f32; 16] = {
        let mut values = [0.; 16];
        let mut code = 0;
        while code < 16 {
            values[code] = Full::VALUES[code % 8];
            code += 1;
        }
        values
    };
}

/// Values of two bits.
struct Two;

impl Table16 for Two {
    const BITS: usize = 2;
    const VALUES: [f32; 16] = {
        let mut values = [0.; 16];
        let mut code = 0;
        while code < 16 {
            values[code] = Full::VALUES[code % 4];
            code += 1;
        }
        values
    };
}

/// The values of codes by table, as integers and as E4M3 numbers, by tables of three and two bits, in the order of codes.
type Values = [Vec<f32>; 7];

/// `codes` has whole blocks of every instruction set, also if they are eight bits wide.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
unsafe fn values<S: Simd>(codes: &[u8]) -> Values {
    let mut all = [const { Vec::new() }; 7];
    // SAFETY: chunks have the bytes of a block of four or of eight bits; the caller vouches for the features.
    unsafe {
        for codes in codes.chunks_exact(2 * S::LANES) {
            let codes = S::load_codes::<4>(codes.as_ptr());
            push::<S>(&mut all[0], S::lookup16::<Signed>(codes));
            push::<S>(&mut all[1], S::lookup16::<Full>(codes));
            push::<S>(&mut all[2], S::lookup16::<Upper>(codes));
        }
        for codes in codes.chunks_exact(4 * S::LANES) {
            let codes = S::load_codes::<8>(codes.as_ptr());
            push::<S>(&mut all[3], S::int8(codes));
            push::<S>(&mut all[4], each!(S::e4m3(codes), |value| S::mul(value, S::splat(0.5))));
        }
        for codes in codes.chunks_exact(3 * S::LANES / 2) {
            push::<S>(&mut all[5], S::lookup16::<Three>(S::load_codes::<3>(codes.as_ptr())));
        }
        for codes in codes.chunks_exact(S::LANES) {
            push::<S>(&mut all[6], S::lookup16::<Two>(S::load_codes::<2>(codes.as_ptr())));
        }
    }
    all
}

/// Appends a block in the order of its elements.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
unsafe fn push<S: Simd>(to: &mut Vec<f32>, block: [S::F; 4]) {
    let mut lanes = [[0f32; 16]; 4];
    for i in 0..4 {
        // SAFETY: no vector has more than sixteen lanes; the caller vouches for the features.
        unsafe { S::store(lanes[i].as_mut_ptr(), block[i]) };
    }
    to.extend((0..S::BLOCK).map(|element| lanes[element % 4][element / 4]));
}

/// [`values`] with the features of an instruction set.
fn values_with(isa: &InstructionSet, codes: &[u8]) -> Values {
    macro_rules! entry {
        ($isa:ty, $features:literal) => {{
            #[target_feature(enable = $features)]
            unsafe fn entry(codes: &[u8]) -> Values {
                // SAFETY: `entry` enables the features.
                unsafe { values::<$isa>(codes) }
            }
            // SAFETY: the instruction set is one of those available.
            unsafe { entry(codes) }
        }};
    }
    match isa {
        // SAFETY: no features are needed.
        InstructionSet::Portable(_) => unsafe { values::<Portable>(codes) },
        #[cfg(target_arch = "aarch64")]
        InstructionSet::Neon(_) | InstructionSet::NeonDotprod(_) | InstructionSet::NeonI8mm(_) => {
            entry!(neon::Neon, "neon")
        }
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2(_) => entry!(avx2::Avx2, "avx2,fma,f16c"),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512(_) | InstructionSet::Avx512Vnni(_) | InstructionSet::Avx512Amx(_) => {
            entry!(avx512::Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,gfni,avx2,fma,f16c")
        }
    }
}

#[test]
fn values_of_codes_have_the_bits_of_the_portable_ones() {
    // Every byte, in several lanes.
    let codes: Vec<u8> = (0..3072u32).map(|index| (index * 7 + index / 256 * 3) as u8).collect();
    let table = |values: [f32; 16]| {
        codes.iter().flat_map(move |byte| [byte & 15, byte >> 4].map(|code| values[usize::from(code)]))
    };
    let want = values_with(&InstructionSet::Portable(Portable), &codes);
    assert!(want[0].iter().copied().eq(table(E2M1)));
    assert!(want[1].iter().copied().eq(table(Full::VALUES)));
    let words: Vec<u32> = codes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    for (kind, bits) in [(5, 3), (6, 2)] {
        let mut unpacked = vec![0; codes.len() * 8 / bits];
        crate::format::unpack(&words, bits, &mut unpacked);
        assert!(want[kind].iter().copied().eq(unpacked.iter().map(|code| Full::VALUES[usize::from(*code)])));
    }
    assert!(want[3].iter().copied().eq(codes.iter().map(|code| f32::from(*code as i8))));
    for isa in available() {
        for (kind, (got, want)) in values_with(isa, &codes).iter().zip(&want).enumerate() {
            assert_eq!(got.len(), want.len(), "{} {kind}", isa.name());
            for (index, (got, want)) in got.iter().zip(want).enumerate() {
                let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                assert!(same, "{} {kind} [{index}]: {got} is not {want}", isa.name());
            }
        }
    }
}
