//! Attention of several new tokens of each sequence to a cache, to which their keys and values are appended.

use super::super::attend::{prompt_rows, Attend, AttendPrompt, AttendShape, Cached};
use super::super::bindings::{CqAppend, CqAttendPrompt, CQ_ATTEND_THREADS};
use super::super::card::Card;
use super::super::kernel::Kernel;
use super::super::launch::{launch, Grid};
use super::super::memory::{
    address_mut, address_of, allocate, float_dtype, pointer, u32_of, Contiguous, Locked,
};
use super::super::plan::MOST_BLOCKS;
use super::call::{logit_factors, window_of, CacheAddresses};
use super::can_copy_positions;
use crate::backend::NewTokens;
use crate::tensor::{CachePlace, DeviceRows};
use crate::{DeviceKvCache, KvCacheConfig, KvFormat};
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::op::BackpropOp;
use candle_core::{
    bail, CpuStorage, CudaDevice, CudaStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Storage,
    Tensor,
};
use std::sync::Arc;

/// Tokens of a block that makes codes: one for each warp.
const APPENDED_BY_BLOCK: usize = CQ_ATTEND_THREADS as usize / 32;

/// Whether there is a kernel for queries `[B, T, heads, head_dim]` on their device, at these places, to so many heads of keys:
/// floats of the dtype of queries, or codes of so many bits.
///
/// # Errors
/// If the device's stream is captured, and the places have to be copied there.
pub(crate) fn attends_to_prompts(
    q: &Tensor,
    kv_heads: usize,
    codes: Option<[KvFormat; 2]>,
    places: &[CachePlace],
) -> Result<bool> {
    let Device::Cuda(device) = q.device() else { return Ok(false) };
    if CachePlace::common(places).is_none() {
        can_copy_positions(&device.cuda_stream())?;
    }
    let [prompts, tokens] = have_kernels(device, (q.dtype(), codes), [q.dim(0)?, kv_heads, q.dim(3)?])?;
    // Nor are codes made that no new token could read.
    Ok(prompts && (codes.is_none() || tokens))
}

/// Whether kernels are all that reads a cache with a window, for so many sequences with activations of a dtype: then it need not keep
/// what the window leaves behind.
pub(crate) fn keeps_ring(
    cache: &DeviceKvCache,
    (device, dtype): (&Device, DType),
    sequences: usize,
) -> Result<bool> {
    let &KvCacheConfig { kv_heads, head_dim, window, .. } = cache.config();
    let Device::Cuda(device) = device else { return Ok(false) };
    let sizes = [sequences, kv_heads, head_dim];
    Ok(window.is_some() && have_kernels(device, (dtype, cache.codes()), sizes)? == [true; 2])
}

/// Whether prompts have a kernel, and single tokens, for so many sequences, heads of keys, and elements of a head.
fn have_kernels(
    device: &CudaDevice,
    (dtype, codes): (DType, Option<[KvFormat; 2]>),
    [sequences, kv_heads, head_dim]: [usize; 3],
) -> Result<[bool; 2]> {
    let card = Card::of(device.cuda_stream().context())?;
    let of = (dtype, codes.map_or(Cached::Numbers, Cached::Codes));
    let on_card = (card.bf16, card.shared());
    let shape = AttendShape { sequences: 1, heads: kv_heads, kv_heads, head_dim };
    let of_prompts = AttendPrompt::plan(head_dim, of, on_card);
    Ok([
        of_prompts.is_some() && sequences.saturating_mul(kv_heads) <= MOST_BLOCKS,
        Attend::plan(shape, of, None, on_card).is_some(),
    ])
}

/// Where the tokens of each sequence belong, as kernels take it: all at one position, or, on the device, as each says.
struct Places {
    position: usize,
    each: Option<Tensor>,
}

impl Places {
    /// Of a cache that has rows for so many tokens.
    fn new(places: &[CachePlace], cache: &DeviceRows, tokens: usize, device: &CudaDevice) -> Result<Self> {
        for &CachePlace { sequence, position } in places {
            let fits = position.checked_add(tokens).is_some_and(|end| end <= cache.capacity);
            if !(fits || cache.is_ring && tokens <= cache.capacity) || sequence >= cache.sequences {
                let (sequences, capacity) = (cache.sequences, cache.capacity);
                bail!("{tokens} tokens from {position} on of sequence {sequence} in {sequences} of {capacity} rows");
            }
        }
        if let Some(position) = CachePlace::common(places) {
            return Ok(Self { position, each: None });
        }
        let each = places.iter().flat_map(|place| [place.sequence, place.position]);
        let each = each.map(|number| u32_of("position", number)).collect::<Result<Vec<_>>>()?;
        Ok(Self { position: 0, each: Some(Tensor::new(each, &Device::Cuda(device.clone()))?) })
    }

    fn locked(&self) -> Option<Locked<'_>> {
        self.each.as_ref().map(Locked::new)
    }
}

