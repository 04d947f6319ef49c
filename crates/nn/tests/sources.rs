//! Builders on each kind of source give what candle_nn's builders give.

use candle_core::{safetensors, DType, Device, Module, Result, Tensor};
use candle_quant_nn::{self as ours, linear, var_builder::Renamer, LoadedAs};
use std::borrow::Cow;
use std::collections::HashMap;

type Original<'a> = candle_nn::VarBuilder<'a>;
type Ours<'a> = ours::VarBuilder<'a>;

const FIXTURES: &str = concat!(env!("CANDLE_QUANT_REPOSITORY"), "/tests/fixtures");

/// What every source here holds, as `tests/peers/pth.py` writes it.
fn layer() -> HashMap<String, Tensor> {
    let weight = [[-0.5f32, -0.375, -0.25, -0.125], [0., 0.125, 0.25, 0.375]];
    let tensor = |tensor: Result<Tensor>| tensor.unwrap();
    HashMap::from([
        ("layer.0.weight".into(), tensor(Tensor::new(&weight, &Device::Cpu))),
        ("layer.0.bias".into(), tensor(Tensor::new(&[0.5f32, -0.25], &Device::Cpu))),
    ])
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    let values = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    values.into_iter().map(f64::to_bits).collect()
}

/// Both have the layer above, below the path `layer.0`.
fn assert_layer(what: &str, original: Original, ours: Ours) {
    assert_eq!((ours.dtype(), ours.prefix()), (original.dtype(), original.prefix()), "{what}");
    assert!(ours.device().same_device(original.device()), "{what}");
    let (original, ours) = (original.pp("layer").pp(0), ours.pp("layer").pp(0));
    assert_eq!(ours.prefix(), original.prefix(), "{what}");
    for name in ["weight", "bias", "scales"] {
        assert_eq!(ours.contains_tensor(name), original.contains_tensor(name), "{what}: {name}");
    }
    let (weight, expected) = (ours.get((2, 4), "weight").unwrap(), original.get((2, 4), "weight").unwrap());
    assert_eq!((weight.dtype(), bits(&weight)), (expected.dtype(), bits(&expected)), "{what}");
    assert_eq!(bits(&weight), bits(&layer()["layer.0.weight"]), "{what}");
    assert!(ours.get((4, 2), "weight").is_err() && original.get((4, 2), "weight").is_err(), "{what}");
    assert!(ours.get(2, "scales").is_err() && original.get(2, "scales").is_err(), "{what}");

    let x = Tensor::new(&[[1f32, -2., 3., 0.5]], &Device::Cpu).unwrap().to_dtype(ours.dtype()).unwrap();
    let expected = candle_nn::linear(4, 2, original).unwrap().forward(&x).unwrap();
    assert_eq!(bits(&linear(4, 2, ours).unwrap().forward(&x).unwrap()), bits(&expected), "{what}");
}

/// candle_nn's constructor and ours, called alike, for two dtypes.
macro_rules! same {
    ($constructor:ident($($source:expr),*)) => {
        for dtype in [DType::F32, DType::F64] {
            let what = format!("{} as {dtype:?}", stringify!($constructor));
            let original = Original::$constructor($($source,)* dtype, &Device::Cpu).unwrap();
            assert_layer(&what, original, Ours::$constructor($($source,)* dtype, &Device::Cpu).unwrap());
        }
    };
}

#[test]
fn safetensors_in_memory() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.safetensors");
    safetensors::save(&layer(), &file).unwrap();
    let bytes = std::fs::read(file).unwrap();
    same!(from_buffered_safetensors(bytes.clone()));
    same!(from_slice_safetensors(&bytes));
    assert!(Ours::from_buffered_safetensors(bytes[..9].to_vec(), DType::F32, &Device::Cpu).is_err());
    assert!(Ours::from_slice_safetensors(&bytes[..9], DType::F32, &Device::Cpu).is_err());
}

#[test]
fn npz() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.npz");
    let tensors: Vec<_> = layer().into_iter().collect();
    Tensor::write_npz(&tensors, &file).unwrap();
    same!(from_npz(&file));
    assert!(Ours::from_npz(dir.path().join("none.npz"), DType::F32, &Device::Cpu).is_err());
}

