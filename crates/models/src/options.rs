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
    /// The format of keys; the dtype of activations without one. On a CUDA device both are that, or both are codes.
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

    /// Whether keys and values are codes.
    pub(crate) fn has_codes(&self, dtype: DType) -> bool {
        let (keys, values) = self.formats(dtype);
        [keys, values].into_iter().all(KvFormat::is_quantized)
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

    /// Refuses formats that no cache on the device has, for activations of this dtype.
    ///
    /// # Errors
    /// On other devices than the CPU, if keys or values are in another format than the activations and not both are of codes.
    pub fn validate(&self, is_cpu: bool, dtype: DType) -> Result<()> {
        let (of_dtype, (keys, values)) = (Self::default().formats(dtype), self.formats(dtype));
        if is_cpu || self.has_codes(dtype) || (keys, values) == of_dtype {
            return Ok(());
        }
        Err(Error::Unsupported {
            what: format!(
                "a KV cache with keys in {keys} and values in {values} on a device other than the CPU"
            ),
            remedy: format!("choose 8bit or 4bit for both, or leave both in {}, as activations", of_dtype.0),
        })
    }
}
