//! What a model is built with beside its config and weights.

use super::config::Window;
use candle_core::DType;
use candle_quant::{Error, KvCacheConfig, KvFormat, Result};

/// Tokens of a prompt that are computed at once, unless it is said otherwise.
pub(super) const PREFILL_CHUNK: usize = 256;

/// Choices that a checkpoint does not make; the defaults are those of [`Model::load`](crate::Model::load).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ModelOptions {
    /// The key/value cache.
    pub cache: CacheOptions,
    /// The most tokens of a text; without it as many as [`Config::context`](crate::Config::context) says.
    pub context: Option<usize>,
}

/// How keys and values are held.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CacheOptions {
    /// The format of keys; the dtype of activations without one. Other formats need the CPU.
    pub keys: Option<KvFormat>,
    /// The format of values, likewise.
    pub values: Option<KvFormat>,
    /// The most tokens of a text; as many as memory allows without a limit.
    pub max_tokens: Option<usize>,
}

impl CacheOptions {
    /// The formats of keys and values in a model whose activations have this dtype.
    pub fn formats(&self, dtype: DType) -> (KvFormat, KvFormat) {
        let of_dtype = match dtype {
            DType::F16 => KvFormat::F16,
            DType::BF16 => KvFormat::Bf16,
            _ => KvFormat::F32,
        };
        (self.keys.unwrap_or(of_dtype), self.values.unwrap_or(of_dtype))
    }

    /// What the cache of one layer has to be.
    pub(super) fn layer(
        &self,
        kv_heads: usize,
        head_dim: usize,
        window: Option<Window>,
        dtype: DType,
    ) -> KvCacheConfig {
        let (keys, values) = self.formats(dtype);
        KvCacheConfig {
            window: window.map(|window| window.tokens),
            is_chunked: window.is_some_and(|window| window.is_chunked),
            keys,
            values,
            // Checked for the whole model, before any layer appends.
            ..KvCacheConfig::new(kv_heads, head_dim)
        }
    }

    /// Refuses formats that the device does not have.
    ///
    /// # Errors
    /// If there is one, and the device is not the CPU.
    pub fn validate(&self, is_cpu: bool) -> Result<()> {
        match self.keys.or(self.values) {
            Some(format) if !is_cpu => Err(Error::Unsupported {
                what: format!("a KV cache in {format} on a device other than the CPU"),
                remedy: "leave the format to the dtype of activations".to_string(),
            }),
            _ => Ok(()),
        }
    }
}
