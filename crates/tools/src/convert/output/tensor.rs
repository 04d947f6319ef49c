//! The safetensors files of the output: what lies where in them, known before the first byte is written.

use candle_core::DType;
use candle_quant::{Error, QuantFormat, Result};
use safetensors::Dtype;
use serde_json::{json, Value};

/// One tensor of an output file.
#[derive(Clone, Debug)]
pub(in crate::convert) struct OutputTensor {
    pub name: String,
    pub dtype: Dtype,
    pub dims: Vec<usize>,
    pub bytes: u64,
    /// Of the tensor's first byte, from the start of its file.
    pub offset: u64,
    /// Its bytes, if they are known already.
    pub value: Option<Vec<u8>>,
}

impl OutputTensor {
    /// A tensor that has no place yet.
    ///
    /// # Errors
    /// If its size overflows.
    pub(in crate::convert) fn new(name: String, dtype: Dtype, dims: Vec<usize>) -> Result<Self> {
        let bits = dims.iter().try_fold(dtype.bitsize() as u64, |bits, &dim| bits.checked_mul(dim as u64));
        match bits {
            Some(bits) => Ok(Self { name, dtype, dims, bytes: bits / 8, offset: 0, value: None }),
            None => Err(Error::mismatch(name, "a tensor that fits 64 bits", format!("{dims:?}"))),
        }
    }

    /// A number that is known already, of shape `[]`.
    pub(in crate::convert) fn scalar(name: String, dtype: Dtype, bytes: &[u8]) -> Self {
        Self::known(name, dtype, Vec::new(), bytes)
    }

    /// Numbers that are known already.
    pub(in crate::convert) fn known(name: String, dtype: Dtype, dims: Vec<usize>, bytes: &[u8]) -> Self {
        let value = Some(bytes.to_vec());
        Self { name, dtype, dims, bytes: bytes.len() as u64, offset: 0, value }
    }

    /// The tensors of a packed weight in MLX's layout, called as `name` says: codes, scales, and biases if the format
    /// has them.
    pub(in crate::convert) fn packed(
        dims: &[usize],
        format: QuantFormat,
        scales: Dtype,
        name: impl Fn(&str) -> String,
    ) -> Result<Vec<Self>> {
        let (words, groups) = format.part_dims(dims)?;
        let mut outputs = vec![
            Self::new(name("weight"), Dtype::U32, words)?,
            Self::new(name("scales"), scales, groups.clone())?,
        ];
        if format.has_biases() {
            outputs.push(Self::new(name("biases"), scales, groups)?);
        }
        Ok(outputs)
    }
}

/// How a header is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::convert) enum Style {
    /// Metadata, then the tensors in the order of their bytes, padded so that those are aligned.
    Common,
    /// As MLX does it: all by name, without padding.
    Mlx,
}

/// Gives every tensor of one file its place, in this order, and returns the header and the size of the file.
pub(in crate::convert) fn lay_out(
    outputs: &mut [&mut OutputTensor],
    metadata: Option<Value>,
    style: Style,
) -> (Vec<u8>, u64) {
    let mut entries: Vec<_> =
        metadata.map(|metadata| ("__metadata__".to_owned(), metadata.to_string())).into_iter().collect();
    let mut end = 0;
    for output in outputs.iter_mut() {
        let (dtype, shape) = (json!(output.dtype), json!(output.dims));
        let offsets = json!([end, end + output.bytes]);
        let info = match style {
            Style::Common => format!(r#"{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}"#),
            Style::Mlx => format!(r#"{{"data_offsets":{offsets},"dtype":{dtype},"shape":{shape}}}"#),
        };
        entries.push((output.name.clone(), info));
        output.offset = end;
        end += output.bytes;
    }
    if style == Style::Mlx {
        entries.sort();
    }
    let entries: Vec<_> = entries.iter().map(|(name, info)| format!("{}:{info}", json!(name))).collect();
    let mut header = format!("{{{}}}", entries.join(","));
    if style == Style::Common {
        let padded = header.len().next_multiple_of(8);
        header.extend(std::iter::repeat_n(' ', padded - header.len()));
    }
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    let start = bytes.len() as u64;
    for output in outputs {
        output.offset += start;
    }
    (bytes, start + end)
}

/// The dtype as files call it.
#[allow(clippy::wildcard_enum_match_arm, reason = "candle has dtypes that nothing here writes")]
pub(in crate::convert) fn file_dtype(dtype: DType) -> Result<Dtype> {
    Ok(match dtype {
        DType::U8 => Dtype::U8,
        DType::U32 => Dtype::U32,
        DType::I16 => Dtype::I16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        other => {
            return Err(Error::Unsupported {
                what: format!("writing {other:?}"),
                remedy: "convert the tensor to F16, BF16 or F32".into(),
            })
        }
    })
}
