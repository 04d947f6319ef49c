//! Each constructor that takes this crate's `VarBuilder` makes the layer that candle_nn's makes.

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor};
use candle_nn::VarMap;
use candle_quant_nn as ours;
use candle_quant_nn::RNN as _;

type Original<'a> = candle_nn::VarBuilder<'a>;

/// Output of candle_nn's layer, which creates its tensors at random, and of ours, which has to ask for the same ones.
fn assert_same(
    name: &str,
    x: &Tensor,
    original: impl Fn(&Tensor, Original) -> Result<Tensor>,
    ours: impl Fn(&Tensor, ours::VarBuilder) -> Result<Tensor>,
) {
    let variables = VarMap::new();
    let vb = Original::from_varmap(&variables, DType::F32, &Device::Cpu).pp("layer").pp(3);
    // Also those that candle_nn starts at zero or one.
    original(x, vb.clone()).unwrap();
    for variable in variables.all_vars() {
        variable.set(&variable.rand_like(0.5, 1.).unwrap()).unwrap();
    }
    let expected = original(x, vb.clone()).unwrap();
    let count = variables.all_vars().len();

    let output = ours(x, vb.into()).unwrap();
    assert_eq!(variables.all_vars().len(), count, "{name} asks for other tensors");
    assert_eq!(output.dims(), expected.dims(), "{name}");
    let bits = |tensor: Tensor| {
        let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert_eq!(bits(output), bits(expected), "{name}");
}

fn input(dims: &[usize]) -> Tensor {
    Tensor::randn(0f32, 1., dims, &Device::Cpu).unwrap()
}

/// Constructors of one name, called alike.
macro_rules! same {
    ($x:expr, $forward:ident: $name:ident($($argument:expr),*)) => {
        assert_same(
            stringify!($name),
            &$x,
            |x, vb| candle_nn::$name($($argument,)* vb)?.$forward(x),
            |x, vb| ours::$name($($argument,)* vb)?.$forward(x),
        )
    };
}

#[test]
fn convolutions() {
    let sequence = input(&[2, 6, 11]);
    let config = ours::Conv1dConfig { padding: 1, stride: 2, groups: 2, ..Default::default() };
    same!(sequence, forward: conv1d(6, 8, 3, config));
    same!(sequence, forward: conv1d_no_bias(6, 8, 3, config));
    let config = ours::ConvTranspose1dConfig { padding: 1, stride: 2, ..Default::default() };
    same!(sequence, forward: conv_transpose1d(6, 8, 3, config));
    same!(sequence, forward: conv_transpose1d_no_bias(6, 8, 3, config));

    let image = input(&[2, 6, 7, 9]);
    let config = ours::Conv2dConfig { padding: 1, stride: 2, groups: 2, ..Default::default() };
    same!(image, forward: conv2d(6, 8, 3, config));
    same!(image, forward: conv2d_no_bias(6, 8, 3, config));
    let config = ours::ConvTranspose2dConfig { padding: 1, stride: 2, ..Default::default() };
    same!(image, forward: conv_transpose2d(6, 8, 3, config));
    same!(image, forward: conv_transpose2d_no_bias(6, 8, 3, config));
}

#[test]
fn norms() {
    let x = input(&[2, 6, 8]);
    same!(x, forward: layer_norm(8, 1e-5));
    same!(x, forward: layer_norm(8, ours::LayerNormConfig { affine: false, ..Default::default() }));
    same!(x, forward: layer_norm_no_bias(8, 1e-5));
    same!(x, forward: rms_norm(8, 1e-5));
    same!(x, forward: group_norm(3, 6, 1e-5));
    for train in [false, true] {
        let forward = |norm: candle_nn::BatchNorm, x: &Tensor| norm.forward_t(x, train);
        for config in [1e-5.into(), ours::BatchNormConfig { affine: false, ..Default::default() }] {
            assert_same(
                "batch_norm",
                &x,
                |x, vb| forward(candle_nn::batch_norm(6, config, vb)?, x),
                |x, vb| forward(ours::batch_norm(6, config, vb)?, x),
            );
        }
    }
}

#[test]
fn activations() {
    let x = input(&[2, 6, 8]);
    same!(x, forward: prelu(None));
    same!(x, forward: prelu(Some(6)));
}

#[test]
fn recurrent_layers() {
    let x = input(&[2, 5, 6]);
    let backward = ours::LSTMConfig {
        layer_idx: 1,
        direction: ours::rnn::Direction::Backward,
        ..ours::LSTMConfig::default()
    };
    for config in [ours::LSTMConfig::default(), ours::LSTMConfig::default_no_bias(), backward] {
        assert_same(
            "lstm",
            &x,
            |x, vb| {
                let layer = candle_nn::lstm(6, 4, config, vb)?;
                layer.states_to_tensor(&layer.seq(x)?)
            },
            |x, vb| {
                let layer = ours::lstm(6, 4, config, vb)?;
                assert_eq!(layer.config().layer_idx, config.layer_idx);
                layer.states_to_tensor(&layer.seq(x)?)
            },
        );
    }
    for config in [ours::GRUConfig::default(), ours::GRUConfig::default_no_bias()] {
        assert_same(
            "gru",
            &x,
            |x, vb| {
                let layer = candle_nn::gru(6, 4, config, vb)?;
                layer.states_to_tensor(&layer.seq(x)?)
            },
            |x, vb| {
                let layer = ours::gru(6, 4, config, vb)?;
                assert_eq!(layer.config().b_ih_init.is_some(), config.b_ih_init.is_some());
                layer.states_to_tensor(&layer.seq(x)?)
            },
        );
    }
}

/// candle_nn derives `Debug`; who prints a layer sees the same.
#[test]
fn recurrent_layers_print_as_candles_do() {
    let variables = VarMap::new();
    let vb = Original::from_varmap(&variables, DType::F32, &Device::Cpu);
    let original = candle_nn::lstm(3, 2, Default::default(), vb.clone()).unwrap();
    let ours = ours::lstm(3, 2, Default::default(), vb.into()).unwrap();
    assert_eq!(format!("{ours:?}"), format!("{original:?}"));
    assert_eq!(format!("{:#?}", ours.clone()), format!("{original:#?}"));
}
