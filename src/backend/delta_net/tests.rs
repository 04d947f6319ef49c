//! The kernel against operations of candle, which are checked by their gradients; plans have the formulas in f64.

use super::*;
use candle_core::Var;

/// Batch, tokens, heads of keys and of values, their elements, and the kernel.
const SHAPES: [[usize; 7]; 5] = [
    [1, 1, 1, 1, 1, 1, 1],
    [1, 7, 2, 6, 16, 8, 4],
    [3, 5, 1, 3, 17, 5, 2],
    [2, 9, 3, 3, 33, 40, 1],
    [2, 2, 2, 4, 8, 16, 4],
];

fn numbers(dims: &[usize], phase: f32) -> Tensor {
    let count: usize = dims.iter().product();
    let values = (0..count).map(|i| ((i as f32 * 0.77 + phase) * 1.3).sin() * 1.5);
    Tensor::from_iter(values, &Device::Cpu).unwrap().reshape(dims).unwrap()
}

fn config([_, _, key_heads, value_heads, key_dim, value_dim, kernel]: [usize; 7]) -> DeltaNetConfig {
    DeltaNetConfig { key_heads, value_heads, key_dim, value_dim, kernel }
}

fn inputs(shape: [usize; 7]) -> [Tensor; 6] {
    let [b, t, keys, values, key_dim, value_dim, _] = shape;
    [
        numbers(&[b, t, keys, key_dim], 0.),
        numbers(&[b, t, keys, key_dim], 1.),
        numbers(&[b, t, values, value_dim], 2.),
        numbers(&[b, t, values, value_dim], 3.),
        numbers(&[b, t, values], 4.),
        numbers(&[b, t, values], 5.),
    ]
}

fn weights(config: DeltaNetConfig) -> [Tensor; 4] {
    [
        numbers(&[config.kernel, config.channels()], 6.),
        (numbers(&[config.value_heads], 7.).abs().unwrap() * -1.).unwrap(),
        numbers(&[config.value_heads], 8.),
        numbers(&[config.value_dim], 9.),
    ]
}

fn run(
    [q, k, v, gate, decay, beta]: [&Tensor; 6],
    [convolution, rates, gate_bias, norm]: &[Tensor; 4],
    state: &mut DeltaNetState,
) -> Result<Tensor> {
    let weights = DeltaNetWeights { convolution, rates, gate_bias, norm, eps: 1e-5 };
    gated_delta_net(DeltaNetInputs { q, k, v, gate, decay, beta }, weights, state)
}

fn flat(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn far(found: &Tensor, expected: &Tensor) -> f32 {
    let pairs = flat(found).into_iter().zip(flat(expected));
    pairs.map(|(a, b)| (a - b).abs()).fold(0., f32::max)
}

#[test]
fn the_kernel_and_candles_operations_agree_in_pieces_and_as_a_whole() {
    for shape in SHAPES {
        let (config, inputs) = (config(shape), inputs(shape));
        let weights = weights(config);
        // What may have a gradient is computed by candle.
        let tracked = inputs.each_ref().map(|x| Var::from_tensor(x).unwrap());
        let mut state = DeltaNetState::new(config, &Device::Cpu).unwrap();
        let by_candle = run(tracked.each_ref().map(|x| x.as_tensor()), &weights, &mut state).unwrap();
        assert_eq!(state.lens(), vec![shape[1]; shape[0]]);

        let mut whole = DeltaNetState::new(config, &Device::Cpu).unwrap();
        let found = run(inputs.each_ref(), &weights, &mut whole).unwrap();
        assert_eq!(found.dims(), [shape[0], shape[1], config.value_heads * config.value_dim]);
        assert!(far(&found, &by_candle) < 2e-5, "{shape:?}: {}", far(&found, &by_candle));

        // Token by token, the two in turn: they leave the same behind.
        let mut state = DeltaNetState::new(config, &Device::Cpu).unwrap();
        for token in 0..shape[1] {
            let of_token = |x: &Tensor| x.narrow(1, token, 1).unwrap();
            let (by_candle, alone) =
                (tracked.each_ref().map(|x| of_token(x.as_tensor())), inputs.each_ref().map(of_token));
            let operands = if token % 2 == 0 { alone.each_ref() } else { by_candle.each_ref() };
            let piece = run(operands, &weights, &mut state).unwrap();
            assert!(far(&piece, &of_token(&found)) < 2e-5, "{shape:?}, token {token}");
        }
        assert_eq!(state.size_in_bytes(), config.size_in_bytes() * shape[0] as u64);
        // A text that begins anew.
        state.clear();
        assert!(
            state.is_empty() && far(&run(inputs.each_ref(), &weights, &mut state).unwrap(), &found) == 0.
        );
    }
}

#[test]
fn threads_do_not_matter_and_half_precision_is_rounded_once() {
    let (config, inputs) = (config(SHAPES[2]), inputs(SHAPES[2]));
    let weights = weights(config);
    let of = |inputs: &[Tensor; 6]| {
        let mut state = DeltaNetState::new(config, &Device::Cpu).unwrap();
        run(inputs.each_ref(), &weights, &mut state).unwrap()
    };
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(flat(&pool.install(|| of(&inputs))), flat(&of(&inputs)));
    }
    for dtype in [DType::F16, DType::BF16] {
        let rounded = inputs.each_ref().map(|x| x.to_dtype(dtype).unwrap());
        let wide = of(&rounded.each_ref().map(|x| x.to_dtype(DType::F32).unwrap()));
        assert_eq!(
            (of(&rounded).dtype(), flat(&of(&rounded))),
            (dtype, flat(&wide.to_dtype(dtype).unwrap()))
        );
    }
}

