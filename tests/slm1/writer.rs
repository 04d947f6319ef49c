//! Writes SLM1 files by the letter of the format, with the values that they stand for.

use crate::hash;
use crate::packed::numbers;
use candle_quant::checkpoint::slm1::NibbleOrder;
use std::collections::BTreeMap;

#[derive(Clone, Copy)]
pub struct Model {
    pub hidden: u32,
    pub layers: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub ffn: u32,
    pub tied: bool,
}

pub const VOCAB: u32 = 260;

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    F32,
    Q8,
    Q4(u32, NibbleOrder),
}

pub struct File {
    pub bytes: Vec<u8>,
    /// Shape and values of each tensor.
    pub values: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

impl Model {
    fn shapes(&self) -> Vec<(String, Vec<u32>)> {
        let Self { hidden, ffn, .. } = *self;
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut shapes = vec![
            ("tok_embeddings.weight".to_owned(), vec![VOCAB, hidden]),
            ("norm.weight".to_owned(), vec![hidden]),
        ];
        if !self.tied {
            shapes.push(("output.weight".to_owned(), vec![VOCAB, hidden]));
        }
        for layer in 0..self.layers {
            for (name, dims) in [
                ("attn_norm", vec![hidden]),
                ("ffn_norm", vec![hidden]),
                ("wq", vec![q, hidden]),
                ("wk", vec![kv, hidden]),
                ("wv", vec![kv, hidden]),
                ("wo", vec![hidden, q]),
                ("w1", vec![ffn, hidden]),
                ("w2", vec![hidden, ffn]),
                ("w3", vec![ffn, hidden]),
            ] {
                shapes.push((format!("layers.{layer}.{name}.weight"), dims));
            }
        }
        shapes
    }

    /// A file of this model, and of the tensors `extra` beyond it.
    pub fn write(&self, kind: Kind, extra: &[(&str, &[u32])]) -> File {
        let mut shapes = self.shapes();
        shapes.extend(extra.iter().map(|(name, dims)| (name.to_string(), dims.to_vec())));
        let tokenizer = [&b"BTOK"[..], &le(&[1, VOCAB, 256, 257, 258, 259])].concat();
        let directory = (108 + tokenizer.len()).next_multiple_of(64);
        let data = (directory + 64 * shapes.len()).next_multiple_of(64);
        let mut entries = Vec::new();
        let mut payloads = vec![0; data];
        let mut values = BTreeMap::new();
        for (seed, (name, dims)) in shapes.iter().enumerate() {
            let encoded = encode(kind, dims, seed as u64 + 5);
            let place = |payloads: &mut Vec<u8>, bytes: &[u8]| {
                let at = payloads.len().next_multiple_of(64);
                payloads.resize(at, 0);
                payloads.extend_from_slice(bytes);
                at as u64
            };
            let payload_at = place(&mut payloads, &encoded.payload);
            let scales_at = if encoded.scales.is_empty() { 0 } else { place(&mut payloads, &encoded.scales) };
            let mut all = [0; 4];
            all[..dims.len()].copy_from_slice(dims);
            entries.extend(hash(name).to_le_bytes());
            entries.extend(le(&[encoded.dtype, dims.len() as u32]));
            entries.extend(le(&all));
            for number in [payload_at, encoded.payload.len() as u64, scales_at] {
                entries.extend(number.to_le_bytes());
            }
            entries.extend(le(&[encoded.block, 0]));
            values.insert(name.clone(), (dims.iter().map(|dim| *dim as usize).collect(), encoded.values));
        }
        let mut bytes = payloads;
        bytes.resize(bytes.len().next_multiple_of(64), 0);
        let mut header = b"SLM1".to_vec();
        header.extend(le(&[1, 108, 1, u32::from(self.tied), VOCAB, 4, self.hidden, self.layers, self.heads]));
        header.extend(le(&[self.kv_heads, self.head_dim, self.ffn, 64]));
        header.extend([10000f32, 1e-5].iter().flat_map(|number| number.to_le_bytes()));
        header.extend([108, tokenizer.len() as u64, directory as u64].iter().flat_map(|n| n.to_le_bytes()));
        header.extend(le(&[shapes.len() as u32]));
        header.extend([data as u64, 0xDEAD_BEEF].iter().flat_map(|number| number.to_le_bytes()));
        assert_eq!(header.len(), 108);
        for (at, part) in [(0, header), (108, tokenizer), (directory, entries)] {
            bytes[at..at + part.len()].copy_from_slice(&part);
        }
        File { bytes, values }
    }
}

struct Encoded {
    dtype: u32,
    block: u32,
    payload: Vec<u8>,
    scales: Vec<u8>,
    values: Vec<f32>,
}

fn encode(kind: Kind, dims: &[u32], seed: u64) -> Encoded {
    let (count, cols) = (dims.iter().product::<u32>() as usize, dims[dims.len() - 1]);
    let random = numbers(count, seed);
    let block = match kind {
        Kind::F32 => {
            let values: Vec<f32> = random.iter().map(|x| x * 0.2).collect();
            let payload = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            return Encoded { dtype: 1, block: 0, payload, scales: vec![], values };
        }
        Kind::Q8 => cols,
        Kind::Q4(block, _) => block,
    };
    let scales: Vec<f32> =
        numbers(count / block as usize, seed + 100).iter().map(|x| 0.01 + x.abs() * 0.01).collect();
    let (limit, unit) = if matches!(kind, Kind::Q8) { (127., 50.) } else { (7., 3.) };
    let codes: Vec<i8> = random.iter().map(|x| (x * unit).clamp(-limit - 1., limit).round() as i8).collect();
    let scale_of = |index: usize| scales[index / block as usize] * if limit > 100. { 0.1 } else { 1. };
    let values = codes.iter().enumerate().map(|(index, code)| f32::from(*code) * scale_of(index)).collect();
    let stored: Vec<f32> = (0..scales.len()).map(|index| scale_of(index * block as usize)).collect();
    let pair = |low: i8, high: i8| low as u8 & 15 | (high as u8) << 4;
    let (dtype, payload) = match kind {
        Kind::Q4(_, NibbleOrder::Pairs) => {
            (3, codes.chunks(2).map(|codes| pair(codes[0], codes[1])).collect())
        }
        Kind::Q4(_, NibbleOrder::HalfBlock) => {
            let half = block as usize / 2;
            let of_block =
                |codes: &[i8]| (0..half).map(|i| pair(codes[i], codes[i + half])).collect::<Vec<_>>();
            (3, codes.chunks(2 * half).flat_map(of_block).collect())
        }
        _ => (2, codes.iter().map(|code| *code as u8).collect()),
    };
    let scales = stored.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    Encoded { dtype, block, payload, scales, values }
}

fn le(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}
