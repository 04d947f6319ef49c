//! Packed weights read by the letter of the format, in f64 where it matters, beside the crate's code.
#![allow(dead_code)] // each test binary uses its own part

use candle_core::{DType, Device, Result, Tensor};
use candle_quant::format::{Element, IqTable, Scale, SUPER_BLOCK};
use candle_quant::{QuantFormat, QuantTensor, SuperBlocks};

/// Numbers of roughly normal distribution that depend on `seed` alone.
pub fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..count).map(|_| (0..6).map(|_| uniform()).sum::<f32>() - 3.0).collect()
}

/// [`numbers`] as an F32 tensor on the CPU.
pub fn tensor(dims: &[usize], seed: u64) -> Tensor {
    Tensor::from_vec(numbers(dims.iter().product(), seed), dims, &Device::Cpu).unwrap()
}

/// A packed weight of [`numbers`].
pub fn packed(dims: &[usize], format: QuantFormat, seed: u64) -> QuantTensor {
    QuantTensor::quantize(&tensor(dims, seed), format).unwrap()
}

/// A weight on the CPU of random codes, with scales of either sign where the format has them; those and
/// the biases of an affine format have `dtype`.
pub fn random(dims: &[usize], format: QuantFormat, dtype: DType, seed: u64) -> QuantTensor {
    let k = *dims.last().unwrap();
    let of_row = |len: usize| [&dims[..dims.len() - 1], &[len]].concat();
    let words = format.words_per_row(k).unwrap();
    let groups = format.groups_per_row(k).unwrap();
    let count: usize = dims[..dims.len() - 1].iter().product();
    // The low bits of such a float's mantissa are as good as any.
    let word = |pair: &[f32]| (pair[0].to_bits() & 0xffff) << 16 | pair[1].to_bits() & 0xffff;
    let mut packed: Vec<u32> = numbers(2 * count * words, seed).chunks(2).map(word).collect();
    let scales = numbers(count * groups, seed + 1);
    let byte = |byte: u8| byte & 0x7f != 0x7f;
    if format.element() == Element::E4m3 {
        for word in &mut packed {
            // NaN belongs to other tests.
            *word =
                u32::from_le_bytes(word.to_le_bytes().map(|code| if byte(code) { code } else { code ^ 1 }));
        }
    }
    let tensor = |values: Vec<f32>| {
        Tensor::from_vec(values, of_row(groups), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    };
    let bytes = |of: &dyn Fn(f32) -> u8| {
        let bytes: Vec<u8> = scales.iter().map(|scale| of(*scale)).collect();
        Tensor::from_vec(bytes, of_row(groups), &Device::Cpu).unwrap()
    };
    let (scales, biases) = match format.scale() {
        Scale::Float => {
            // Integers reach up to 2^bits, E4M3 up to 448, values of a table up to 1: weights of a size that f16 holds after two products.
            let step = match format.element() {
                Element::Uint(bits) => 1. / (1 << bits.get()) as f32,
                Element::E4m3 => 1. / 448.,
                Element::Iq4Nl => 1. / 128.,
                _ => 1.,
            };
            let biases = numbers(count * groups, seed + 2);
            (
                tensor(scales.iter().map(|scale| scale * step).collect()),
                format.has_biases().then(|| tensor(biases)),
            )
        }
        // From 2^-9 to 2^3.
        Scale::E8m0 => (bytes(&|scale| (124. + scale * 2.) as u8), None),
        // Signs too, though no encoder writes them.
        Scale::E4m3 => {
            (bytes(&|scale| ((scale.abs() * 24.) as u8 + 24) | if scale < -1. { 0x80 } else { 0 }), None)
        }
        Scale::SuperBlock => {
            let units = |of: f32, seed: u64| {
                let count = count * k / SUPER_BLOCK;
                let units = numbers(count, seed).into_iter().map(|unit| unit * of).collect();
                let units = Tensor::from_vec::<_, f32>(units, of_row(k / SUPER_BLOCK), &Device::Cpu).unwrap();
                units.to_dtype(DType::F16).unwrap()
            };
            // Integers of either sign, -128 among them.
            let integer = |scale: f32| (scale * 100.).clamp(-128., 127.) as i8 as u8;
            let biases = format.has_biases().then(|| {
                let biases = numbers(count * groups, seed + 2).into_iter().map(integer).collect();
                Tensor::from_vec::<_, u8>(biases, of_row(groups), &Device::Cpu).unwrap()
            });
            let super_blocks = SuperBlocks {
                scales: units(0.01 / format.element().range().1, seed + 3),
                biases: format.has_biases().then(|| units(0.01, seed + 4)),
            };
            let packed = Tensor::from_vec(packed, of_row(words), &Device::Cpu).unwrap();
            let parts = (bytes(&integer), biases);
            return QuantTensor::with_super_blocks(format, packed, parts, super_blocks).unwrap();
        }
        scale => panic!("no scales of {scale:?} are made here"),
    };
    let packed = Tensor::from_vec(packed, of_row(words), &Device::Cpu).unwrap();
    QuantTensor::new(format, packed, scales, biases, None).unwrap()
}

/// All elements in their order, as f32.
pub fn flat(tensor: &Tensor) -> Vec<f32> {
    let tensor = tensor.to_device(&Device::Cpu).unwrap();
    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// All elements in their order, as the bits of f32.
pub fn bits(tensor: &Tensor) -> Vec<u32> {
    flat(tensor).into_iter().map(f32::to_bits).collect()
}

/// The message of the error that `result` has to be.
#[track_caller]
pub fn refused<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("accepted"),
        Err(error) => error.to_string(),
    }
}

/// The sixteen values of bitsandbytes, as its CUDA source writes them.
#[allow(clippy::excessive_precision)]
const NF4: [f32; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];

