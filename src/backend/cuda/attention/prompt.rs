//! Attention of several new tokens of each sequence to a cache, to which their keys and values are appended.

use super::super::attend::{prompt_rows, AttendPrompt, Cached};
use super::super::bindings::{CqAppend, CqAttendPrompt, CQ_ATTEND_THREADS};
use super::super::card::Card;
use super::super::kernel::Kernel;
use super::super::launch::{launch, Grid};
use super::super::memory::{address_mut, allocate, float_dtype, u32_of, Locked, View};
use super::super::plan::MOST_BLOCKS;
use super::call::{logit_factors, window_of, CacheAddresses};
use crate::backend::{NewRows, NewTokens};
use crate::tensor::DeviceRows;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::op::BackpropOp;
use candle_core::{
    bail, CpuStorage, CudaStorage, Device, InplaceOp1, Layout, Result, Shape, Storage, Tensor,
};
use std::sync::Arc;

/// Tokens of a block that makes codes: one for each warp.
const APPENDED_BY_BLOCK: usize = CQ_ATTEND_THREADS as usize / 32;

/// Whether there is a kernel for queries `[B, T, heads, head_dim]` on their device, to so many heads of keys: floats of the
/// dtype of queries, or codes of so many bits.
pub(crate) fn attends_to_prompts(q: &Tensor, kv_heads: usize, codes: Option<[usize; 2]>) -> Result<bool> {
    let Device::Cuda(device) = q.device() else { return Ok(false) };
    let card = Card::of(device.cuda_stream().context())?;
    let cached = codes.map_or(Cached::Numbers, Cached::Codes);
    let plan = AttendPrompt::plan(q.dim(3)?, (q.dtype(), cached), (card.bf16, card.all_shared_bytes));
    Ok(plan.is_some() && q.dim(0)?.saturating_mul(kv_heads) <= MOST_BLOCKS)
}

/// A tensor as kernels take it, and its address.
struct Contiguous<'a> {
    locked: Locked<'a>,
    layout: Layout,
    copy: Option<CudaStorage>,
}

impl<'a> Contiguous<'a> {
    fn new(tensor: &'a Tensor, stream: &CudaStream) -> Result<Self> {
        let locked = Locked::new(tensor);
        let copy = locked.view()?.realigned(stream)?;
        Ok(Self { locked, layout: Layout::contiguous(tensor.shape()), copy })
    }

    fn view(&self) -> Result<View<'_>> {
        match &self.copy {
            Some(storage) => Ok(View { storage, layout: &self.layout }),
            None => self.locked.view(),
        }
    }
}

/// Makes codes of keys and values, and puts them into a cache.
pub(crate) fn append_codes(cache: &DeviceRows, new: &NewRows) -> Result<()> {
    let Device::Cuda(device) = cache.memory.device() else {
        bail!("a cache on a CUDA device is needed here")
    };
    cache.memory.inplace_op1(&AppendCodes { cache, new, stream: device.cuda_stream() })
}

/// The launch, as an operation on the cache.
struct AppendCodes<'a> {
    cache: &'a DeviceRows,
    new: &'a NewRows<'a>,
    stream: Arc<CudaStream>,
}

impl InplaceOp1 for AppendCodes<'_> {
    fn name(&self) -> &'static str {
        "kv-cache-append"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("a cache on a CUDA device is needed here")
    }

    fn cuda_fwd(&self, memory: &mut CudaStorage, _: &Layout) -> Result<()> {
        let &NewRows { k, v, position } = self.new;
        let (batch, tokens, kv_heads, head_dim) = k.dims4()?;
        let (cache, stream) = (self.cache, &self.stream);
        let Some([key_bits, value_bits]) = cache.codes() else { bail!("a cache of codes is needed here") };
        let fits = (batch, kv_heads, head_dim) == (cache.sequences, cache.kv_heads, cache.head_dim);
        if !fits || position.checked_add(tokens).is_none_or(|end| end > cache.capacity) {
            bail!("{:?} from {position} on in a cache of {} rows", k.dims(), cache.capacity);
        }
        let [k, v] = [Contiguous::new(k, stream)?, Contiguous::new(v, stream)?];
        let (k_view, v_view) = (k.view()?, v.view()?);
        let (k_at, v_at) = (k_view.address(stream)?, v_view.address(stream)?);
        let memory = address_mut(memory, stream)?;
        let CacheAddresses { keys, values, key_groups, value_groups } =
            CacheAddresses::of(cache, memory.get());
        let params = CqAppend {
            k: k_at.as_ptr(),
            v: v_at.as_ptr(),
            keys: keys as *mut _,
            values: values as *mut _,
            key_groups: key_groups as *mut _,
            value_groups: value_groups as *mut _,
            tokens: u32_of("tokens", tokens)?,
            position: u32_of("position", position)?,
            kv_heads: u32_of("heads of keys", kv_heads)?,
            capacity: u32_of("rows of a cache", cache.capacity)?,
            key_bits: u32_of("bits", key_bits)?,
            value_bits: u32_of("bits", value_bits)?,
            dtype: float_dtype(k_view.dtype())?,
            unused: 0,
        };
        let blocks = (tokens.div_ceil(APPENDED_BY_BLOCK), batch * kv_heads);
        // SAFETY: the addresses are those of tensors that are held until after the launch; keys and values have the shape and
        // dtype of the parameters, and the cache has rows for all tokens.
        unsafe { launch(stream, Kernel::AppendCodes { head_dim }, Grid { blocks, shared_bytes: 0 }, &params) }
    }
}

