//! Random weights of whatever names and shapes a model asks for.

use crate::reference;
use crate::unchanged::Init;
use candle::{DType, Device, Result, Shape, Tensor};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Makes each tensor when it is first asked for, and keeps it.
#[derive(Clone, Default)]
pub struct Recorder {
    made: Arc<Mutex<BTreeMap<String, Tensor>>>,
    /// What it has if asked whether it has it.
    optional: &'static [&'static str],
}

impl Recorder {
    pub fn new(optional: &'static [&'static str]) -> Self {
        Self { optional, ..Self::default() }
    }

    pub fn tensors(&self) -> BTreeMap<String, Tensor> {
        self.made.lock().unwrap().clone()
    }
}

impl crate::unchanged::SimpleBackend for Recorder {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, _: &Device) -> Result<Tensor> {
        let mut made = self.made.lock().unwrap();
        let seed = 1 + made.len() as u64;
        let tensor = match made.get(name) {
            Some(tensor) => tensor.clone(),
            None => made.entry(name.into()).or_insert(random(shape.dims(), name, seed)?).clone(),
        };
        if tensor.dims() != shape.dims() {
            candle::bail!("{name} asked for as {shape:?}, before that as {:?}", tensor.dims());
        }
        tensor.to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle::bail!("{name} asked for without a shape")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.optional.contains(&name)
    }
}

/// Weights of norms and of ways around a state (Mamba's `D`) are around 1; products with other weights are about as large as what they are products with.
fn random(dims: &[usize], name: &str, seed: u64) -> Result<Tensor> {
    const DEVIATION: f64 = std::f64::consts::FRAC_1_SQRT_2; // of the numbers
    let numbers = (reference::tensor(dims, seed) / DEVIATION)?;
    match dims {
        [_] if name.ends_with("weight") || name.ends_with(".D") => numbers.affine(0.1, 1.0),
        [] | [_] => numbers.affine(0.1, 0.0),
        [_, inner @ ..] => numbers / (inner.iter().product::<usize>() as f64).sqrt(),
    }
}
