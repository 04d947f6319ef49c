//! The numbers of a stored weight. They need operations, which checkpoints know nothing of.

use crate::checkpoint::Weight;
use crate::Result;
use candle_core::{DType, Device, Tensor};

impl Weight {
    /// The numbers it stands for, dequantized if it is quantized.
    ///
    /// # Errors
    /// As those of loading it; if the device can't dequantize or convert to `dtype`.
    pub fn to_dense(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        self.load(device)?.to_dense(dtype)
    }
}