/// Those of IQ4_NL, as ggml-common.h has them.
const IQ4_NL: [f32; 16] =
    [-127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.];
/// The sixteen twelfths of bitsandbytes, rounded.
fn fp4(code: u32) -> f32 {
    let twelfths = [0., 0.0625, 8., 12., 4., 6., 2., 3.][code as usize & 7];
    let sign = if code & 8 == 0 { 1. } else { -1. };
    if twelfths == 0. {
        0.
    } else {
        sign * twelfths / 12.
    }
}

/// Those of the other IQ types, as their `dequantize_row` functions multiply integers and halves of halves.
fn iq(table: IqTable, code: u32) -> f32 {
    let (code, sign_bit) = (code as usize, 1 << (table.bits() - 1));
    let signed = |magnitude: f32| if code & sign_bit == 0 { magnitude } else { -magnitude };
    match table {
        IqTable::Iq1S => code as f32 - 1. + 0.125,
        IqTable::Iq1M => signed((code & 3) as f32 - 1. + 0.125),
        IqTable::Iq2 => signed([8., 25., 43., 62.][code & 3] * 0.5 * 0.25),
        IqTable::Iq3Xxs => signed([4., 12., 20., 28., 36., 44., 52., 62.][code & 7] * 0.5 * 0.5),
        IqTable::Iq3S => signed((2 * (code & 7) + 1) as f32),
        other => panic!("{other:?} has no reference"),
    }
}

/// Those of groups: as they are stored, but of formats with super-blocks what their bytes count.
pub fn scales_and_biases(weight: &QuantTensor) -> (Vec<f32>, Option<Vec<f32>>) {
    let counted = |values: Vec<f32>, of: Option<&Tensor>| -> Vec<f32> {
        let Some(of) = of.map(flat) else { return values };
        let each = values.len() / of.len();
        values.iter().enumerate().map(|(i, byte)| f32::from(*byte as u8 as i8) * of[i / each]).collect()
    };
    let of = weight.super_blocks();
    let scales = counted(flat(weight.scales()), of.map(|of| &of.scales));
    let biases = weight.biases().map(|biases| counted(flat(biases), of.and_then(|of| of.biases.as_ref())));
    (scales, biases)
}

/// Every weight, dequantized element by element from the definition of its format.
pub fn reference(weight: &QuantTensor) -> Vec<f32> {
    const E2M1: [f32; 8] = [0., 0.5, 1., 1.5, 2., 3., 4., 6.];
    let format = weight.format();
    let words: Vec<u32> = weight.packed().flatten_all().unwrap().to_vec1().unwrap();
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let (scales, biases) = scales_and_biases(weight);
    let globals = weight.global_scale().map(flat);
    let dims = weight.dims();
    let of_matrix = dims[dims.len() - 2..].iter().product::<usize>();
    // Rows are whole bytes, so the stream of all rows is their concatenation.
    let code = |index: usize| {
        let bit = |b: usize| u32::from(bytes[b / 8] >> (b % 8) & 1);
        (0..format.bits()).map(|b| bit(index * format.bits() + b) << b).sum::<u32>()
    };
    let global = |index: usize| {
        let globals = globals.as_deref().unwrap_or(&[1.]);
        globals[if globals.len() == 1 { 0 } else { index / of_matrix }]
    };
    let scale_of = |index: usize| {
        let byte = scales[index / format.group_size()];
        let scale = match format.scale() {
            Scale::Float | Scale::SuperBlock => return byte,
            Scale::E8m0 => power_of_two(byte as i32 - 127),
            Scale::E4m3 => e4m3(byte as u32),
            other => panic!("{format}: {other:?} scales have no reference"),
        };
        scale * global(index)
    };
    let dequantize = |index: usize| {
        let (code, group) = (code(index), index / format.group_size());
        let signed = |magnitude: f32, sign: bool| if sign { -magnitude } else { magnitude };
        match format.element() {
            Element::Uint(_) => {
                let zero = f64::from(1u32 << (format.bits() - 1));
                match &biases {
                    Some(biases) => code as f32 * scales[group] + biases[group],
                    // Exact in f64, then rounded once; a zero is positive.
                    None => ((f64::from(code) - zero) * f64::from(scales[group])) as f32 + 0.,
                }
            }
            Element::E2m1 => signed(E2M1[code as usize & 7], code & 8 != 0) * scale_of(index),
            Element::E4m3 => e4m3(code) * scale_of(index),
            Element::Nf4 => NF4[code as usize & 15] * scale_of(index),
            Element::Fp4 => fp4(code) * scale_of(index),
            Element::Iq4Nl => IQ4_NL[code as usize & 15] * scale_of(index),
            Element::Iq(table) => iq(table, code) * scale_of(index),
            Element::Int8 => f32::from(code as u8 as i8) / 64. * scale_of(index),
            other => panic!("{other:?} has no reference"),
        }
    };
    (0..dims.iter().product()).map(dequantize).collect()
}

fn power_of_two(exponent: i32) -> f32 {
    2f64.powi(exponent) as f32
}

/// Four bits of exponent with bias 7, three of mantissa.
fn e4m3(code: u32) -> f32 {
    let (exponent, mantissa) = ((code >> 3 & 15) as i32, f64::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa * 2f64.powi(-9),
        _ => (1. + mantissa / 8.) * 2f64.powi(exponent - 7),
    };
    (if code & 128 != 0 { -magnitude } else { magnitude }) as f32
}

/// The relative L2 distance of `actual` from `expected`.
pub fn relative_error(actual: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    let difference: f64 = actual.iter().zip(expected).map(|(a, e)| (f64::from(*a) - e).powi(2)).sum();
    (difference / expected.iter().map(|e| e * e).sum::<f64>()).sqrt()
}
