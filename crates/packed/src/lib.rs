//! Packed weights where candle expects a [`Tensor`].
//!
//! candle's models pass weights around as tensors: a backend loads one, a layer is made of it, a tied output head
//! takes the embedding's. This crate lets a packed weight go the same way. Whoever loads one returns a **stand-in**
//! ([`stand_in`]): a tensor of the weight's shape, dtype and device that has no elements. A layer that can compute on
//! packed weights finds the weight behind it ([`Weight`]). Any other operation on a stand-in is an error of candle's,
//! never a wrong number; so a backend returns one only to a caller that has said that it takes it
//! ([`load_packed`], [`takes_packed`]).
//!
//! ```
//! use candle_core::{DType, Device, Result, Tensor};
//! use candle_quant_packed::{load_packed, stand_in, takes_packed, PackedWeight, Weight};
//! use std::sync::Arc;
//!
//! /// A multiple of the identity matrix needs one number.
//! #[derive(Debug)]
//! struct Scaled(usize, f64);
//!
//! impl PackedWeight for Scaled {
//!     fn dims(&self) -> Vec<usize> {
//!         vec![self.0, self.0]
//!     }
//!     fn device(&self) -> Device {
//!         Device::Cpu
//!     }
//!     fn matmul(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
//!         let y = (x * self.1)?;
//!         bias.map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
//!     }
//!     fn rows(&self, ids: &Tensor, dtype: DType) -> Result<Tensor> {
//!         self.dequantize(dtype)?.index_select(ids, 0)
//!     }
//!     fn dequantize(&self, dtype: DType) -> Result<Tensor> {
//!         Tensor::eye(self.0, dtype, &Device::Cpu)? * self.1
//!     }
//! }
//!
//! // What a backend does.
//! let load = || match takes_packed() {
//!     true => stand_in(Arc::new(Scaled(3, 2.)), DType::F32, false),
//!     false => Scaled(3, 2.).dequantize(DType::F32),
//! };
//! // What a layer does.
//! let weight = Weight::new(load_packed(load)?);
//! let x = Tensor::new(&[[1f32, 2., 3.]], &Device::Cpu)?;
//! let y = weight.packed().expect("a packed weight").matmul(&x, None)?;
//! assert_eq!(y.to_vec2::<f32>()?, [[2., 4., 6.]]);
//! # Ok::<(), candle_core::Error>(())
//! ```

mod request;
mod stand_in;
mod weight;

pub use request::{load_packed, takes_packed};
pub use stand_in::stand_in;
pub use weight::{dense_copies, Packed, Weight};

use candle_core::{DType, Device, Result, Tensor};
use std::{any::Any, fmt::Debug};

/// A matrix `[N, K]` in whatever form it is computed on.
pub trait PackedWeight: Any + Debug + Send + Sync {
    /// The logical dimensions, `[N, K]`.
    fn dims(&self) -> Vec<usize>;

    /// Where the data lives.
    fn device(&self) -> Device;

    /// `x w^T + bias`: `x` is `[.., K]`, the result `[.., N]` of the dtype of `x`.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    fn matmul(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor>;

    /// The rows of these ids `[..]`, as `[.., K]` of `dtype`.
    ///
    /// # Errors
    /// If an id is not below N, or the device can't convert to `dtype`.
    fn rows(&self, ids: &Tensor, dtype: DType) -> Result<Tensor>;

    /// All of it as a dense tensor.
    ///
    /// # Errors
    /// If the device has no memory for it or can't convert to `dtype`.
    fn dequantize(&self, dtype: DType) -> Result<Tensor>;
}
