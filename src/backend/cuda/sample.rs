//! Drawing tokens from logits where they are: ids come back, nothing else.

use super::bindings::{
    CqSample, CqSampleRow, CqSampleShare, CQ_NOT_FINITE, CQ_SAMPLE_BINS, CQ_SAMPLE_BLOCKS,
    CQ_SAMPLE_SHARED_BYTES,
};
use super::kernel::{Kernel, SampleKernel};
use super::launch::{launch, Grid};
use super::memory::{address_mut, allocate, float_dtype, u32_of, Locked};
use super::workspace;
use crate::backend::sample::{Choice, Draw, NOT_FINITE};
use candle_core::backend::BackendStorage;
use candle_core::{bail, CpuStorage, DType, Device, Result, Shape, Tensor};

const _: () = assert!(NOT_FINITE == CQ_NOT_FINITE, "what kernels say of rows without meaning");

/// The fewest logits of a block.
const LEAST_SHARE: usize = 1024;

/// Bits are looked at in so many launches.
const DIGITS: u32 = 3;

/// A token for each row of contiguous `logits` `[rows, vocabulary]`.
#[allow(clippy::wildcard_enum_match_arm, reason = "candle keeps U32 as U32")]
pub(crate) fn sample(logits: &Tensor, choice: &Choice, draw: Draw) -> Result<Vec<u32>> {
    let Device::Cuda(device) = logits.device() else { bail!("a tensor on a CUDA device is needed here") };
    let (rows, vocabulary) = logits.dims2()?;
    let stream = device.cuda_stream();
    let mut ids = allocate(device, &Shape::from(rows), DType::U32)?;
    let share = vocabulary.div_ceil(CQ_SAMPLE_BLOCKS as usize).next_multiple_of(LEAST_SHARE);
    let grid =
        Grid { blocks: (vocabulary.div_ceil(share), rows), shared_bytes: CQ_SAMPLE_SHARED_BYTES as usize };
    workspace::with(&stream, |workspace| {
        let (state, shares) = workspace.draws(
            rows * (size_of::<CqSampleRow>() + CQ_SAMPLE_BINS as usize * size_of::<u64>()),
            rows * CQ_SAMPLE_BLOCKS as usize * size_of::<CqSampleShare>(),
        )?;
        let locked = Locked::new(logits);
        let numbers = locked.view()?.address(&stream)?;
        let result = address_mut(&mut ids, &stream)?;
        let mut params = CqSample {
            logits: numbers.as_ptr(),
            ids: result.as_mut_ptr(),
            bins: state as *mut u64,
            rows: (state + (rows * CQ_SAMPLE_BINS as usize * size_of::<u64>()) as u64) as *mut CqSampleRow,
            shares: shares as *mut CqSampleShare,
            seed: draw.seed,
            step: draw.step,
            top_p: choice.top_p.unwrap_or_default(),
            vocabulary: u32_of("the vocabulary", vocabulary)?,
            share: u32_of("logits of a block", share)?,
            dtype: float_dtype(logits.dtype())?,
            top_k: u32_of("top-k", choice.top_k.unwrap_or_default())?,
            least_weight: choice.least_weight,
            digit: 0,
            temperature: choice.temperature,
            unused: 0,
        };
        let mut step = |kernel, digit| {
            params.digit = digit;
            // SAFETY: logits and ids are borrowed until after the launch, the workspace is this stream's; the rows of the
            // grid are theirs.
            unsafe { launch(&stream, Kernel::Sample(kernel), grid, &params) }
        };
        let mut all = || {
            step(SampleKernel::Largest, 0)?;
            if choice.temperature == 0. {
                return Ok(());
            }
            if choice.top_k.is_some() {
                (0..DIGITS).try_for_each(|digit| step(SampleKernel::Logits, digit))?;
            }
            if choice.top_p.is_some() {
                (0..DIGITS).try_for_each(|digit| step(SampleKernel::Weights, digit))?;
            }
            step(SampleKernel::Draw, 0)
        };
        all().inspect_err(|_| workspace.abandon_draw())
    })?;
    match ids.to_cpu_storage()? {
        CpuStorage::U32(ids) => Ok(ids),
        other => bail!("candle gave {:?} for U32", other.dtype()),
    }
}
