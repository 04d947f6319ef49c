//! What linear attention keeps of the tokens so far.

use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Sizes of a layer of linear attention by the gated delta rule (Gated DeltaNet).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaNetConfig {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values, a multiple of those of keys: head `h` of values uses head `h / (value_heads / key_heads)` of keys.
    pub value_heads: usize,
    /// Elements of a head of queries or keys.
    pub key_dim: usize,
    /// Elements of a head of values.
    pub value_dim: usize,
    /// Tokens that the convolution of queries, keys and values sees.
    pub kernel: usize,
}

/// Far above any model's: no product of two sizes overflows.
const MOST: usize = 1 << 16;

/// Sequences of a state, at most: no memory is wasted on a number that is none.
const MOST_SEQUENCES: usize = 1 << 16;

impl DeltaNetConfig {
    /// Checks that there is one of each, and heads of values for each one of keys.
    ///
    /// # Errors
    /// If not.
    pub fn validate(&self) -> Result<()> {
        let Self { key_heads, value_heads, key_dim, value_dim, kernel } = *self;
        let sizes = [key_heads, value_heads, key_dim, value_dim, kernel];
        match sizes.iter().all(|size| (1..=MOST).contains(size)) && value_heads.is_multiple_of(key_heads) {
            true => Ok(()),
            false => {
                let expected = format!(
                    "1 to {MOST} heads, elements and tokens, and heads of values that are a multiple of those of keys"
                );
                Err(Error::mismatch("linear attention", expected, format!("{self:?}")))
            }
        }
    }

    /// Heads of values for each one of keys.
    pub(crate) fn shared(&self) -> usize {
        self.value_heads.checked_div(self.key_heads).unwrap_or(1)
    }

    /// Numbers of all heads that the convolution is of: queries, keys and values.
    pub fn channels(&self) -> usize {
        let Self { key_heads, value_heads, key_dim, value_dim, .. } = *self;
        key_heads
            .saturating_mul(key_dim)
            .saturating_mul(2)
            .saturating_add(value_heads.saturating_mul(value_dim))
    }

    /// Those that a head of values sees: its query, its key, its values.
    pub(crate) fn channels_of_head(&self) -> usize {
        self.key_dim.saturating_mul(2).saturating_add(self.value_dim)
    }

    /// Tokens before a new one that the convolution sees.
    pub(crate) fn taps(&self) -> usize {
        self.kernel.saturating_sub(1)
    }

    /// Numbers of the matrix of a head of values.
    pub(crate) fn matrix(&self) -> usize {
        self.key_dim.saturating_mul(self.value_dim)
    }

    /// Numbers of its state: the matrix, and behind it what the convolution still sees.
    pub(crate) fn numbers_of_head(&self) -> usize {
        self.matrix().saturating_add(self.taps().saturating_mul(self.channels_of_head()))
    }

    /// Bytes of the state of a text, of any length.
    pub fn size_in_bytes(&self) -> u64 {
        let numbers = self.numbers_of_head().saturating_mul(self.value_heads);
        (numbers as u64).saturating_mul(size_of::<f32>() as u64)
    }
}

/// What a layer of linear attention keeps of the tokens so far, of one or several sequences: for each head of values a matrix
/// `[key_dim, value_dim]`, and what its convolution still sees, in f32. Its size does not depend on how many tokens there were.
///
/// [`ops::gated_delta_net`](crate::ops::gated_delta_net) and [plans](crate::step::StepPlan) change it. A token cannot be taken
/// back: what is left of a text that is cut is no text.
///
/// ```
/// use candle_core::Device;
/// use candle_quant::{DeltaNetConfig, DeltaNetState};
///
/// // As the layers of Qwen3-Next.
/// let config = DeltaNetConfig { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, kernel: 4 };
/// let state = DeltaNetState::new(config, &Device::Cpu)?;
/// assert_eq!((state.len(0), state.size_in_bytes()), (0, 0));
/// assert_eq!(config.size_in_bytes(), 32 * (128 * 128 + 3 * 384) * 4);
/// # Ok::<(), candle_quant::Error>(())
/// ```
pub struct DeltaNetState {
    config: DeltaNetConfig,
    lens: Vec<usize>,
    memory: Memory,
}