#[test]
fn gradients_are_slopes() {
    let shape = [1, 3, 1, 2, 3, 2, 2];
    let (config, inputs) = (config(shape), inputs(shape));
    let (weights, factors) = (weights(config), numbers(&[1, 3, 4], 0.4));
    let loss = |inputs: [&Tensor; 6]| {
        let mut state = DeltaNetState::new(config, &Device::Cpu).unwrap();
        (run(inputs, &weights, &mut state).unwrap() * &factors).unwrap().sum_all().unwrap()
    };
    let vars = inputs.each_ref().map(|x| Var::from_tensor(x).unwrap());
    let gradients = loss(vars.each_ref().map(|var| var.as_tensor())).backward().unwrap();
    for (index, var) in vars.iter().enumerate() {
        for (element, gradient) in flat(gradients.get(var).unwrap()).into_iter().enumerate() {
            let moved = |by: f32| {
                let mut values = flat(&inputs[index]);
                values[element] += by;
                let mut inputs = inputs.clone();
                inputs[index] = Tensor::from_vec(values, inputs[index].dims(), &Device::Cpu).unwrap();
                loss(inputs.each_ref()).to_scalar::<f32>().unwrap()
            };
            let slope = (moved(0.005) - moved(-0.005)) / 0.01;
            assert!(
                (slope - gradient).abs() < 1.5e-2 * (1. + slope.abs()),
                "input {index}, element {element}: {gradient} {slope}"
            );
        }
    }
}

/// Also where no input asks for one.
#[test]
fn weights_have_gradients() {
    let config = config([1, 3, 1, 2, 3, 2, 2]);
    let inputs = inputs([1, 3, 1, 2, 3, 2, 2]);
    let vars = weights(config).map(|x| Var::from_tensor(&x).unwrap());
    let loss = |weights: &[Tensor; 4]| {
        let mut state = DeltaNetState::new(config, &Device::Cpu).unwrap();
        run(inputs.each_ref(), weights, &mut state).unwrap().sqr().unwrap().sum_all().unwrap()
    };
    let gradients = loss(&vars.each_ref().map(|var| var.as_tensor().clone())).backward().unwrap();
    for (index, var) in vars.iter().enumerate() {
        let gradient = flat(gradients.get(var).expect("a gradient"));
        for (element, gradient) in gradient.into_iter().enumerate() {
            let moved = |by: f32| {
                let mut weights = vars.each_ref().map(|var| var.as_detached_tensor());
                let mut values = flat(&weights[index]);
                values[element] += by;
                weights[index] = Tensor::from_vec(values, weights[index].dims(), &Device::Cpu).unwrap();
                loss(&weights).to_scalar::<f32>().unwrap()
            };
            let slope = (moved(0.005) - moved(-0.005)) / 0.01;
            assert!(
                (slope - gradient).abs() < 2e-2 * (1. + slope.abs()),
                "weight {index}: {gradient} {slope}"
            );
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let (config, inputs) = (config(SHAPES[2]), inputs(SHAPES[2]));
    let weights = weights(config);
    let mut state = DeltaNetState::new(config, &Device::Cpu).unwrap();
    run(inputs.each_ref(), &weights, &mut state).unwrap();
    let mut fails = |inputs: [&Tensor; 6], weights: &[Tensor; 4], what: &str| {
        let error = run(inputs, weights, &mut state).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
        assert_eq!(state.lens(), [5; 3]);
    };
    for (index, what) in ["queries", "keys", "values", "gates", "decays", "betas"].into_iter().enumerate() {
        let other = inputs[index].unsqueeze(0).unwrap();
        let mut changed = inputs.each_ref();
        changed[index] = &other;
        fails(changed, &weights, what);
        let integers = inputs[index].to_dtype(DType::I64).unwrap();
        changed[index] = &integers;
        fails(changed, &weights, "dtype I64");
    }
    for (index, what) in ["the convolution", "rates", "the bias of gates", "the norm"].into_iter().enumerate()
    {
        let mut other = weights.clone();
        other[index] = weights[index].narrow(0, 0, 1).unwrap();
        fails(inputs.each_ref(), &other, what);
    }
    let fewer = inputs.each_ref().map(|x| x.narrow(0, 0, 2).unwrap());
    fails(fewer.each_ref(), &weights, "3 texts, as in the state");
    let none = inputs.each_ref().map(|x| x.narrow(1, 0, 0).unwrap());
    fails(none.each_ref(), &weights, "one token at least");
    for odd in
        [DeltaNetConfig { value_heads: 4, key_heads: 3, ..config }, DeltaNetConfig { kernel: 0, ..config }]
    {
        assert!(DeltaNetState::new(odd, &Device::Cpu).unwrap_err().to_string().contains("linear attention"));
    }
}
