//! What a builder takes its tensors from: candle_nn's constructors.

use super::VarBuilder;
use crate::checkpoint::Checkpoint;
use candle_core::{safetensors::MmapedSafetensors, DType, Device, Result, Tensor};
use candle_nn::{var_builder::SimpleBackend, VarMap};
use std::{collections::HashMap, path::Path};

impl<'a> VarBuilder<'a> {
    /// A builder on any source of tensors.
    pub fn from_backend(backend: Box<dyn SimpleBackend + 'a>, dtype: DType, device: Device) -> Self {
        candle_nn::VarBuilder::from_backend(backend, dtype, device).into()
    }

    /// As [`from_backend`](VarBuilder::from_backend).
    pub fn new_with_args(backend: Box<dyn SimpleBackend + 'a>, dtype: DType, device: &Device) -> Self {
        Self::from_backend(backend, dtype, device.clone())
    }

    /// A builder whose tensors are zeros of any shape.
    pub fn zeros(dtype: DType, device: &Device) -> Self {
        candle_nn::VarBuilder::zeros(dtype, device).into()
    }

    /// A builder on tensors by name. One that [stands for a packed weight](crate::LayerWeight::into_tensor) gives
    /// layers that weight.
    pub fn from_tensors(tensors: HashMap<String, Tensor>, dtype: DType, device: &Device) -> Self {
        candle_nn::VarBuilder::from_tensors(tensors, dtype, device).into()
    }

    /// A builder that creates variables for training, initialized as each layer asks.
    pub fn from_varmap(variables: &VarMap, dtype: DType, device: &Device) -> Self {
        candle_nn::VarBuilder::from_varmap(variables, dtype, device).into()
    }

    /// A builder on safetensors files.
    ///
    /// If weights in them are quantized, or the `config.json` beside them says so, they are opened as
    /// [a checkpoint](Checkpoint::open_quantized), and layers receive packed weights; other files are read as candle_nn
    /// reads them. UQFF and GGUF files can be given as well.
    ///
    /// # Errors
    /// If a file can't be read or is malformed; as those of [`Checkpoint::open_quantized`].
    ///
    /// # Safety
    /// The files are mapped into memory: while a tensor of them may still be loaded, nobody may change them.
    pub unsafe fn from_mmaped_safetensors<P: AsRef<Path>>(
        paths: &[P],
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        if let Some(checkpoint) = Checkpoint::open_quantized(paths)? {
            return Ok(VarBuilder::from_checkpoint(&checkpoint, dtype, device));
        }
        // SAFETY: the caller promises that the files stay as they are.
        let files = unsafe { MmapedSafetensors::multi(paths) }?;
        Ok(Self::from_backend(Box::new(files), dtype, device.clone()))
    }

    /// A builder on a safetensors file in memory.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn from_buffered_safetensors(data: Vec<u8>, dtype: DType, device: &Device) -> Result<Self> {
        Ok(candle_nn::VarBuilder::from_buffered_safetensors(data, dtype, device)?.into())
    }

    /// A builder on a safetensors file in borrowed memory.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn from_slice_safetensors(data: &'a [u8], dtype: DType, device: &Device) -> Result<Self> {
        Ok(candle_nn::VarBuilder::from_slice_safetensors(data, dtype, device)?.into())
    }

    /// A builder on an npz file of numpy.
    ///
    /// # Errors
    /// If it can't be read or is malformed.
    pub fn from_npz<P: AsRef<Path>>(path: P, dtype: DType, device: &Device) -> Result<Self> {
        Ok(candle_nn::VarBuilder::from_npz(path, dtype, device)?.into())
    }

    /// A builder on a pth file of PyTorch.
    ///
    /// # Errors
    /// If it can't be read or is malformed.
    pub fn from_pth<P: AsRef<Path>>(path: P, dtype: DType, device: &Device) -> Result<Self> {
        Ok(candle_nn::VarBuilder::from_pth(path, dtype, device)?.into())
    }

    /// As [`from_pth`](VarBuilder::from_pth), for tensors that lie below the key `state_key`.
    ///
    /// # Errors
    /// If it can't be read or is malformed, or there is no such key.
    pub fn from_pth_with_state<P: AsRef<Path>>(
        path: P,
        dtype: DType,
        state_key: &str,
        device: &Device,
    ) -> Result<Self> {
        Ok(candle_nn::VarBuilder::from_pth_with_state(path, dtype, state_key, device)?.into())
    }
}