/// Makes codes of keys and values, and puts them into a cache: the launch, as an operation on it.
struct AppendCodes<'a> {
    cache: &'a DeviceRows,
    new: &'a NewTokens<'a>,
    places: &'a Places,
    stream: &'a Arc<CudaStream>,
}

impl InplaceOp1 for AppendCodes<'_> {
    fn name(&self) -> &'static str {
        "kv-cache-append"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("a cache on a CUDA device is needed here")
    }

    fn cuda_fwd(&self, memory: &mut CudaStorage, layout: &Layout) -> Result<()> {
        let Some((0, _)) = layout.contiguous_offsets() else {
            bail!("a contiguous cache is needed here, found layout {layout:?}")
        };
        let &NewTokens { k, v, .. } = self.new;
        let (batch, tokens, kv_heads, head_dim) = k.dims4()?;
        let (cache, stream) = (self.cache, self.stream);
        let Some([key_format, value_format]) = cache.codes() else {
            bail!("a cache of codes is needed here")
        };
        if (kv_heads, head_dim) != (cache.kv_heads, cache.head_dim) {
            bail!("{:?} in a cache with {} heads of {}", k.dims(), cache.kv_heads, cache.head_dim);
        }
        let [k, v] = [Contiguous::new(k, stream)?, Contiguous::new(v, stream)?];
        let (k_view, v_view) = (k.view()?, v.view()?);
        let (k_at, v_at) = (k_view.address(stream)?, v_view.address(stream)?);
        let memory = address_mut(memory, stream)?;
        let places = self.places.locked();
        let places = address_of(places.as_ref(), stream)?;
        let CacheAddresses { keys, values, key_groups, value_groups } =
            CacheAddresses::of(cache, memory.get());
        let params = CqAppend {
            k: k_at.as_ptr(),
            v: v_at.as_ptr(),
            keys: keys as *mut _,
            values: values as *mut _,
            key_groups: key_groups as *mut _,
            value_groups: value_groups as *mut _,
            places: pointer(places.as_ref()),
            tokens: u32_of("tokens", tokens)?,
            position: u32_of("position", self.places.position)?,
            kv_heads: u32_of("heads of keys", kv_heads)?,
            capacity: u32_of("rows of a cache", cache.capacity)?,
            key_bits: u32_of("bits", key_format.bits())?,
            value_bits: u32_of("bits", value_format.bits())?,
            dtype: float_dtype(k_view.dtype())?,
            unused: 0,
        };
        let blocks = (tokens.div_ceil(APPENDED_BY_BLOCK), batch * kv_heads);
        // SAFETY: the addresses are those of tensors that are held until after the launch; keys and values have the shape and
        // dtype of the parameters, and the cache has rows for all tokens.
        unsafe { launch(stream, Kernel::AppendCodes { head_dim }, Grid { blocks, shared_bytes: 0 }, &params) }
    }
}

/// `[B, T, heads * head_dim]`, what the tokens see of a cache, which has theirs; one of codes gets them first.
pub(crate) fn attend_prompt(cache: &DeviceRows, tokens: &NewTokens) -> Result<Tensor> {
    let Device::Cuda(device) = cache.memory.device() else {
        bail!("attention on a CUDA device is needed here")
    };
    let (batch, count, heads, head_dim) = tokens.q.dims4()?;
    let &DeviceRows { kv_heads, capacity, .. } = cache;
    let stream = device.cuda_stream();
    let card = Card::of(stream.context())?;
    let dtype = tokens.q.dtype();
    let on_card = (card.bf16, card.shared());
    let Some(plan) = AttendPrompt::plan(head_dim, (dtype, Cached::of(cache)), on_card) else {
        bail!("no kernel attends with heads of {head_dim} elements of {dtype:?}")
    };
    if kv_heads == 0 || batch != tokens.places.len() {
        bail!("{} places for {batch} sequences, {kv_heads} heads of keys", tokens.places.len());
    }
    let places = Places::new(tokens.places, cache, count, device)?;
    if cache.codes().is_some() {
        cache.memory.inplace_op1(&AppendCodes { cache, new: tokens, places: &places, stream: &stream })?;
    }
    let each = places.locked();
    let each = address_of(each.as_ref(), &stream)?;
    let [key_bits, value_bits] = cache.formats.map(KvFormat::bits);
    let group = heads / kv_heads;
    let blocks = ((count * group).div_ceil(prompt_rows(head_dim)), batch * kv_heads);
    let q = Contiguous::new(tokens.q, &stream)?;
    let q = q.view()?;
    let q = q.address(&stream)?;
    let sinks = tokens.sinks.map(Locked::new);
    let sinks = address_of(sinks.as_ref(), &stream)?;
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
            sinks: pointer(sinks.as_ref()),
            y: y.as_mut_ptr(),
            places: pointer(each.as_ref()),
            tokens: u32_of("tokens", count)?,
            position: u32_of("position", places.position)?,
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
