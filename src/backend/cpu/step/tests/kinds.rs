//! What plans of the tests are like.

use super::experts::{ExpertKind, Shared, GROUPS, PLAIN_EXPERTS};
use super::linear::{LinearKind, LINEAR};
use crate::backend::step::{Activation, HeadNorm, Norm, QueryGrowth, Turn};
use crate::backend::Scores;
use crate::QuantFormat;
use candle_core::DType;
use rand::rngs::StdRng;
use rand::RngExt;

pub(super) const HEAD_DIM: usize = 32;
pub(super) const EPS: f32 = 1e-5;

/// What differs from plan to plan.
#[derive(Clone, Copy)]
pub(super) struct Kind {
    pub format: QuantFormat,
    /// Of every second weight, which is not packed then.
    pub dense: Option<DType>,
    pub bias: bool,
    pub norms: Norms,
    /// Whether there are norms before blocks, and behind them.
    pub norms_around: (bool, bool),
    pub qk_norm: Option<QkNorm>,
    pub sinks: bool,
    /// Of the second layer.
    pub window: Option<usize>,
    /// Whether some projections have one, others two.
    pub adapters: bool,
    pub turns: Turns,
    /// Whether both blocks of a layer see the same.
    pub parallel: bool,
    pub gate: bool,
    pub activation: Activation,
    /// Whether what queries see goes through gates.
    pub has_gates: bool,
    /// Of the layers but the second.
    pub linear: Option<LinearKind>,
    /// Of the layers behind the first.
    pub experts: Option<ExpertKind>,
    /// Whether all numbers there are by which something is multiplied, or where it ends, do something.
    pub factors: bool,
}

#[derive(Clone, Copy)]
pub(super) enum Norms {
    Rms,
    Layer { bias: bool },
    Plain,
}

/// Norms of queries and keys, of the kind of the others.
#[derive(Clone, Copy)]
pub(super) struct QkNorm {
    pub over: Over,
    pub turns_first: bool,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Over {
    Head,
    HeadOfItsOwn,
    All,
}

/// What the layers turn by.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Turns {
    Whole,
    /// A part of each head, neighbours together.
    Neighbours,
    /// Of the second layer others, of the third none; queries of both grow.
    OfLayers,
    /// Those of long texts.
    Long,
}

pub(super) const PLAIN: Kind = Kind {
    format: QuantFormat::affine_opt(4, 64).unwrap(),
    dense: None,
    bias: false,
    norms: Norms::Rms,
    norms_around: (true, false),
    qk_norm: None,
    sinks: false,
    window: None,
    adapters: false,
    turns: Turns::Whole,
    parallel: false,
    gate: true,
    activation: Activation::Silu,
    has_gates: false,
    linear: None,
    experts: None,
    factors: false,
};

