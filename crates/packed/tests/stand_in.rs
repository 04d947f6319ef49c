//! A stand-in looks like the weight, leads to it, and nothing can be computed on it.

use candle_core::{DType, Device, Result, Tensor};
use candle_quant_packed::{dense_copies, load_packed, stand_in, takes_packed, PackedWeight, Weight};
use std::sync::{Arc, Mutex};

/// A dense tensor that plays a packed one.
#[derive(Debug)]
struct Held(Tensor);

impl Held {
    fn new() -> Arc<Self> {
        Arc::new(Self(Tensor::arange(0f32, 12., &Device::Cpu).unwrap().reshape((4, 3)).unwrap()))
    }
}

impl PackedWeight for Held {
    fn dims(&self) -> Vec<usize> {
        self.0.dims().to_vec()
    }
    fn device(&self) -> Device {
        self.0.device().clone()
    }
    fn matmul(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let y = x.matmul(&self.0.t()?)?;
        bias.map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
    }
    fn rows(&self, ids: &Tensor, dtype: DType) -> Result<Tensor> {
        self.0.index_select(ids, 0)?.to_dtype(dtype)
    }
    fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        self.0.to_dtype(dtype)
    }
}

/// The count of dense copies is of the process: tests that look at it run one by one.
static COUNTED: Mutex<()> = Mutex::new(());

#[test]
fn a_stand_in_looks_like_its_weight() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let tensor = stand_in(Held::new(), dtype, false).unwrap();
        assert_eq!((tensor.dims(), tensor.dtype()), (&[4, 3][..], dtype));
        assert!(tensor.device().is_cpu());
    }
}

#[test]
fn nothing_can_be_computed_on_a_stand_in() {
    let w = &stand_in(Held::new(), DType::F32, false).unwrap();
    let dense = &Held::new().0;
    let computations: &[(&str, &dyn Fn() -> Result<Tensor>)] = &[
        ("matmul", &|| dense.matmul(&w.t()?)),
        ("add", &|| w + dense),
        ("add from the left", &|| dense + w),
        ("scale", &|| w * 2.),
        ("sqr", &|| w.sqr()),
        ("sum", &|| w.sum_all()),
        ("argmax", &|| w.argmax(0)),
        ("index_select", &|| w.index_select(&Tensor::new(&[1u32], &Device::Cpu)?, 0)),
        ("gather", &|| w.gather(&Tensor::new(&[[1u32, 1, 1]], &Device::Cpu)?, 0)),
        ("cat", &|| Tensor::cat(&[w, dense], 0)),
        ("cat of two", &|| Tensor::cat(&[w, w], 0)),
        ("stack", &|| Tensor::stack(&[w, w], 0)),
        ("contiguous", &|| w.t()?.contiguous()),
        ("a copy", &|| w.copy()?.sqr()),
        ("reshape of a view", &|| w.t()?.reshape(12)),
        ("f64", &|| w.to_dtype(DType::F64)),
        ("bf16", &|| w.to_dtype(DType::BF16)),
        ("where", &|| w.ge(0.)?.where_cond(w, dense)),
        ("a row", &|| w.get(1)?.affine(1., 0.)),
        ("vec", &|| Tensor::new(w.to_vec2::<f32>()?, &Device::Cpu)),
        ("a scalar", &|| Tensor::new(w.get(0)?.get(0)?.to_scalar::<f32>()?, &Device::Cpu)),
        ("pow", &|| w.powf(2.)),
        ("max pool", &|| w.reshape((1, 1, 4, 3))?.max_pool2d(2)),
        ("conv", &|| dense.reshape((1, 3, 4))?.conv1d(&w.reshape((4, 3, 1))?, 0, 1, 1, 1)),
        ("scatter", &|| dense.scatter_add(&Tensor::zeros((4, 3), DType::U32, &Device::Cpu)?, w, 0)),
        ("slice_set", &|| dense.copy()?.slice_set(w, 0, 0).map(|()| dense.clone())),
    ];
    for (name, compute) in computations {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(compute));
        match result {
            Ok(Err(_)) => {}
            Ok(Ok(value)) => panic!("{name}: {value}"),
            Err(_) => panic!("{name} panicked"),
        }
    }
}

#[test]
fn clones_lead_to_the_weight_while_one_of_them_lives() {
    let held = Held::new();
    let tensor = stand_in(held.clone(), DType::F32, true).unwrap();
    let clone = tensor.to_dtype(DType::F32).unwrap().contiguous().unwrap().to_device(&Device::Cpu).unwrap();
    drop(tensor);
    let weight = Weight::new(clone);
    assert!(std::ptr::eq(weight.packed().unwrap().downcast_ref::<Held>().unwrap(), &*held));
    let again = Weight::new(weight.tensor().clone());
    drop(weight);
    assert!(again.packed().is_some());
    assert!(Arc::strong_count(&held) > 1);
    drop(again);
    assert_eq!(Arc::strong_count(&held), 1, "a dropped stand-in keeps its weight");
    assert!(Weight::new(held.0.clone()).packed().is_none());
}

#[test]
fn a_shared_weight_is_copied_only_after_its_first_use() {
    let _one_by_one = COUNTED.lock().unwrap();
    let before = dense_copies();
    let embedding = Weight::new(stand_in(Held::new(), DType::F32, true).unwrap());
    let head = Weight::new(embedding.tensor().clone());
    let x = Tensor::new(&[[1f32, 1., 1.]], &Device::Cpu).unwrap();
    let y = head.packed().unwrap().matmul(&x, None).unwrap();
    assert_eq!(y.to_vec2::<f32>().unwrap(), [[3., 12., 21., 30.]]);
    let rows = embedding.packed().unwrap().rows(&Tensor::new(&[3u32], &Device::Cpu).unwrap()).unwrap();
    assert_eq!(rows.to_vec2::<f32>().unwrap(), [[9., 10., 11.]]);
    assert_eq!(dense_copies(), before);

    let computed = |weight: &Weight| weight.tensor().sum_all().unwrap().to_scalar::<f32>().unwrap();
    assert_eq!([computed(&embedding), computed(&head), computed(&embedding)], [66.; 3]);
    assert_eq!(dense_copies(), before + 1, "one copy for all layers of the weight");
}

#[test]
fn a_weight_of_one_layer_is_copied_when_asked_for() {
    let _one_by_one = COUNTED.lock().unwrap();
    let before = dense_copies();
    let weight = Weight::new(stand_in(Held::new(), DType::F32, false).unwrap());
    assert_eq!(weight.tensor().sum_all().unwrap().to_scalar::<f32>().unwrap(), 66.);
    assert_eq!(dense_copies(), before + 1);
}

#[test]
fn backends_that_compute_get_dense_tensors() {
    let inner = || match takes_packed() {
        true => stand_in(Held::new(), DType::F32, false),
        false => Ok(Held::new().0.clone()),
    };
    assert!(!takes_packed());
    assert!(Weight::new(load_packed(inner).unwrap()).packed().is_some());
    let sum = load_packed(|| inner()? + 1.).unwrap();
    assert_eq!(sum.sum_all().unwrap().to_scalar::<f32>().unwrap(), 78.);
    let view = load_packed(|| inner()?.t()).unwrap();
    assert_eq!(view.sum_all().unwrap().to_scalar::<f32>().unwrap(), 66.);
    let error = load_packed(|| candle_core::bail!("no such tensor")).unwrap_err();
    assert!(error.to_string().contains("no such tensor"));
    assert!(!takes_packed());
}
