//! Drawing tokens from logits where they are: ids come back, nothing else.

use super::bindings::{
    CqSample, CqSampleRow, CqSampleShare, CQ_NOT_FINITE, CQ_SAMPLE_BINS, CQ_SAMPLE_BLOCKS,
    CQ_SAMPLE_SHARED_BYTES,
};
use super::kernel::{Kernel, SampleKernel};
use super::launch::{launch, Grid};
use super::memory::{address_mut, allocate, can_read_back, float_dtype, u32_of, Locked};
use super::workspace;
use crate::backend::sample::{Choice, Draw, NOT_FINITE};
use candle_core::backend::BackendStorage;
use candle_core::{bail, CpuStorage, DType, Device, Result, Shape, Tensor};

const _: () = assert!(NOT_FINITE == CQ_NOT_FINITE, "what kernels say of rows without meaning");

/// The fewest logits of a block.
const LEAST_SHARE: usize = 1024;

/// Bits are looked at in so many launches.
const DIGITS: u32 = 3;

/// The launches of a draw. Addresses are those of device memory.
pub(super) struct SampleCall<'a> {
    /// `[rows, vocabulary]`, contiguous.
    pub(super) logits: u64,
    pub(super) dtype: DType,
    pub(super) rows: usize,
    pub(super) vocabulary: usize,
    pub(super) choice: &'a Choice,
    pub(super) draw: DrawAt,
    /// `[rows]` of U32.
    pub(super) ids: u64,
    /// So many bytes as [`zeros`](Self::zeros) says, zero before and after.
    pub(super) state: u64,
    /// So many as [`others`](Self::others) says.
    pub(super) shares: u64,
}

/// Where a draw's seed and step are.
pub(super) enum DrawAt {
    Known(Draw),
    /// Two U64 on the device.
    Device(u64),
}

impl SampleCall<'_> {
    pub(super) fn zeros(rows: usize) -> usize {
        rows * (size_of::<CqSampleRow>() + CQ_SAMPLE_BINS as usize * size_of::<u64>())
    }

    pub(super) fn others(rows: usize) -> usize {
        rows * CQ_SAMPLE_BLOCKS as usize * size_of::<CqSampleShare>()
    }

    /// All have the same grid.
    pub(super) fn launches(&self) -> Result<(Grid, Vec<(Kernel, CqSample)>)> {
        let Self { rows, vocabulary, choice, .. } = *self;
        let share = vocabulary.div_ceil(CQ_SAMPLE_BLOCKS as usize).next_multiple_of(LEAST_SHARE);
        let blocks = (vocabulary.div_ceil(share), rows);
        let (draw, Draw { seed, step }) = match self.draw {
            DrawAt::Known(draw) => (0, draw),
            DrawAt::Device(address) => (address, Draw { seed: 0, step: 0 }),
        };
        let params = CqSample {
            logits: self.logits as *const _,
            ids: self.ids as *mut _,
            bins: self.state as *mut u64,
            rows: (self.state + (rows * CQ_SAMPLE_BINS as usize * size_of::<u64>()) as u64) as *mut _,
            shares: self.shares as *mut _,
            draw: draw as *const _,
            seed,
            step,
            top_p: choice.top_p.unwrap_or_default(),
            vocabulary: u32_of("the vocabulary", vocabulary)?,
            share: u32_of("logits of a block", share)?,
            dtype: float_dtype(self.dtype)?,
            top_k: u32_of("top-k", choice.top_k.unwrap_or_default())?,
            least_weight: choice.least_weight,
            digit: 0,
            temperature: choice.temperature,
            unused: 0,
        };
        use SampleKernel::{Draw as Drawn, Largest, Logits, Weights};
        let digits =
            |kernel, asked: bool| (0..DIGITS).filter(move |_| asked).map(move |digit| (kernel, digit));
        let drawn = [(Largest, 0)].into_iter().chain(digits(Logits, choice.top_k.is_some()));
        let drawn = drawn.chain(digits(Weights, choice.top_p.is_some())).chain([(Drawn, 0)]);
        // The largest logit is no draw.
        let count = if choice.temperature == 0. { 1 } else { usize::MAX };
        let launches = drawn.take(count);
        let launches = launches.map(|(kernel, digit)| (Kernel::Sample(kernel), CqSample { digit, ..params }));
        Ok((Grid { blocks, shared_bytes: CQ_SAMPLE_SHARED_BYTES as usize }, launches.collect()))
    }
}

/// A token for each row of contiguous `logits` `[rows, vocabulary]`.
#[allow(clippy::wildcard_enum_match_arm, reason = "candle keeps U32 as U32")]
pub(crate) fn sample(logits: &Tensor, choice: &Choice, draw: Draw) -> Result<Vec<u32>> {
    let Device::Cuda(device) = logits.device() else { bail!("a tensor on a CUDA device is needed here") };
    let (rows, vocabulary) = logits.dims2()?;
    let stream = device.cuda_stream();
    can_read_back("drawing tokens", &stream)?;
    let mut ids = allocate(device, &Shape::from(rows), DType::U32)?;
    workspace::with(&stream, |workspace| {
        let (state, shares) = workspace.draws(SampleCall::zeros(rows), SampleCall::others(rows))?;
        let locked = Locked::new(logits);
        let numbers = locked.view()?.address(&stream)?;
        let result = address_mut(&mut ids, &stream)?;
        let call = SampleCall {
            logits: numbers.get(),
            dtype: logits.dtype(),
            rows,
            vocabulary,
            choice,
            draw: DrawAt::Known(draw),
            ids: result.get(),
            state,
            shares,
        };
        let (grid, launches) = call.launches()?;
        let mut launches = launches.iter();
        // SAFETY: logits and ids are borrowed until after the launch, the workspace is this stream's; the rows of the grid
        // are theirs.
        let all = launches.try_for_each(|(kernel, params)| unsafe { launch(&stream, *kernel, grid, params) });
        all.inspect_err(|_| workspace.abandon_draw())
    })?;
    match ids.to_cpu_storage()? {
        CpuStorage::U32(ids) => Ok(ids),
        other => bail!("candle gave {:?} for U32", other.dtype()),
    }
}