/// `[B, T, heads * head_dim]`, what the tokens see of a cache, which has theirs.
pub(crate) fn attend_prompt(cache: &DeviceRows, tokens: &NewTokens) -> Result<Tensor> {
    let Device::Cuda(device) = cache.memory.device() else {
        bail!("attention on a CUDA device is needed here")
    };
    let (batch, count, heads, head_dim) = tokens.q.dims4()?;
    let &DeviceRows { kv_heads, capacity, .. } = cache;
    let stream = device.cuda_stream();
    let card = Card::of(stream.context())?;
    let dtype = tokens.q.dtype();
    let on_card = (card.bf16, card.all_shared_bytes);
    let Some(plan) = AttendPrompt::plan(head_dim, (dtype, Cached::of(cache)), on_card) else {
        bail!("no kernel attends with heads of {head_dim} elements of {dtype:?}")
    };
    if tokens.position + count > capacity || kv_heads == 0 {
        bail!("{count} tokens from {} on in a cache of {capacity} rows", tokens.position);
    }
    let [key_bits, value_bits] = cache.codes().unwrap_or_default();
    let group = heads / kv_heads;
    let blocks = ((count * group).div_ceil(prompt_rows(head_dim)), batch * kv_heads);
    let q = Contiguous::new(tokens.q, &stream)?;
    let q = q.view()?;
    let q = q.address(&stream)?;
    let sinks = tokens.sinks.map(Locked::new);
    let sinks = match &sinks {
        Some(sinks) => Some(sinks.view()?.address(&stream)?),
        None => None,
    };
    let memory = Locked::new(&cache.memory);
    let memory = memory.view()?.address(&stream)?;
    let CacheAddresses { keys, values, key_groups, value_groups } = CacheAddresses::of(cache, memory.get());
    let shape = Shape::from((batch, count, heads * head_dim));
    let mut output = allocate(device, &shape, dtype)?;
    {
        let y = address_mut(&mut output, &stream)?;
        let (scale, cap) = logit_factors(tokens.scale, tokens.softcap);
        let params = CqAttendPrompt {
            q: q.as_ptr(),
            keys: keys as *const _,
            values: values as *const _,
            key_groups: key_groups as *const _,
            value_groups: value_groups as *const _,
            sinks: sinks.as_ref().map_or(std::ptr::null(), |sinks| sinks.as_ptr()),
            y: y.as_mut_ptr(),
            tokens: u32_of("tokens", count)?,
            position: u32_of("position", tokens.position)?,
            group: u32_of("heads", group)?,
            kv_heads: u32_of("heads of keys", kv_heads)?,
            capacity: u32_of("rows of a cache", capacity)?,
            window: window_of(tokens.config.window, capacity)?,
            chunked: tokens.config.is_chunked.into(),
            dtype: float_dtype(dtype)?,
            key_bits: u32_of("bits", key_bits)?,
            value_bits: u32_of("bits", value_bits)?,
            stages: u32_of("stages", plan.stages)?,
            unused: 0,
            scale,
            cap,
        };
        // SAFETY: all addresses are those of tensors that are held until after the launch. Shapes were checked by the caller:
        // the cache has rows for all tokens, and rows of heads are multiples of 16 bytes.
        unsafe { launch(&stream, plan.kernel, Grid { blocks, shared_bytes: plan.shared_bytes }, &params)? };
    }
    Ok(Tensor::from_storage(Storage::Cuda(output), shape, BackpropOp::none(), false))
}
