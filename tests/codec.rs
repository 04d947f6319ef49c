//! The scalar codec against `mx.quantize` and `mx.dequantize` of mlx 0.32.4: every case of the fixture.

use candle_quant::format::{
    global_scale_from_absmax, Bits, Element, GroupScales, QuantizedRows, Quantizer, Real, Scale,
};
use candle_quant::QuantFormat;
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};

fn fixture() -> Vec<u8> {
    let path = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures/mlx/codec.safetensors");
    std::fs::read(path).expect(path)
}

fn words(file: &SafeTensors, name: &str) -> Vec<u32> {
    let view = file.tensor(name).expect(name);
    assert_eq!(view.dtype(), Dtype::U32, "{name}");
    view.data().chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn bytes(file: &SafeTensors, name: &str) -> Vec<u8> {
    let view = file.tensor(name).expect(name);
    assert_eq!(view.dtype(), Dtype::U8, "{name}");
    view.data().to_vec()
}

/// A float tensor of any width, exactly, as f32.
fn floats(file: &SafeTensors, name: &str) -> Vec<f32> {
    let view = file.tensor(name).expect(name);
    let pairs = || view.data().chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match view.dtype() {
        Dtype::F16 => pairs().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        Dtype::BF16 => pairs().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
        Dtype::F32 => words_of(view.data()).map(f32::from_bits).collect(),
        other => panic!("{name}: {other:?}"),
    }
}

fn words_of(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

fn typed<T: Real>(values: &[f32]) -> Vec<T> {
    values.iter().map(|&value| T::from_f32(value)).collect()
}

#[track_caller]
fn assert_same_floats(name: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{name}");
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
        assert!(same, "{name}[{index}]: got {got:e}, want {want:e}");
    }
}

/// The row length of a `[rows, K]` tensor.
fn row_length(file: &SafeTensors, name: &str) -> usize {
    *file.tensor(name).expect(name).shape().last().expect("a shape")
}

fn check_affine<T: Real>(file: &SafeTensors, case: &str, bits: usize, group_size: usize, unit: f32) {
    let format = QuantFormat::affine(bits, group_size).unwrap();
    let k = row_length(file, &format!("{case}.w"));
    let weights = typed::<T>(&floats(file, &format!("{case}.w")));
    let rows = QuantizedRows::quantize(format, Quantizer::Mlx, &weights, k, None).unwrap();
    let GroupScales::Float { scales, biases } = &rows.scales else { panic!("{case}: {format}") };
    let as_f32 = |values: &[T]| values.iter().map(|value| value.to_f32()).collect::<Vec<_>>();
    assert_eq!(rows.words, words(file, &format!("{case}.q")), "{case}.q");
    let (scales, biases) = (as_f32(scales), as_f32(biases));
    assert_same_floats(&format!("{case}.s"), &scales, &floats(file, &format!("{case}.s")));
    assert_same_floats(&format!("{case}.b"), &biases, &floats(file, &format!("{case}.b")));

    let ours = rows.dequantize(format, k, 1.0).unwrap();
    let theirs = floats(file, &format!("{case}.d"));
    if unit == 0.0 {
        return assert_same_floats(&format!("{case}.d"), &ours, &theirs);
    }
    // MLX rounds product and sum to T; ours is rounded once. The bound is that of the two roundings.
    for (index, (&value, &peer)) in ours.iter().zip(&theirs).enumerate() {
        let product = value - biases[index / group_size];
        let rounded = T::from_f32(value).to_f32();
        let bound = unit * (product.abs() + 2.0 * value.abs()) + 2f32.powi(-24);
        assert!((rounded - peer).abs() <= bound, "{case}.d[{index}]: {rounded} {peer}");
    }
}

fn check_fp<T: Real>(file: &SafeTensors, case: &str, format: QuantFormat) {
    let k = row_length(file, &format!("{case}.w"));
    let weights = typed::<T>(&floats(file, &format!("{case}.w")));
    let absmax = case.ends_with(".gs").then(|| floats(file, &format!("{case}.gs"))[0]);
    let rows = QuantizedRows::quantize(format, Quantizer::Mlx, &weights, k, absmax).unwrap();
    assert_eq!(rows.words, words(file, &format!("{case}.q")), "{case}.q");
    assert_eq!(rows.scales, GroupScales::Bytes(bytes(file, &format!("{case}.s"))), "{case}.s");
    let global = absmax.map_or(1.0, global_scale_from_absmax);
    check_fp_dequantize(file, case, format, k, global);
}

/// f32 bit for bit; f16 and bf16 against our f32 value rounded once, where MLX's own detour through
/// a 16-bit scale does not lose the number (f16 holds neither 2^16 nor 2^-25).
fn check_fp_dequantize(file: &SafeTensors, case: &str, format: QuantFormat, k: usize, global: f32) {
    let scale_bytes = bytes(file, &format!("{case}.s"));
    let scales = GroupScales::<f32>::Bytes(scale_bytes.clone());
    let ours = QuantizedRows { words: words(file, &format!("{case}.q")), scales };
    let ours = ours.dequantize(format, k, global).unwrap();
    let is_mx = format != QuantFormat::NVFP4;
    let scale_byte = |index: usize| scale_bytes[index / format.group_size()];

    let theirs = floats(file, &format!("{case}.d_f32"));
    for (index, (&value, &peer)) in ours.iter().zip(&theirs).enumerate() {
        if is_mx && scale_byte(index) == 255 {
            assert!(value.is_nan(), "{case}[{index}]: E8M0 255 is NaN");
        } else {
            assert_same_floats(&format!("{case}.d_f32 at {index}"), &[value], &[peer]);
        }
    }
    if file.tensor(&format!("{case}.d_f16")).is_err() {
        return;
    }
    for (index, peer) in floats(file, &format!("{case}.d_f16")).into_iter().enumerate() {
        if !is_mx || (103..=142).contains(&scale_byte(index)) {
            let name = format!("{case}.d_f16 at {index}");
            assert_same_floats(&name, &[f16::from_f32(ours[index]).to_f32()], &[peer]);
        }
    }
    for (index, peer) in floats(file, &format!("{case}.d_bf16")).into_iter().enumerate() {
        if !is_mx || scale_byte(index) != 255 {
            let name = format!("{case}.d_bf16 at {index}");
            assert_same_floats(&name, &[bf16::from_f32(ours[index]).to_f32()], &[peer]);
        }
    }
}

#[test]
fn affine_matches_mlx() {
    let data = fixture();
    let file = SafeTensors::deserialize(&data).unwrap();
    let mut cases = 0;
    for bits in Bits::ALL.map(Bits::get) {
        for group_size in QuantFormat::AFFINE_GROUP_SIZES {
            let case = |dtype: &str| format!("affine.b{bits}.g{group_size}.{dtype}");
            check_affine::<f32>(&file, &case("f32"), bits, group_size, 0.0);
            check_affine::<f16>(&file, &case("f16"), bits, group_size, 2f32.powi(-11));
            check_affine::<bf16>(&file, &case("bf16"), bits, group_size, 2f32.powi(-8));
            cases += 3;
        }
    }
    assert_eq!(cases, file.names().iter().filter(|n| n.starts_with("affine.") && n.ends_with(".w")).count());
}

#[test]
fn fp_modes_match_mlx() {
    let data = fixture();
    let file = SafeTensors::deserialize(&data).unwrap();
    let mut cases = 0;
    for name in file.names() {
        let Some(case) = name.strip_suffix(".w").filter(|case| !case.starts_with("affine")) else { continue };
        let mut parts = case.split('.');
        let (mode, dtype) = (parts.next().unwrap(), parts.next().unwrap());
        let format = QuantFormat::named(mode).unwrap();
        match dtype {
            "f32" => check_fp::<f32>(&file, case, format),
            "f16" => check_fp::<f16>(&file, case, format),
            "bf16" => check_fp::<bf16>(&file, case, format),
            other => panic!("{other}"),
        }
        cases += 1;
    }
    assert_eq!(cases, 12, "three modes and NVFP4 with a global scale, in three dtypes");
}

#[test]
fn every_scale_byte_times_every_code_decodes_as_in_mlx() {
    let data = fixture();
    let file = SafeTensors::deserialize(&data).unwrap();
    for mode in ["mxfp4", "nvfp4", "mxfp8"] {
        let case = format!("all.{mode}");
        let k = row_length(&file, &format!("{case}.d_f32"));
        check_fp_dequantize(&file, &case, QuantFormat::named(mode).unwrap(), k, 1.0);
    }
}

#[test]
fn element_tables_match_mlx() {
    let data = fixture();
    let file = SafeTensors::deserialize(&data).unwrap();
    let e4m3: Vec<f32> = (0..=255).map(|code| Element::E4m3.value(code)).collect();
    assert_same_floats("e4m3", &e4m3, &floats(&file, "table.e4m3.f32"));
    let e8m0: Vec<f32> = (0..255).map(|code| Scale::E8m0.value(code)).collect();
    assert_same_floats("e8m0", &e8m0, &floats(&file, "table.e8m0.f32")[..255]);
}
