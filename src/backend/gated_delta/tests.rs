//! The rule against its formula in f64, and against itself in other orders of work.

use super::*;
use candle_core::Var;

/// Batch, tokens, heads of keys and of values, their elements.
const SHAPES: [[usize; 6]; 6] = [
    [1, 1, 1, 1, 1, 1],
    [1, 1, 2, 2, 16, 16],
    [2, 5, 2, 6, 3, 7],
    [3, 4, 1, 3, 17, 5],
    [1, 33, 2, 4, 8, 33],
    [2, 7, 3, 3, 33, 1],
];

fn numbers(dims: &[usize], phase: f32) -> Tensor {
    let count: usize = dims.iter().product();
    let values = (0..count).map(|i| (i as f32 * 0.77 + phase).sin() * 0.6);
    Tensor::from_iter(values, &Device::Cpu).unwrap().reshape(dims).unwrap()
}

/// Inputs and a state of some tokens.
fn operands([b, t, keys, values, key_dim, value_dim]: [usize; 6]) -> ([Tensor; 5], Tensor) {
    let g = (numbers(&[b, t, values], 2.).abs().unwrap() * -2.).unwrap();
    let inputs = [
        numbers(&[b, t, keys, key_dim], 0.),
        numbers(&[b, t, keys, key_dim], 1.),
        numbers(&[b, t, values, value_dim], 3.),
        g,
        numbers(&[b, t, values], 4.).abs().unwrap(),
    ];
    (inputs, numbers(&[b, values, key_dim, value_dim], 5.))
}

fn run([q, k, v, g, beta]: &[Tensor; 5], state: &Tensor) -> Tensor {
    gated_delta(q, k, v, g, beta, state).unwrap()
}

fn flat(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The formula, a number at a time.
fn reference(shape: [usize; 6], inputs: &[Tensor; 5], state: &Tensor) -> (Vec<f64>, Vec<f64>) {
    let [b, t, keys, values, key_dim, value_dim] = shape;
    let wide = |x: &Tensor| flat(x).into_iter().map(f64::from).collect::<Vec<_>>();
    let [q, k, v, g, beta] = inputs.each_ref().map(wide);
    let (mut s, mut y) = (wide(state), vec![0.; v.len()]);
    for (entry, token, head) in (0..b * t * values).map(|i| (i / values / t, i / values % t, i % values)) {
        let of_value = (entry * t + token) * values + head;
        let of_key = (entry * t + token) * keys + head / (values / keys);
        let at = |i: usize, j: usize| ((entry * values + head) * key_dim + i) * value_dim + j;
        for j in 0..value_dim {
            let mut known = 0.;
            for i in 0..key_dim {
                s[at(i, j)] *= g[of_value].exp();
                known += k[of_key * key_dim + i] * s[at(i, j)];
            }
            let delta = beta[of_value] * (v[of_value * value_dim + j] - known);
            for i in 0..key_dim {
                s[at(i, j)] += k[of_key * key_dim + i] * delta;
                y[of_value * value_dim + j] += q[of_key * key_dim + i] * s[at(i, j)];
            }
        }
    }
    (y, s)
}

fn far(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0., f64::max)
}

#[test]
fn the_kernel_and_candles_operations_are_the_formula() {
    for shape in SHAPES {
        let (inputs, state) = operands(shape);
        let (y, s) = reference(shape, &inputs, &state);
        let sizes = check(inputs.each_ref(), &state).unwrap();
        let (by_candle, last) = by_operations(inputs.each_ref(), &state, sizes).unwrap();
        let by_candle = by_candle.transpose(1, 2).unwrap();
        assert!(far(&flat(&by_candle), &y) < 1e-5 && far(&flat(&last), &s) < 1e-5, "{shape:?}");
        let found = run(&inputs, &state);
        assert_eq!(found.dims(), inputs[2].dims());
        assert!(far(&flat(&found), &y) < 1e-5 && far(&flat(&state), &s) < 1e-5, "{shape:?}");
    }
}

