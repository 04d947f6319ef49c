//! Packed weights in MLX's layout, or in a format that holds them exactly: no code is dequantized or rounded.

use crate::convert::output::{OutputTensor, WIDE_MXFP4};
use crate::convert::plan::half_scales;
use candle_core::{DType, Tensor};
use candle_quant::checkpoint::IntegerGroups;
use candle_quant::format::{code_at, pack, Element, GgmlType, Scale, Slm1Type, ZeroPoint};
use candle_quant::{Error, QuantFormat, QuantTensor, Result};
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;

/// Hands on a weight matrix by matrix: the number of the first row, and the bytes for each tensor of the output, that
/// is codes, scales, and biases if `format` and the output have them.
pub(super) fn repack(
    name: &str,
    weight: QuantTensor,
    format: QuantFormat,
    outputs: &[OutputTensor],
    mut write: impl FnMut(usize, Vec<Vec<u8>>) -> Result<()>,
) -> Result<()> {
    if weight.global_scale().is_some() {
        return Err(Error::Unsupported {
            what: format!("`{}` with a multiplier of its scales in an MLX checkpoint", name),
            remedy: "requantize or dequantize it".into(),
        });
    }
    let scales = outputs.get(1).map_or(Dtype::BF16, |output| output.dtype);
    let is_wide = scales == Dtype::F32;
    let has_biases = outputs.iter().filter(|output| output.value.is_none()).count() > 2;
    let differs = |biases: &&Tensor| has_biases && !is_wide && biases.dtype() != weight.scales().dtype();
    if let Some(biases) = weight.biases().filter(differs) {
        return Err(Error::mismatch(
            format!("biases of `{}`", name),
            format!("numbers that {:?}, the dtype of its scales, holds exactly", weight.scales().dtype()),
            format!("{:?}; requantize or dequantize it", biases.dtype()),
        ));
    }
    let bytes = |matrix: &QuantTensor| match format == matrix.format().with_biases() {
        true => {
            let biases = match matrix.format().zero_point() {
                // Those of symmetric codes say what the midpoint says.
                _ if !has_biases => None,
                // With F32 scales, by a power of two.
                ZeroPoint::Midpoint => {
                    Some(matrix.scales().affine(f64::from(-matrix.format().midpoint()), 0.)?)
                }
                ZeroPoint::Bias | ZeroPoint::None | _ => matrix.biases().cloned(),
            };
            // Biases of whole zeros may need F32, which scales beside them then have, too.
            let dtype = |numbers: &Tensor| if is_wide { DType::F32 } else { numbers.dtype() };
            let floats = [Some(matrix.scales()), biases.as_ref()].into_iter().flatten();
            let floats = floats.map(|numbers| le_bytes(&numbers.to_dtype(dtype(numbers))?));
            std::iter::once(le_bytes(matrix.packed())).chain(floats).collect()
        }
        false => widened(name, matrix, scales),
    };
    let dims = weight.dims();
    let [stack @ .., n, _] = dims.as_slice() else {
        return write(0, bytes(&weight)?);
    };
    if stack.is_empty() {
        return write(0, bytes(&weight)?);
    }
    let flat = weight.flatten_stack()?;
    drop(weight);
    (0..stack.iter().product()).try_for_each(|index: usize| write(index * n, bytes(&flat.matrix(index)?)?))
}

/// Hands on a weight matrix by matrix, in blocks of a type of GGML: the number of the first row, and the bytes.
pub(super) fn repack_blocks(
    name: &str,
    weight: &QuantTensor,
    kind: GgmlType,
    mut write: impl FnMut(usize, Vec<Vec<u8>>) -> Result<()>,
) -> Result<()> {
    let bytes = |matrix: &QuantTensor| {
        let words = matrix.packed().flatten_all()?.to_vec1::<u32>()?;
        let mut blocks = Vec::new();
        let scales = match kind.format().scale().is_byte() {
            true => le_bytes(matrix.scales())?,
            false => le_bytes(&scales_of_blocks(name, matrix, kind)?)?,
        };
        kind.append(&words, &scales, &mut blocks)?;
        Ok::<_, Error>(vec![blocks])
    };
    match weight.dims().as_slice() {
        [stack @ .., n, _] if !stack.is_empty() => {
            let flat = weight.flatten_stack()?;
            let matrices = 0..stack.iter().product();
            matrices.into_iter().try_for_each(|index: usize| write(index * n, bytes(&flat.matrix(index)?)?))
        }
        _ => write(0, bytes(weight)?),
    }
}

