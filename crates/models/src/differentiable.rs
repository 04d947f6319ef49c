//! Candle's fused operations with the gradients that they lack: values are those of inference, bit for bit.

use super::rope::Rotation;
use candle_core::backend::BackendStorage;
use candle_core::{
    bail, CpuStorage, CudaStorage, CustomOp1, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, D,
};
use candle_nn::{Module, RmsNorm};

/// The normalized `x`. The weight of the norm is a constant.
pub(super) fn rms_norm(norm: &RmsNorm, x: &Tensor) -> Result<Tensor> {
    if !x.track_op() {
        return norm.forward(x);
    }
    let value = norm.forward(&x.detach())?;
    let norm = norm.clone();
    of_one(x, value, move |x, _, grad| {
        let (wide, grad) = (x.to_dtype(DType::F32)?, grad.to_dtype(DType::F32)?);
        let length = (wide.sqr()?.mean_keepdim(D::Minus1)? + norm.eps())?.sqrt()?;
        let unit = wide.broadcast_div(&length)?;
        let grad = grad.broadcast_mul(&norm.weight().to_dtype(DType::F32)?)?;
        let along = (&grad * &unit)?.mean_keepdim(D::Minus1)?;
        let across = (grad - unit.broadcast_mul(&along)?)?;
        across.broadcast_div(&length)?.to_dtype(x.dtype())
    })
}

/// Softmax over the last dimension.
pub(super) fn softmax(x: &Tensor) -> Result<Tensor> {
    if !x.track_op() {
        return candle_nn::ops::softmax_last_dim(x);
    }
    let value = candle_nn::ops::softmax_last_dim(&x.detach())?;
    of_one(x, value, |_, y, grad| {
        let weighted = (grad * y)?;
        let mean = weighted.sum_keepdim(D::Minus1)?;
        weighted - y.broadcast_mul(&mean)?
    })
}

/// See [`Rotation::turn`].
pub(super) fn rotate(x: &Tensor, rotation: &Rotation) -> Result<Tensor> {
    if !x.track_op() {
        return rotation.turn(x);
    }
    let value = rotation.turn(&x.detach())?;
    let back = rotation.inverse()?;
    of_one(x, value, move |_, _, grad| back.turn(&grad.contiguous()?))
}

/// `value`, which was made of `x`, with a gradient: `backward` makes it of `x`, `value` and the gradient of `value`.
pub(super) fn of_one(
    x: &Tensor,
    value: Tensor,
    backward: impl Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    x.apply_op1(Known { value: whole(value)?, backward })
}

/// As [`of_one`], of three tensors and their gradients.
pub(super) fn of_three(
    [a, b, c]: [&Tensor; 3],
    value: Tensor,
    backward: impl Fn([&Tensor; 3], &Tensor) -> Result<[Tensor; 3]> + Send + Sync + 'static,
) -> Result<Tensor> {
    a.apply_op3(b, c, Known { value: whole(value)?, backward })
}

/// The tensor as the only one in its storage.
fn whole(value: Tensor) -> Result<Tensor> {
    let is_whole = {
        let (storage, layout) = value.storage_and_layout();
        let elements = match &*storage {
            Storage::Cpu(CpuStorage::F32(all)) => Some(all.len()),
            _ => None,
        };
        layout.contiguous_offsets().is_some_and(|(start, end)| start == 0 && elements == Some(end))
    };
    if is_whole {
        Ok(value)
    } else {
        value.force_contiguous()
    }
}

/// An operation whose value is there already.
struct Known<F> {
    value: Tensor,
    backward: F,
}

impl<F> Known<F> {
    fn on_cpu(&self) -> Result<(CpuStorage, Shape)> {
        let (storage, layout) = self.value.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { bail!("a value on another device than its operand") };
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn on_cuda(&self) -> Result<(CudaStorage, Shape)> {
        let (storage, layout) = self.value.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { bail!("a value on another device than its operand") };
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }
}

impl<F: Fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor> + Send + Sync> CustomOp1 for Known<F> {
    fn name(&self) -> &'static str {
        "known"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.on_cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.on_cuda()
    }

    fn bwd(&self, x: &Tensor, value: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some((self.backward)(&x.detach(), &value.detach(), grad)?))
    }
}

impl<F: Fn([&Tensor; 3], &Tensor) -> Result<[Tensor; 3]> + Send + Sync> CustomOp3 for Known<F> {
    fn name(&self) -> &'static str {
        "known"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.on_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.on_cuda()
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        _value: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [of_a, of_b, of_c] = (self.backward)([&a.detach(), &b.detach(), &c.detach()], grad)?;
        Ok((Some(of_a), Some(of_b), Some(of_c)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    /// That two functions of `[2, 3, 2, 8]` have the same values and gradients.
    fn check(found: impl Fn(&Tensor) -> Result<Tensor>, expected: impl Fn(&Tensor) -> Result<Tensor>) {
        let values: Vec<f32> = (0..96).map(|i| (i as f32 * 0.77).sin() * 3.).collect();
        let var = Var::from_vec(values, (2, 3, 2, 8), &Device::Cpu).unwrap();
        let factor =
            Tensor::arange(0f32, 96., &Device::Cpu).unwrap().cos().unwrap().reshape((2, 3, 2, 8)).unwrap();
        let of = |f: &dyn Fn(&Tensor) -> Result<Tensor>| {
            let value = f(var.as_tensor()).unwrap();
            let loss = (&value * &factor).unwrap().sum_all().unwrap();
            (value.detach(), loss.backward().unwrap().get(&var).unwrap().clone())
        };
        let ((value, gradient), (expected_value, expected_gradient)) = (of(&found), of(&expected));
        for (a, b) in [(&value, &expected_value), (&gradient, &expected_gradient)] {
            let far = (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
            assert!(far < 5e-6, "{far}");
        }
        // Without a variable it is the operation itself.
        let plain = found(&var.as_detached_tensor()).unwrap();
        assert!(!plain.track_op());
        let far = (plain - value).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        assert_eq!(far, 0.);
    }

    #[test]
    fn norms() {
        let weight = Tensor::arange(1f32, 9., &Device::Cpu).unwrap();
        for eps in [1e-6, 0.5] {
            let norm = RmsNorm::new((&weight * 0.3).unwrap(), eps);
            check(|x| rms_norm(&norm, x), |x| norm.forward_diff(x));
        }
    }

    #[test]
    fn softmaxes() {
        check(softmax, |x| candle_nn::ops::softmax(x, D::Minus1));
    }

    #[test]
    fn rotations() {
        let frequencies = [1., 0.3, 0.1, 0.02];
        let rotation = Rotation::new((&frequencies, false), 1.3, 2..5, (DType::F32, &Device::Cpu)).unwrap();
        let table = |f: fn(f32) -> f32| {
            let values = (2..5).flat_map(|position| frequencies.map(|w| 1.3 * f(position as f32 * w)));
            Tensor::from_iter(values, &Device::Cpu).unwrap().reshape((1, 3, 1, 4)).unwrap()
        };
        let (cos, sin) = (table(f32::cos), table(f32::sin));
        let expected = |x: &Tensor| {
            let (a, b) = (x.narrow(3, 0, 4)?, x.narrow(3, 4, 4)?);
            let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
            let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
            Tensor::cat(&[first, second], 3)
        };
        check(|x| rotate(x, &rotation), expected);
    }
}