#[test]
fn pieces_and_threads_do_not_matter() {
    for shape in SHAPES {
        let (inputs, whole_state) = operands(shape);
        let whole = flat(&run(&inputs, &whole_state));
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let (_, state) = operands(shape);
            assert_eq!(pool.install(|| flat(&run(&inputs, &state))), whole, "{shape:?}");
        }
        let (_, state) = operands(shape);
        let parts = (0..shape[1]).map(|token| {
            // Views of the inputs, not contiguous.
            run(&inputs.each_ref().map(|x| x.narrow(1, token, 1).unwrap()), &state)
        });
        let parts = Tensor::cat(&parts.collect::<Vec<_>>(), 1).unwrap();
        assert_eq!((flat(&parts), flat(&state)), (whole, flat(&whole_state)), "{shape:?}");
    }
}

#[test]
fn half_precision_is_rounded_once() {
    for dtype in [DType::F16, DType::BF16] {
        let (inputs, state) = operands(SHAPES[2]);
        let rounded = inputs.each_ref().map(|x| x.to_dtype(dtype).unwrap());
        let (found, wide_state) = (run(&rounded, &state), operands(SHAPES[2]).1);
        let wide = run(&rounded.each_ref().map(|x| x.to_dtype(DType::F32).unwrap()), &wide_state);
        assert_eq!(found.dtype(), dtype);
        assert_eq!(flat(&found), flat(&wide.to_dtype(dtype).unwrap()));
        assert_eq!(flat(&state), flat(&wide_state));
    }
}

#[test]
fn gradients_are_slopes() {
    let shape = [1, 3, 1, 2, 3, 2];
    let (inputs, _) = operands(shape);
    let weights = numbers(&[1, 3, 2, 2], 0.4);
    let loss = |inputs: &[Tensor; 5]| {
        let (_, state) = operands(shape);
        (run(inputs, &state) * &weights).unwrap().sum_all().unwrap()
    };
    let vars = inputs.each_ref().map(|x| Var::from_tensor(x).unwrap());
    let gradients = loss(&vars.each_ref().map(|var| var.as_tensor().clone())).backward().unwrap();
    for (index, var) in vars.iter().enumerate() {
        let gradient = flat(gradients.get(var).unwrap());
        for (element, gradient) in gradient.into_iter().enumerate() {
            let moved = |by: f32| {
                let mut values = flat(&inputs[index]);
                values[element] += by;
                let mut inputs = inputs.clone();
                inputs[index] = Tensor::from_vec(values, inputs[index].dims(), &Device::Cpu).unwrap();
                loss(&inputs).to_scalar::<f32>().unwrap()
            };
            let slope = (moved(0.01) - moved(-0.01)) / 0.02;
            assert!((slope - gradient).abs() < 2e-3, "input {index}, element {element}: {gradient} {slope}");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let (inputs, state) = operands(SHAPES[2]);
    let before = flat(&state);
    let fails = |inputs: [&Tensor; 5], state: &Tensor, what: &str| {
        let [q, k, v, g, beta] = inputs;
        let error = gated_delta(q, k, v, g, beta, state).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    for (index, what) in ["queries and values", "keys", "values", "g:", "beta"].into_iter().enumerate() {
        let other = inputs[index].unsqueeze(0).unwrap();
        let mut changed = inputs.each_ref();
        changed[index] = &other;
        fails(changed, &state, if index == 2 { "queries and values" } else { what });
        let fewer = inputs[index].narrow(1, 0, 4).unwrap();
        changed[index] = &fewer;
        fails(changed, &state, if index == 0 { "keys" } else { what });
        let integers = inputs[index].to_dtype(DType::I64).unwrap();
        changed[index] = &integers;
        fails(changed, &state, "dtype I64");
    }
    let empty = inputs.each_ref().map(|x| x.narrow(1, 0, 0).unwrap());
    fails(empty.each_ref(), &state, "at least one");
    let odd = inputs[2].narrow(2, 0, 5).unwrap();
    let [q, k, _, g, beta] = inputs.each_ref();
    fails([q, k, &odd, g, beta], &state, "multiple");
    fails(inputs.each_ref(), &state.to_dtype(DType::F16).unwrap(), "F32");
    fails(inputs.each_ref(), &state.narrow(0, 0, 1).unwrap(), "the state");
    let turned = state.transpose(2, 3).unwrap().contiguous().unwrap().transpose(2, 3).unwrap();
    fails(inputs.each_ref(), &turned, "contiguous");
    assert_eq!(flat(&state), before);
}
