//! Attention of several new tokens of each sequence to a cache that has their keys and values.

use super::super::attend::{prompt_kernel, prompt_rows, prompt_shared_bytes};
use super::super::bindings::CqAttendPrompt;
use super::super::card::Card;
use super::super::launch::{launch, Grid};
use super::super::memory::{address_mut, allocate, u32_of, Locked, View};
use super::super::plan::MOST_BLOCKS;
use super::call::{logit_factors, window_of};
use crate::backend::NewTokens;
use candle_core::op::BackpropOp;
use candle_core::{bail, Device, Layout, Result, Shape, Storage, Tensor};

/// Whether there is a kernel for queries `[B, T, heads, head_dim]` on their device, to so many heads of keys.
pub(crate) fn attends_to_prompts(q: &Tensor, kv_heads: usize) -> Result<bool> {
    let Device::Cuda(device) = q.device() else { return Ok(false) };
    let card = Card::of(device.cuda_stream().context())?;
    let kernel = prompt_kernel(q.dim(3)?, q.dtype(), (card.bf16, card.all_shared_bytes));
    Ok(kernel.is_some() && q.dim(0)?.saturating_mul(kv_heads) <= MOST_BLOCKS)
}

/// `[B, T, heads * head_dim]`, what the tokens see of a cache `[2, B, kv_heads, capacity, head_dim]`, which has theirs.
pub(crate) fn attend_prompt(cache: &Tensor, tokens: &NewTokens) -> Result<Tensor> {
    let Device::Cuda(device) = cache.device() else { bail!("attention on a CUDA device is needed here") };
    let (batch, count, heads, head_dim) = tokens.q.dims4()?;
    let [_, _, kv_heads, capacity, _] = cache.dims()[..] else { bail!("a cache has five dimensions") };
    let stream = device.cuda_stream();
    let card = Card::of(stream.context())?;
    let Some(kernel) = prompt_kernel(head_dim, tokens.q.dtype(), (card.bf16, card.all_shared_bytes)) else {
        bail!("no kernel attends with heads of {head_dim} elements of {:?}", tokens.q.dtype())
    };
    if tokens.position + count > capacity || kv_heads == 0 {
        bail!("{count} tokens from {} on in a cache of {capacity} rows", tokens.position);
    }
    let group = heads / kv_heads;
    let blocks = ((count * group).div_ceil(prompt_rows(head_dim)), batch * kv_heads);
    let locked = Locked::new(tokens.q);
    let realigned = locked.view()?.realigned(&stream)?;
    let layout = Layout::contiguous(tokens.q.shape());
    let q = realigned.as_ref().map_or(locked.view()?, |storage| View { storage, layout: &layout });
    let q = q.address(&stream)?;
    let sinks = tokens.sinks.map(Locked::new);
    let sinks = match &sinks {
        Some(sinks) => Some(sinks.view()?.address(&stream)?),
        None => None,
    };
    let cache = Locked::new(cache);
    let rows = cache.view()?.address(&stream)?;
    let size = tokens.q.dtype().size_in_bytes();
    let values = rows.get() + (batch * kv_heads * capacity * head_dim * size) as u64;
    let shape = Shape::from((batch, count, heads * head_dim));
    let mut output = allocate(device, &shape, tokens.q.dtype())?;
    {
        let y = address_mut(&mut output, &stream)?;
        let (scale, cap) = logit_factors(tokens.scale, tokens.softcap);
        let params = CqAttendPrompt {
            q: q.as_ptr(),
            keys: rows.as_ptr(),
            values: values as *const _,
            sinks: sinks.as_ref().map_or(std::ptr::null(), |sinks| sinks.as_ptr()),
            y: y.as_mut_ptr(),
            tokens: u32_of("tokens", count)?,
            position: u32_of("position", tokens.position)?,
            group: u32_of("heads", group)?,
            kv_heads: u32_of("heads of keys", kv_heads)?,
            capacity: u32_of("rows of a cache", capacity)?,
            window: window_of(tokens.config.window, capacity)?,
            chunked: tokens.config.is_chunked.into(),
            unused: 0,
            scale,
            cap,
        };
        // SAFETY: all addresses are those of tensors that are held until after the launch. Shapes were checked by the caller:
        // the cache has rows for all tokens, and rows of heads are multiples of 16 bytes.
        unsafe {
            launch(&stream, kernel, Grid { blocks, shared_bytes: prompt_shared_bytes(head_dim) }, &params)?
        };
    }
    Ok(Tensor::from_storage(Storage::Cuda(output), shape, BackpropOp::none(), false))
}