/// F16 scales of symmetric codes, once for each block.
fn scales_of_blocks(name: &str, matrix: &QuantTensor, kind: GgmlType) -> Result<Tensor> {
    let groups = IntegerGroups::of(matrix.format(), matrix.scales(), matrix.biases())?;
    let halves = match &groups {
        Some(groups) if groups.zeros.is_none() => half_scales(groups)?,
        Some(_) | None => None,
    };
    let Some(halves) = halves else {
        let expected = format!("scales of {}: F16 numbers, and the middle code for zero", kind.name());
        let found = format!("{}; requantize or dequantize it", matrix.format());
        return Err(Error::mismatch(format!("`{name}`"), expected, found));
    };
    let blocks = matrix.format().group_size() / kind.block().0;
    let dims = halves.dims().to_vec();
    let mut repeated = dims.clone();
    repeated.push(blocks);
    Ok(halves.unsqueeze(dims.len())?.broadcast_as(repeated)?.contiguous()?)
}

/// Hands on a matrix of integer codes with its scales and zeros: those of a group are one stream of codes along N.
pub(super) fn repack_with_zeros(
    name: &str,
    weight: &QuantTensor,
    mut write: impl FnMut(usize, Vec<Vec<u8>>) -> Result<()>,
) -> Result<()> {
    let groups = IntegerGroups::of(weight.format(), weight.scales(), weight.biases())?;
    let Some(IntegerGroups { scales, zeros: Some(zeros) }) = groups else {
        let expected = "zeros of groups that are codes";
        return Err(Error::mismatch(format!("`{name}`"), expected, weight.format().to_string()));
    };
    let (bits, (n, count)) = (weight.format().bits(), zeros.dims2()?);
    let of_words = n.saturating_mul(bits).div_ceil(32);
    let mut words = vec![0u32; of_words.saturating_mul(count)];
    let mut stream = vec![0u32; of_words];
    for (group, zeros) in zeros.t()?.to_vec2::<u8>()?.iter().enumerate() {
        pack(zeros, bits, &mut stream);
        let places = words.iter_mut().skip(group).step_by(count.max(1));
        places.zip(&stream).for_each(|(place, word)| *place = *word);
    }
    let zeros = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    write(0, vec![le_bytes(weight.packed())?, le_bytes(&scales)?, zeros])
}

/// Hands on a matrix of symmetric codes as signed ones with F32 scales, as SLM1 files have them.
pub(super) fn repack_signed(
    name: &str,
    weight: &QuantTensor,
    kind: Slm1Type,
    mut write: impl FnMut(usize, Vec<Vec<u8>>) -> Result<()>,
) -> Result<()> {
    let wrong = |expected: &str, found: String| {
        Error::mismatch(
            format!("scales of `{name}`"),
            format!("{expected}; requantize or dequantize it"),
            found,
        )
    };
    // The highest bit of a code is its sign.
    let flips = match kind {
        Slm1Type::Q8_0 => 0x8080_8080,
        Slm1Type::Q4_0 | _ => 0x8888_8888,
    };
    let words = weight.packed().flatten_all()?.to_vec1::<u32>()?;
    let mut codes: Vec<u8> = words.iter().flat_map(|word| (word ^ flips).to_le_bytes()).collect();
    let (mut scales, mut rows) = (Vec::new(), weight.scales().to_dtype(DType::F32)?.to_vec2::<f32>()?);
    // Zeros whatever their codes are.
    let of_group = weight.format().group_size() * kind.bits() / 8;
    for (scale, codes) in rows.iter_mut().flatten().zip(codes.chunks_mut(of_group)) {
        if *scale == 0. && kind == Slm1Type::Q4_0 {
            codes.fill(0);
            *scale = 1.;
        }
    }
    for row in rows {
        if let Some(scale) = row.iter().find(|scale| !(scale.is_finite() && **scale > 0.)) {
            return Err(wrong("finite numbers above zero, which SLM1 files have", scale.to_string()));
        }
        match (kind, row.as_slice()) {
            (Slm1Type::Q8_0, [first, rest @ ..]) => {
                if let Some(other) = rest.iter().find(|scale| *scale != first) {
                    return Err(wrong(
                        "one for each row, which SLM1 files have",
                        format!("{first} and {other}"),
                    ));
                }
                scales.push(*first);
            }
            _ => scales.extend(row),
        }
    }
    write(0, vec![codes, scales.iter().flat_map(|scale| scale.to_le_bytes()).collect()])
}