#[test]
fn pth() {
    same!(from_pth(format!("{FIXTURES}/pth/plain.pth")));
    let file = format!("{FIXTURES}/pth/state.pth");
    for dtype in [DType::F32, DType::F64] {
        let original = Original::from_pth_with_state(&file, dtype, "state", &Device::Cpu).unwrap();
        let ours = Ours::from_pth_with_state(&file, dtype, "state", &Device::Cpu).unwrap();
        assert_layer("from_pth_with_state", original, ours);
    }
    assert!(Ours::from_pth_with_state(&file, DType::F32, "none", &Device::Cpu).is_err());
    assert!(Ours::from_pth(format!("{FIXTURES}/pth/none.pth"), DType::F32, &Device::Cpu).is_err());
}

#[test]
fn backends() {
    let (dtype, device) = (DType::F32, Device::Cpu);
    let original = Original::from_tensors(layer(), dtype, &device);
    assert_layer("from_tensors", original.clone(), Ours::from_tensors(layer(), dtype, &device));
    let ours = Ours::from_backend(Box::new(layer()), dtype, device.clone());
    assert_layer("from_backend", original.clone(), ours);
    let ours = Ours::new_with_args(Box::new(layer()), dtype, &device);
    assert_layer("new_with_args", original, ours);
}

/// A prefix that names in the source lack.
struct Without(&'static str);

impl Renamer for Without {
    fn rename(&self, name: &str) -> Cow<'_, str> {
        name.strip_prefix(self.0).unwrap_or(name).to_owned().into()
    }
}

#[test]
fn renamed() {
    let (dtype, device) = (DType::F32, Device::Cpu);
    let original = Original::from_tensors(layer(), dtype, &device).rename(Without("outer."));
    let ours = Ours::from_tensors(layer(), dtype, &device).rename(Without("outer."));
    assert_layer("rename", original.pp("outer").root(), ours.pp("outer").root());
    assert_layer("rename, root", original.set_prefix("layer").root(), ours.set_prefix("layer").root());
    let inner = |name: &str| {
        let weight = ours.get((2, 4), name).unwrap();
        assert_eq!(bits(&weight), bits(&original.get((2, 4), name).unwrap()));
    };
    inner("outer.layer.0.weight");

    // Packed weights stay packed.
    let file = format!("{FIXTURES}/mlx/qwen3-affine-b4-g64/model.safetensors");
    // SAFETY: fixtures do not change.
    let vb = unsafe { Ours::from_mmaped_safetensors(&[file], dtype, &device) }.unwrap();
    let vb = vb.rename(Without("outer."));
    let layer = linear_of(&vb.set_prefix("outer.model.layers.0.mlp.up_proj"));
    assert_eq!(layer.dims(), [1, 256]);
    assert_eq!(vb.loaded().into_values().collect::<Vec<_>>(), [LoadedAs::Packed]);
}

fn linear_of(vb: &Ours) -> Tensor {
    let layer = ours::linear_no_bias(128, 256, vb.clone()).unwrap();
    layer.forward(&Tensor::ones((1, 128), DType::F32, &Device::Cpu).unwrap()).unwrap()
}

#[test]
fn paths_dtypes_and_devices() {
    let original = Original::from_tensors(layer(), DType::F32, &Device::Cpu);
    let ours = Ours::from_tensors(layer(), DType::F32, &Device::Cpu);
    assert_layer("to_dtype", original.to_dtype(DType::F64), ours.to_dtype(DType::F64));
    assert_layer("set_dtype", original.clone().set_dtype(DType::F64), ours.clone().set_dtype(DType::F64));
    let (original, ours) = (original.pp("layer"), ours.pp("layer"));
    let moved = (original.clone().set_device(Device::Cpu), ours.clone().set_device(Device::Cpu));
    assert_eq!((moved.1.prefix(), moved.1.dtype()), (moved.0.prefix(), moved.0.dtype()));
    assert_layer("set_device", moved.0.root(), moved.1.root());
    for prefix in ["", "other", "a.b"] {
        assert_eq!(ours.set_prefix(prefix).prefix(), original.set_prefix(prefix).prefix(), "{prefix:?}");
        assert_eq!(ours.set_prefix(prefix).pp(0).prefix(), original.set_prefix(prefix).pp(0).prefix());
    }
}

#[test]
fn zeros() {
    let vb = Ours::zeros(DType::F64, &Device::Cpu).pp("layer");
    let weight = vb.get((2, 4), "weight").unwrap();
    assert_eq!((weight.dtype(), bits(&weight)), (DType::F64, vec![0; 8]));
}
