//! Blocks of linear attention in a plan.

use super::checked::{check_rows, norm, numbers};
use super::{BlockOutput, StepBuilder, StepNorm};
use crate::backend::step::{DeltaLanes, DeltaNet, Lane, Node, Norm, Projection};
use crate::backend::DeltaNetWeights;
use crate::{DeltaNetConfig, Error, Linear, Result};
use std::slice;

/// What makes queries, keys, values and gates of a block of linear attention.
#[derive(Clone, Copy, Debug)]
pub enum DeltaNetProjections<'a> {
    /// Of one head of keys after another.
    Grouped {
        /// For each, its query, its key, and the values and gates of its heads of values.
        qkvz: &'a Linear,
        /// For each, what makes `beta`, then what makes `decay`, a number for each of its heads of values.
        ba: &'a Linear,
    },
    /// Of all heads.
    Apart {
        /// One of all queries, then all keys, then all values; or one each.
        qkv: &'a [Linear],
        /// Gates, `[value_heads * value_dim, hidden]`.
        z: &'a Linear,
        /// What makes `decay`, `[value_heads, hidden]`.
        a: &'a Linear,
        /// What makes `beta`, likewise.
        b: &'a Linear,
    },
}

/// A block of linear attention: [`ops::gated_delta_net`](crate::ops::gated_delta_net) between its projections.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_quant::ops::DeltaNetWeights;
/// use candle_quant::step::{DeltaNetBlock, DeltaNetProjections, HeadBlock, StepBuilder, StepCaches, StepToken};
/// use candle_quant::{DeltaNetConfig, DeltaNetState, Embedding, Linear, QuantFormat, QuantTensor, RmsNorm};
///
/// # fn main() -> candle_quant::Result<()> {
/// let random = |dims: &[usize]| Tensor::randn(0f32, 0.1, dims, &Device::Cpu);
/// let packed = |rows| QuantTensor::quantize(&random(&[rows, 64])?, QuantFormat::MXFP4);
/// let linear = |rows| Ok::<_, candle_quant::Error>(Linear::new(packed(rows)?, None));
/// // Four heads of values on two of keys.
/// let config = DeltaNetConfig { key_heads: 2, value_heads: 4, key_dim: 32, value_dim: 16, kernel: 4 };
/// let (qkv, out) = (linear(2 * 64 + 64)?, linear(64)?);
/// let [z, a, b] = [linear(64)?, linear(4)?, linear(4)?];
/// let weights = DeltaNetWeights {
///     convolution: &random(&[4, config.channels()])?,
///     rates: &random(&[4])?.exp()?.neg()?,
///     gate_bias: &random(&[4])?,
///     norm: &Tensor::ones(16, DType::F32, &Device::Cpu)?,
///     eps: 1e-6,
/// };
/// let table = Embedding::from_quant(packed(32)?, DType::F32)?;
/// let mut plan = StepBuilder::new(&table, 1.)?;
/// plan.delta_net(DeltaNetBlock::new(config, DeltaNetProjections::apart(&qkv, [&z, &a, &b]), weights, &out))?;
/// let norm = RmsNorm::new(Tensor::ones(64, DType::F32, &Device::Cpu)?, 1e-6);
/// let plan = plan.head(HeadBlock::new(&norm, &table.as_linear()))?;
///
/// let mut states = [DeltaNetState::new(config, &Device::Cpu)?];
/// let token = |id, position| StepToken { id, sequence: 0, position };
/// let logits = plan.run(&[token(1, 0), token(2, 1)], StepCaches::new([], &mut states), &[1])?;
/// assert_eq!((logits.dims(), states[0].len(0)), (&[1, 32][..], 2));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DeltaNetBlock<'a> {
    /// Of the block's input.
    pub norm: Option<StepNorm<'a>>,
    /// What it has, and how much of each.
    pub config: DeltaNetConfig,
    /// Hidden state to what the heads are given.
    pub projections: DeltaNetProjections<'a>,
    /// What is between projections.
    pub weights: DeltaNetWeights<'a>,
    /// What heads give to the hidden state, `[hidden, value_heads * value_dim]`.
    pub out_proj: &'a Linear,
    /// Whether inputs of the output projection are the first head of values of each head of keys, then the second of each, and so
    /// on; else one head of keys after another.
    pub tiled_output: bool,
    /// What becomes of the output.
    pub out: BlockOutput<'a>,
}

impl<'a> DeltaNetBlock<'a> {
    /// A block without a norm, whose heads go out in the order in which they come in.
    pub fn new(
        config: DeltaNetConfig,
        projections: DeltaNetProjections<'a>,
        weights: DeltaNetWeights<'a>,
        out_proj: &'a Linear,
    ) -> Self {
        let out = BlockOutput::default();
        Self { norm: None, config, projections, weights, out_proj, tiled_output: false, out }
    }
}