enum Memory {
    /// Each head of values by itself, sequence by sequence, so that threads change different ones at the same time.
    OnCpu(Vec<Mutex<DeltaHead>>),
    /// `[sequences, value_heads, ..]`: as [`DeltaHead`], the matrix first.
    OnDevice(Device, Option<Tensor>),
}

/// What a head of values keeps.
#[derive(Clone, Default)]
pub(crate) struct DeltaHead {
    /// The numbers of the last tokens before their convolution, `[kernel - 1, query and key and values]`.
    pub(crate) seen: Vec<f32>,
    /// `[key_dim, value_dim]`.
    pub(crate) matrix: Vec<f32>,
}

impl DeltaNetState {
    /// The state of texts without tokens, which takes no memory yet.
    ///
    /// # Errors
    /// As those of [`DeltaNetConfig::validate`].
    pub fn new(config: DeltaNetConfig, device: &Device) -> Result<Self> {
        config.validate()?;
        let memory = match device {
            Device::Cpu => Memory::OnCpu(Vec::new()),
            Device::Cuda(_) | Device::Metal(_) => Memory::OnDevice(device.clone(), None),
        };
        Ok(Self { config, lens: Vec::new(), memory })
    }

    /// What the state is for.
    pub fn config(&self) -> &DeltaNetConfig {
        &self.config
    }

    /// Where it is.
    pub(crate) fn device(&self) -> &Device {
        match &self.memory {
            Memory::OnCpu(_) => &Device::Cpu,
            Memory::OnDevice(device, _) => device,
        }
    }

    /// Tokens of a sequence: the position of its next one.
    pub fn len(&self, sequence: usize) -> usize {
        self.lens.get(sequence).copied().unwrap_or(0)
    }

    /// Tokens of each sequence. None before anything says how many sequences there are.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Whether no sequence has tokens.
    pub fn is_empty(&self) -> bool {
        self.lens.iter().all(|len| *len == 0)
    }

    /// The sequences with tokens, and those between them.
    pub fn sequences(&self) -> usize {
        self.lens.iter().rposition(|len| *len > 0).map_or(0, |last| last + 1)
    }

    /// Forgets all tokens; the memory stays for the next ones.
    pub fn clear(&mut self) {
        self.lens.fill(0);
    }

    /// Forgets the tokens of a sequence from position `len` on. False if that is not possible, and then nothing has changed: all
    /// may be forgotten, but not some.
    #[must_use = "if false, all tokens are still there"]
    pub fn truncate(&mut self, sequence: usize, len: usize) -> bool {
        match self.lens.get_mut(sequence) {
            Some(there) if len > 0 && len < *there => false,
            Some(there) => {
                *there = len.min(*there);
                true
            }
            None => true,
        }
    }

    /// Bytes of what is allocated.
    pub fn size_in_bytes(&self) -> u64 {
        let numbers = match &self.memory {
            Memory::OnCpu(heads) => {
                let of_head = |head: &Mutex<DeltaHead>| {
                    let head = head.lock().unwrap_or_else(PoisonError::into_inner);
                    head.seen.capacity() + head.matrix.capacity()
                };
                heads.iter().map(of_head).sum()
            }
            Memory::OnDevice(_, numbers) => numbers.as_ref().map_or(0, Tensor::elem_count),
        };
        numbers as u64 * size_of::<f32>() as u64
    }

    /// Whether a batch may go on: it has as many texts as the state, unless that is empty.
    pub(crate) fn check_batch(&self, batch: usize) -> Result<()> {
        // Those at the end may be without tokens; on a device there is memory for them, too.
        let texts = self.lens.len();
        let fits = texts == batch || matches!(self.memory, Memory::OnCpu(_)) && self.sequences() == batch;
        if !self.is_empty() && !fits {
            let expected = format!("{texts} texts, as in the state");
            return Err(Error::mismatch("batch", expected, batch.to_string()));
        }
        self.check_sequence(batch.saturating_sub(1))
    }