/// The bytes of the numbers that multiply a weight's scales, as many as `output` has: one, or one for each matrix.
pub(super) fn multipliers(name: &str, weight: &QuantTensor, output: &OutputTensor) -> Result<Vec<u8>> {
    let matrices = output.dims.iter().product::<usize>();
    let numbers = match weight.global_scale() {
        Some(scale) => scale.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?,
        None => vec![1.],
    };
    let all = match numbers.as_slice() {
        [one] => vec![*one; matrices],
        each if each.len() == matrices => numbers,
        other => {
            return Err(Error::mismatch(
                format!("multipliers of the scales of `{name}`"),
                format!("one, or one for each of {matrices} matrices; requantize or dequantize it"),
                other.len().to_string(),
            ))
        }
    };
    Ok(all.iter().flat_map(|number| number.to_le_bytes()).collect())
}

/// Weights of one shape as one whose rows are those of all in turn.
pub(super) fn in_turn(name: &str, mut weights: Vec<QuantTensor>) -> Result<QuantTensor> {
    let (Some(last), others) = (weights.pop(), &weights) else {
        return Err(Error::mismatch(format!("`{name}`"), "a weight to pack again", "none"));
    };
    if others.is_empty() {
        return Ok(last);
    }
    let all = || others.iter().chain([&last]);
    if all().any(|weight| weight.global_scale().is_some() || weight.biases().is_some()) {
        let expected = "weights without biases and global scales";
        return Err(Error::mismatch(format!("`{name}`"), expected, last.format().to_string()));
    }
    let rows = |part: fn(&QuantTensor) -> &Tensor| {
        let parts: Vec<_> = all().map(part).collect();
        let mut dims = part(&last).dims().to_vec();
        let dim = dims.len().saturating_sub(1);
        if let Some(rows) = dims.get_mut(dim.saturating_sub(1)) {
            *rows = rows.saturating_mul(parts.len());
        }
        Ok::<_, Error>(Tensor::stack(&parts, dim)?.reshape(dims)?)
    };
    QuantTensor::new(last.format(), rows(QuantTensor::packed)?, rows(QuantTensor::scales)?, None, None)
}

fn widened(name: &str, weight: &QuantTensor, dtype: Dtype) -> Result<Vec<Vec<u8>>> {
    let k = weight.dims().last().copied().unwrap_or(0);
    let (row, wide_row) = (weight.format().words_per_row(k)?, WIDE_MXFP4.words_per_row(k)?);
    let narrow = weight.packed().flatten_all()?.to_vec1::<u32>()?;
    let mut words = vec![0u32; narrow.len() / row.max(1) * wide_row];
    let rows = words.par_chunks_exact_mut(wide_row.max(1)).zip(narrow.par_chunks_exact(row.max(1)));
    rows.for_each_init(Vec::new, |codes, (wide, narrow)| {
        codes.clear();
        codes.extend((0..k).filter_map(|index| code_at(narrow, 4, index)).map(|code| {
            // -12 to 12, and so 0 to 24.
            (2. * Element::E2m1.value(code) + 12.) as u8
        }));
        pack(codes, 5, wide);
    });
    let bytes = weight.scales().flatten_all()?.to_vec1::<u8>()?;
    let exact = |of: &dyn Fn(f32) -> f32| -> Result<Vec<u8>> {
        let mut exact = Vec::with_capacity(bytes.len().saturating_mul(dtype.bitsize() / 8));
        for byte in &bytes {
            if !append(of(Scale::E8m0.value(*byte)), dtype, &mut exact) {
                return Err(Error::mismatch(
                    format!("a scale of `{name}`"),
                    format!("one whose half and sixfold {dtype:?} holds, to become an {WIDE_MXFP4} weight"),
                    format!("2^{}; give another --dtype, or keep the weight", i16::from(*byte) - 127),
                ));
            }
        }
        Ok(exact)
    };
    let words = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    Ok(vec![words, exact(&|scale| scale / 2.)?, exact(&|scale| -6. * scale)?])
}