impl StepBuilder {
    /// Adds a block of linear attention, which changes the next of the states.
    ///
    /// # Errors
    /// As those of [`attention`](Self::attention).
    pub fn delta_net(&mut self, block: DeltaNetBlock) -> Result<()> {
        let DeltaNetBlock { config, weights, tiled_output: tiled, .. } = block;
        config.validate()?;
        weights.check(&config, &self.device)?;
        let (projections, lanes) = self.delta_projections(config, block.projections)?;
        let width = config.value_heads * config.value_dim;
        let mut o = self.projection("output of linear attention", block.out_proj, width)?;
        self.bias_of_sum("output of linear attention", &mut o, block.out.sum)?;
        check_rows("output of linear attention", &o, self.plan.hidden)?;
        let count = config.kernel.saturating_mul(config.channels());
        let of_heads = Norm {
            weight: Some(numbers("norm of linear attention", weights.norm, config.value_dim)?),
            bias: None,
            subtracts_mean: false,
            eps: weights.eps as f32,
        };
        let net = DeltaNet {
            config,
            lanes,
            convolution: numbers("convolution", weights.convolution, count)?,
            rates: numbers("rates", weights.rates, config.value_heads)?,
            gate_bias: numbers("bias of gates", weights.gate_bias, config.value_heads)?,
            norm: of_heads,
            tiled,
            layer: self.states,
        };
        let norm = norm("norm before linear attention", block.norm, self.plan.hidden)?;
        let out = self.out("norm behind linear attention", block.out)?;
        self.states += 1;
        let project = Node::Project(norm, projections, None);
        self.plan.nodes.extend([project, Node::DeltaNet(Box::new(net)), Node::AddAttended(o, out)]);
        Ok(())
    }

    /// The projections, and where each head finds what they make.
    fn delta_projections(
        &mut self,
        config: DeltaNetConfig,
        projections: DeltaNetProjections,
    ) -> Result<(Vec<Projection>, DeltaLanes)> {
        let DeltaNetConfig { key_heads, key_dim, .. } = config;
        let (shared, hidden) = (config.shared(), self.plan.hidden);
        let values = shared * config.value_dim;
        match projections {
            DeltaNetProjections::Grouped { qkvz, ba } => {
                let (of_qkvz, of_ba) = (2 * key_dim + 2 * values, 2 * shared);
                let made = vec![
                    self.projection("queries, keys, values and gates", qkvz, hidden)?,
                    self.projection("decays", ba, hidden)?,
                ];
                for (projection, rows) in made.iter().zip([of_qkvz, of_ba]) {
                    check_rows("a projection of linear attention", projection, key_heads * rows)?;
                }
                let qkvz = |start| Lane { projection: 0, width: key_heads * of_qkvz, start, stride: of_qkvz };
                let ba = |start| Lane { projection: 1, width: key_heads * of_ba, start, stride: of_ba };
                let lanes = DeltaLanes {
                    q: qkvz(0),
                    k: qkvz(key_dim),
                    v: qkvz(2 * key_dim),
                    gate: qkvz(2 * key_dim + values),
                    beta: ba(0),
                    decay: ba(shared),
                };
                Ok((made, lanes))
            }
            DeltaNetProjections::Apart { qkv, z, a, b } => {
                if ![1, 3].contains(&qkv.len()) {
                    let expected = "one projection, or three";
                    return Err(Error::mismatch("queries, keys and values", expected, qkv.len().to_string()));
                }
                let mut made = Vec::new();
                for (what, layer) in qkv.iter().map(|layer| ("queries, keys and values", layer)).chain([
                    ("gates", z),
                    ("decays", a),
                    ("betas", b),
                ]) {
                    made.push(self.projection(what, layer, hidden)?);
                }
                let sections = [key_heads * key_dim, key_heads * key_dim, key_heads * values];
                let parts = match qkv.len() {
                    1 => vec![config.channels()],
                    _ => sections.to_vec(),
                };
                let others = [key_heads * values, config.value_heads, config.value_heads];
                for (projection, rows) in made.iter().zip(parts.iter().chain(&others)) {
                    check_rows("a projection of linear attention", projection, *rows)?;
                }
                let lane = |section: usize, stride| {
                    let before: usize = sections.iter().take(section).sum();
                    match *parts.as_slice() {
                        [width] => Lane { projection: 0, width, start: before, stride },
                        _ => {
                            let width = sections.get(section).copied().unwrap_or_default();
                            Lane { projection: section, width, start: 0, stride }
                        }
                    }
                };
                let behind = |index: usize, stride: usize| Lane {
                    projection: parts.len() + index,
                    width: key_heads * stride,
                    start: 0,
                    stride,
                };
                let lanes = DeltaLanes {
                    q: lane(0, key_dim),
                    k: lane(1, key_dim),
                    v: lane(2, values),
                    gate: behind(0, values),
                    decay: behind(1, shared),
                    beta: behind(2, shared),
                };
                Ok((made, lanes))
            }
        }
    }
}

impl<'a> DeltaNetProjections<'a> {
    /// One projection of all queries, keys and values, and one each of the others.
    pub fn apart(qkv: &'a Linear, [z, a, b]: [&'a Linear; 3]) -> Self {
        Self::Apart { qkv: slice::from_ref(qkv), z, a, b }
    }
}
