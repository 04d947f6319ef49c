//! A model whose next token is a function of the text, which holds what it was asked as a cache does, and counts.

use candle_core::{Device, Tensor};
use candle_quant_models::generate::CausalLm;

const VOCABULARY: usize = 300;

pub struct Counting {
    /// The token behind a text.
    pub next: fn(&[u32]) -> u32,
    pub cache: Vec<u32>,
    /// Tokens, and calls for them.
    pub computed: usize,
    pub calls: usize,
    /// Whether it can forget a part.
    pub truncates: bool,
    /// The most tokens whose logits it gives each.
    pub room: usize,
    pub context: Option<usize>,
    /// Calls until one fails.
    pub works: usize,
}

impl Counting {
    pub fn new(next: fn(&[u32]) -> u32, truncates: bool) -> Self {
        let (room, works) = (usize::MAX, usize::MAX);
        Self { next, cache: vec![], computed: 0, calls: 0, truncates, room, context: None, works }
    }

    /// Logits behind each token.
    fn compute(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Tensor> {
        assert_eq!(offset, self.cache.len());
        if self.works == 0 {
            self.works = usize::MAX;
            // A model that fails may have remembered a part.
            self.cache.push(7);
            candle_core::bail!("planted");
        }
        self.works -= 1;
        self.calls += 1;
        let ids = ids.squeeze(0)?.to_vec1::<u32>()?;
        self.computed += ids.len();
        let mut logits = vec![0f32; ids.len() * VOCABULARY];
        for (id, logits) in ids.iter().zip(logits.chunks_mut(VOCABULARY)) {
            self.cache.push(*id);
            logits[(self.next)(&self.cache) as usize] = 50.;
        }
        Tensor::from_vec(logits, (ids.len(), VOCABULARY), &Device::Cpu)
    }
}

impl CausalLm for Counting {
    fn forward_last(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Tensor> {
        self.compute(ids, offset)?.narrow(0, ids.dim(1)? - 1, 1)
    }

    fn forward_each(&mut self, ids: &Tensor, offset: usize) -> candle_core::Result<Option<Tensor>> {
        match ids.dim(1)? <= self.room {
            true => self.compute(ids, offset).map(Some),
            false => Ok(None),
        }
    }

    fn clear_kv_cache(&mut self) {
        self.cache.clear();
    }

    fn truncate_kv_cache(&mut self, len: usize) -> usize {
        self.cache.truncate(if self.truncates { len } else { 0 });
        self.cache.len()
    }

    fn device(&self) -> &Device {
        &Device::Cpu
    }

    fn context(&self) -> Option<usize> {
        self.context
    }
}