/// Appends the bytes of a number, if the dtype holds it.
#[allow(clippy::wildcard_enum_match_arm, reason = "scales are F16, BF16 or else F32")]
fn append(number: f32, dtype: Dtype, bytes: &mut Vec<u8>) -> bool {
    let held = match dtype {
        Dtype::F16 => {
            let held = f16::from_f32(number);
            bytes.extend(held.to_le_bytes());
            held.to_f32()
        }
        Dtype::BF16 => {
            let held = bf16::from_f32(number);
            bytes.extend(held.to_le_bytes());
            held.to_f32()
        }
        _ => {
            bytes.extend(number.to_le_bytes());
            number
        }
    };
    held == number && held.is_finite()
}

#[allow(clippy::wildcard_enum_match_arm, reason = "parts are words, floats or else bytes")]
pub(super) fn le_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let flat = tensor.flatten_all()?;
    Ok(match flat.dtype() {
        DType::U32 => flat.to_vec1::<u32>()?.iter().flat_map(|word| word.to_le_bytes()).collect(),
        DType::F16 => flat.to_vec1::<f16>()?.iter().flat_map(|number| number.to_le_bytes()).collect(),
        DType::BF16 => flat.to_vec1::<bf16>()?.iter().flat_map(|number| number.to_le_bytes()).collect(),
        DType::F32 => flat.to_vec1::<f32>()?.iter().flat_map(|number| number.to_le_bytes()).collect(),
        _ => flat.to_vec1::<u8>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn symmetric(bits: usize, scales: &[f32]) -> QuantTensor {
        let format = QuantFormat::symmetric_opt(bits, 32).unwrap();
        let words: Vec<_> =
            (0..format.words_per_row(64).unwrap() as u32).map(|word| word * 0x0123_4567).collect();
        let codes = Tensor::from_vec(words.clone(), (1, words.len()), &Device::Cpu).unwrap();
        let scales = Tensor::new(scales, &Device::Cpu).unwrap().reshape((1, 2)).unwrap();
        QuantTensor::new(format, codes, scales, None, None).unwrap()
    }

    #[test]
    fn codes_get_signs_and_scales_are_checked() {
        for (kind, scales, expected) in [
            (Slm1Type::Q4_0, [0.5f32, 2.], &[0.5f32, 2.][..]),
            (Slm1Type::Q4_0, [0., 2.], &[1., 2.]),
            (Slm1Type::Q8_0, [0.25, 0.25], &[0.25]),
        ] {
            let weight = symmetric(kind.bits(), &scales);
            let mut written = Vec::new();
            repack_signed("w", &weight, kind, |row, bytes| {
                assert_eq!(row, 0);
                written = bytes;
                Ok(())
            })
            .unwrap();
            let values: Vec<f32> =
                weight.dequantize(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap();
            for (index, value) in values.iter().enumerate() {
                let code = match kind {
                    Slm1Type::Q8_0 => written[0][index].cast_signed(),
                    Slm1Type::Q4_0 | _ => ((written[0][index / 2] >> (index % 2 * 4) & 15) ^ 8) as i8 - 8,
                };
                assert_eq!(*value, f32::from(code) * scales[index / 32], "{index}");
            }
            let stored: Vec<_> = expected.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            assert_eq!(written[1], stored);
        }
        for (kind, scales, problem) in [
            (Slm1Type::Q4_0, [1., -1.], "above zero"),
            (Slm1Type::Q4_0, [f32::NAN, 1.], "above zero"),
            (Slm1Type::Q8_0, [1., 2.], "one for each row"),
        ] {
            let weight = symmetric(kind.bits(), &scales);
            let error = repack_signed("w", &weight, kind, |_, _| Ok(())).unwrap_err().to_string();
            assert!(error.contains(problem) && error.contains("requantize"), "{error}");
        }
    }
}