pub(super) fn kinds() -> Vec<(&'static str, Kind)> {
    let qk_norm = |over, turns_first| Some(QkNorm { over, turns_first });
    let layer_norms = Norms::Layer { bias: true };
    vec![
        ("plain", PLAIN),
        ("biases and norms", Kind { bias: true, qk_norm: qk_norm(Over::Head, false), ..PLAIN }),
        ("sinks and a window", Kind { sinks: true, window: Some(70), ..PLAIN }),
        ("mxfp8", Kind { format: QuantFormat::MXFP8, qk_norm: qk_norm(Over::Head, false), ..PLAIN }),
        ("adapters", Kind { bias: true, adapters: true, ..PLAIN }),
        ("every second weight in bf16", Kind { bias: true, dense: Some(DType::BF16), ..PLAIN }),
        (
            "every second weight in f32, and adapters",
            Kind { adapters: true, dense: Some(DType::F32), norms_around: (true, true), ..PLAIN },
        ),
        ("8 bits", Kind { format: QuantFormat::affine_opt(8, 32).unwrap(), ..PLAIN }),
        (
            "parallel blocks with layer norms, without gates",
            Kind {
                bias: true,
                norms: layer_norms,
                parallel: true,
                gate: false,
                activation: Activation::GeluTanh,
                turns: Turns::Neighbours,
                qk_norm: qk_norm(Over::HeadOfItsOwn, false),
                ..PLAIN
            },
        ),
        (
            "norms around blocks, and factors",
            Kind {
                norms_around: (true, true),
                factors: true,
                activation: Activation::GeluTanh,
                window: Some(70),
                turns: Turns::OfLayers,
                ..PLAIN
            },
        ),
        (
            "norms behind blocks",
            Kind { norms_around: (false, true), qk_norm: qk_norm(Over::All, false), ..PLAIN },
        ),
        (
            "layer norms of all heads",
            Kind {
                norms: layer_norms,
                gate: false,
                activation: Activation::Relu2,
                qk_norm: qk_norm(Over::All, false),
                turns: Turns::Neighbours,
                adapters: true,
                ..PLAIN
            },
        ),
        (
            "norms behind turns",
            Kind {
                qk_norm: qk_norm(Over::Head, true),
                turns: Turns::Long,
                activation: Activation::Gelu,
                ..PLAIN
            },
        ),
        ("norms without weights", Kind { norms: Norms::Plain, factors: true, ..PLAIN }),
        (
            "gates behind queries",
            Kind { has_gates: true, sinks: true, qk_norm: qk_norm(Over::HeadOfItsOwn, false), ..PLAIN },
        ),
        (
            "gates behind queries that are normalized together",
            Kind { has_gates: true, qk_norm: qk_norm(Over::All, false), turns: Turns::Neighbours, ..PLAIN },
        ),
        ("linear attention", Kind { linear: Some(LINEAR), has_gates: true, ..PLAIN }),
        (
            "linear attention of grouped projections, in tiles",
            Kind {
                linear: Some(LinearKind { is_grouped: true, tiled: true, ..LINEAR }),
                adapters: true,
                experts: Some(ExpertKind { shared: Shared::Gated, ..PLAIN_EXPERTS }),
                ..PLAIN
            },
        ),
        (
            "linear attention of six projections, without a convolution",
            Kind { linear: Some(LinearKind { in_three: true, kernel: 1, ..LINEAR }), factors: true, ..PLAIN },
        ),
        ("experts", Kind { experts: Some(PLAIN_EXPERTS), ..PLAIN }),
        ("experts and adapters", Kind { adapters: true, experts: Some(PLAIN_EXPERTS), ..PLAIN }),
        (
            "experts as those of gpt-oss",
            Kind {
                format: QuantFormat::MXFP4,
                bias: true,
                sinks: true,
                experts: Some(ExpertKind {
                    packed_router: false,
                    clamped: true,
                    bias: true,
                    ..PLAIN_EXPERTS
                }),
                ..PLAIN
            },
        ),
        (
            "groups of experts beside one that all tokens use",
            Kind {
                experts: Some(ExpertKind {
                    scores: Scores::Sigmoid,
                    corrected: true,
                    groups: Some(GROUPS),
                    packed_router: false,
                    shared: Shared::Plain,
                    ..PLAIN_EXPERTS
                }),
                ..PLAIN
            },
        ),
        (
            "a shared expert with a gate",
            Kind { experts: Some(ExpertKind { shared: Shared::Gated, ..PLAIN_EXPERTS }), ..PLAIN },
        ),
        (
            "a shared expert with a dense gate",
            Kind {
                experts: Some(ExpertKind { shared: Shared::Gated, packed_router: false, ..PLAIN_EXPERTS }),
                ..PLAIN
            },
        ),
        (
            "experts that see weighed inputs",
            Kind {
                format: QuantFormat::affine_opt(8, 32).unwrap(),
                norms_around: (true, true),
                factors: true,
                experts: Some(ExpertKind {
                    scores: Scores::Sigmoid,
                    weighs_inputs: true,
                    normalize: false,
                    top_k: 2,
                    bias: true,
                    ..PLAIN_EXPERTS
                }),
                ..PLAIN
            },
        ),
    ]
}

pub(super) fn numbers(rng: &mut StdRng, len: usize, size: f32) -> Vec<f32> {
    (0..len).map(|_| (rng.random::<f32>() - 0.5) * 2. * size).collect()
}

impl Kind {
    pub fn norm(&self, rng: &mut StdRng, len: usize) -> Norm {
        let (subtracts_mean, has_bias) = match self.norms {
            Norms::Rms => (false, false),
            Norms::Layer { bias } => (true, bias),
            Norms::Plain => (true, false),
        };
        let has_weight = !matches!(self.norms, Norms::Plain);
        Norm {
            weight: has_weight.then(|| numbers(rng, len, 0.5).into_iter().map(|x| 1. + x).collect()),
            bias: has_bias.then(|| numbers(rng, len, 0.5)),
            subtracts_mean,
            eps: EPS,
        }
    }

    pub fn head_norm(&self, rng: &mut StdRng, heads: usize) -> Option<HeadNorm> {
        let QkNorm { over, .. } = self.qk_norm?;
        let len = if over == Over::Head { HEAD_DIM } else { heads * HEAD_DIM };
        Some(HeadNorm { norm: self.norm(rng, len), over_all: over == Over::All })
    }

    pub fn turn(&self, layer: usize) -> Turn {
        let of = |base: f32, pairs: usize| (0..pairs).map(|pair| base.powi(pair as i32)).collect();
        let whole = Turn { inverse_frequencies: of(0.7, HEAD_DIM / 2), factor: 1.1, ..Turn::default() };
        let query_growth = Some(QueryGrowth { beta: 0.3, period: 20, first: 1 });
        match (self.turns, layer) {
            (Turns::Whole, _) | (Turns::OfLayers, 0) => whole,
            (Turns::Neighbours, _) => Turn { inverse_frequencies: of(0.6, 5), interleaved: true, ..whole },
            (Turns::OfLayers, 1) => Turn { inverse_frequencies: of(0.8, 16), query_growth, ..whole },
            (Turns::OfLayers, _) => Turn { query_growth, ..Turn::default() },
            (Turns::Long, _) => Turn { of_long_texts: Some(of(0.5, HEAD_DIM / 2)), ..whole },
        }
    }

    pub fn factor(&self, factor: f32) -> f32 {
        if self.factors {
            factor
        } else {
            1.
        }
    }

    pub fn limit(&self, limit: f32) -> Option<f32> {
        self.factors.then_some(limit)
    }
}