    /// Refuses what is no number of a sequence.
    pub(crate) fn check_sequence(&self, sequence: usize) -> Result<()> {
        match sequence < MOST_SEQUENCES {
            true => Ok(()),
            false => {
                let expected = format!("below {MOST_SEQUENCES}");
                Err(Error::mismatch("sequence of a state", expected, sequence.to_string()))
            }
        }
    }

    /// So many tokens of a sequence have changed its state, or are about to.
    pub(crate) fn extend(&mut self, sequence: usize, tokens: usize) {
        if self.lens.len() <= sequence {
            self.lens.resize(sequence.saturating_add(1), 0);
        }
        if let Some(len) = self.lens.get_mut(sequence) {
            *len = len.saturating_add(tokens);
        }
    }

    /// Room on the CPU for so many sequences.
    pub(crate) fn make_room(&mut self, sequences: usize) {
        let count = sequences.saturating_mul(self.config.value_heads);
        if let Memory::OnCpu(heads) = &mut self.memory {
            heads.resize_with(count.max(heads.len()), Mutex::default);
        }
    }

    /// A head of values of a sequence, on the CPU. Of a text without tokens it may be what another one left.
    pub(crate) fn head(&self, sequence: usize, head: usize) -> Option<MutexGuard<'_, DeltaHead>> {
        let Memory::OnCpu(heads) = &self.memory else { return None };
        let head = heads.get(sequence.checked_mul(self.config.value_heads)?.checked_add(head)?)?;
        // A thread that panicked has left numbers half written, which is no danger to others.
        Some(head.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The numbers of so many sequences, `[sequences, value_heads, matrix and what the convolution sees]`: on the CPU a copy, on a
    /// device those that kernels change. What belongs to texts without tokens means nothing.
    pub(crate) fn numbers(&mut self, sequences: usize) -> Result<Tensor> {
        let (heads, size, matrix) =
            (self.config.value_heads, self.config.numbers_of_head(), self.config.matrix());
        self.check_batch(sequences)?;
        if let Memory::OnDevice(device, numbers) = &mut self.memory {
            let there = numbers.as_ref().filter(|numbers| numbers.dims().first() == Some(&sequences));
            return match there {
                Some(there) => Ok(there.clone()),
                None => {
                    // What it had is not to stay beside what it gets.
                    *numbers = None;
                    self.lens.resize(sequences, 0);
                    Ok(numbers.insert(Tensor::zeros((sequences, heads, size), DType::F32, device)?).clone())
                }
            };
        }
        self.make_room(sequences);
        let mut all = Vec::new();
        for (sequence, head) in
            (0..sequences).flat_map(|sequence| (0..heads).map(move |head| (sequence, head)))
        {
            let Some(of_head) = self.head(sequence, head) else { continue };
            // Texts without tokens may have no numbers yet.
            for (numbers, len) in [(&of_head.matrix, matrix), (&of_head.seen, size - matrix)] {
                let end = all.len() + len;
                all.extend_from_slice(numbers.get(..len).unwrap_or_default());
                all.resize(end, 0.);
            }
        }
        Ok(Tensor::from_vec(all, (sequences, heads, size), &Device::Cpu)?)
    }

    /// Takes such a copy back.
    pub(crate) fn set_numbers(&mut self, numbers: &Tensor) -> Result<()> {
        let numbers = numbers.flatten_all()?.to_vec1::<f32>()?;
        let heads = self.config.value_heads;
        for (index, numbers) in numbers.chunks_exact(self.config.numbers_of_head()).enumerate() {
            if let Some(mut head) = self.head(index / heads, index % heads) {
                let (matrix, seen) = numbers.split_at(self.config.matrix().min(numbers.len()));
                (head.matrix, head.seen) = (matrix.to_vec(), seen.to_vec());
            }
        }
        Ok(())
    }
}

impl fmt::Debug for DeltaNetState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeltaNetState").field("config", &self.config).field("lens", &self.lens).finish()
    }
}
