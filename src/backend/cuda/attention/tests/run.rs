//! A launch with memory of its own, run at any positions.

use super::super::super::card::Card;
use super::super::super::launch::{launch, Grid};
use super::super::super::memory::Locked;
use super::super::call::{AttendCall, AttendMemory, CacheAddresses, HeadNormCall, Positions, Turns};
use super::reference::{numbers, relative_error, rounded, Case, Norm, Of, Tables, EPS};
use crate::backend::cuda::attend::{AttendShape, Cached};
use candle_core::{DType, Device, Tensor};

/// Rows before, between and behind keys and values.
const GUARD: usize = 16;

pub(super) struct Run {
    case: Case,
    tables: Tables,
    device: Device,
    call: AttendCall,
    memory: AttendMemory,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// `[rows, head_dim]`: guard, keys, guard, values, guard.
    cache: Tensor,
    y: Tensor,
    positions: Tensor,
    arrivals: Tensor,
    /// What else the launch has addresses of.
    _held: Vec<Tensor>,
}

/// What a launch has left.
#[derive(PartialEq)]
pub(super) struct Left {
    y: Vec<u32>,
    cache: Vec<u32>,
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    let all = tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
    all.into_iter().map(f32::to_bits).collect()
}

fn address(tensor: &Tensor) -> u64 {
    let stream = tensor.device().as_cuda_device().unwrap().cuda_stream();
    let locked = Locked::new(tensor);
    let address = locked.view().unwrap().address(&stream).unwrap().get();
    address
}

impl Run {
    pub(super) fn new(case: Case, device: &Device) -> Self {
        let Case { dtype, heads, kv_heads, head_dim, capacity, .. } = case;
        let sequences = case.positions.len();
        let tables = case.tables();
        let mut held = Vec::new();
        let mut f32s = |numbers: &[f32]| {
            let tensor = Tensor::from_slice(numbers, numbers.len(), device).unwrap();
            held.push(tensor.clone());
            address(&tensor)
        };
        let norms = tables.norms.each_ref().map(|norm| norm.each_ref().map(|numbers| f32s(numbers)));
        let norm = |of: Of| {
            let [weight, bias] = norms[usize::from(of == Of::Keys)];
            let rms = HeadNormCall { weight, bias: 0, of_each_head: false, subtracts_mean: false, eps: EPS };
            match case.norm {
                Norm::None => None,
                Norm::PlainKeys => (of == Of::Keys).then_some(HeadNormCall { weight: 0, ..rms }),
                Norm::Rms { of_each_head } => Some(HeadNormCall { of_each_head, ..rms }),
                Norm::Layer { of_each_head } => {
                    Some(HeadNormCall { of_each_head, bias, subtracts_mean: true, ..rms })
                }
            }
        };
        let rows = if case.pairs > 0 || case.grows { case.turn_rows } else { 0 };
        let turns = Turns {
            table: if case.pairs > 0 { f32s(&tables.turns) } else { 0 },
            growth: if case.grows { f32s(&tables.growth) } else { 0 },
            rows,
            pairs: case.pairs,
            interleaved: case.interleaved,
        };
        let mut given = |count: usize, seed| {
            let numbers: Vec<f32> = numbers(count, seed);
            let tensor = Tensor::from_slice(&numbers, count, device).unwrap().to_dtype(dtype).unwrap();
            held.push(tensor.clone());
            let numbers: Vec<f32> = numbers.into_iter().map(|x| rounded(f64::from(x), dtype)).collect();
            (numbers, address(&tensor))
        };
        let per_query = if case.has_gate { 2 * head_dim } else { head_dim };
        let (q, q_at) = given(sequences * heads * per_query, 61);
        let (k, k_at) = given(sequences * kv_heads * head_dim, 62);
        let (v, v_at) = given(sequences * kv_heads * head_dim, 63);
        let cache_rows = 3 * GUARD + 2 * sequences * kv_heads * capacity;
        let cache = Tensor::zeros((cache_rows, head_dim), dtype, device).unwrap();
        let y = Tensor::zeros(sequences * heads * head_dim, dtype, device).unwrap();
        let positions = Tensor::from_slice(&case.positions, sequences, device).unwrap();
        let row_bytes = (head_dim * dtype.size_in_bytes()) as u64;
        let keys = address(&cache) + GUARD as u64 * row_bytes;
        let call = AttendCall {
            shape: AttendShape { sequences, heads, kv_heads, head_dim },
            dtype,
            cached: Cached::Numbers,
            capacity,
            is_ring: false,
            positions: Positions::OnDevice(address(&positions)),
            window: case.window,
            is_chunked: case.is_chunked,
            scale: case.scale(),
            softcap: None,
            has_gate: case.has_gate,
            q_norm: norm(Of::Queries),
            k_norm: norm(Of::Keys),
            turns_first: case.turns_first,
            turns,
        };
        let stream = device.as_cuda_device().unwrap().cuda_stream();
        let plan = call.plan(Card::of(stream.context()).unwrap()).expect("a kernel");
        let partial = Tensor::full(f32::NAN, plan.partial(head_dim).max(1), device).unwrap();
        let arrivals = Tensor::zeros(plan.shares, DType::U32, device).unwrap();
        let memory = AttendMemory {
            q: q_at,
            k: k_at,
            v: v_at,
            cache: CacheAddresses {
                keys,
                values: keys + (GUARD + sequences * kv_heads * capacity) as u64 * row_bytes,
                ..CacheAddresses::default()
            },
            sinks: 0,
            y: address(&y),
            partial: address(&partial),
            arrivals: address(&arrivals),
        };
        held.push(partial);
        let device = device.clone();
        Self { case, tables, device, call, memory, q, k, v, cache, y, positions, arrivals, _held: held }
    }

    /// Where row 0 of a sequence's head is, of keys or of values.
    fn row(&self, of_values: bool, sequence: usize, kv_head: usize) -> usize {
        let heads = self.case.positions.len() * self.case.kv_heads;
        let head = sequence * self.case.kv_heads + kv_head;
        GUARD + usize::from(of_values) * (heads * self.case.capacity + GUARD) + head * self.case.capacity
    }

    /// The cache before: what is not seen is NaN.
    fn before(&self) -> Vec<f32> {
        let Case { kv_heads, head_dim, .. } = self.case;
        let mut cache = vec![f32::NAN; self.cache.elem_count()];
        for (sequence, &position) in self.case.positions.iter().enumerate() {
            if !self.case.is_active(position) {
                continue;
            }
            let seen = self.case.first_seen(position as usize)..position as usize;
            for (kv_head, of_values) in (0..kv_heads).flat_map(|head| [(head, false), (head, true)]) {
                let start = self.row(of_values, sequence, kv_head);
                let seed = 100 + start as u64;
                let rows = numbers(self.case.capacity * head_dim, seed);
                let range = seen.start * head_dim..seen.end * head_dim;
                for (to, from) in cache[start * head_dim..][range.clone()].iter_mut().zip(&rows[range]) {
                    *to = rounded(f64::from(*from), self.case.dtype);
                }
            }
        }
        cache
    }

    /// The launch for any positions, at these.
    pub(super) fn at(&mut self, positions: &[u32]) -> Left {
        self.case.positions = positions.to_vec();
        let new = Tensor::from_slice(positions, positions.len(), &self.device).unwrap();
        self.positions.slice_set(&new, 0, 0).unwrap();
        self.launch(self.call)
    }

    /// The launch for this position of all sequences, which is not read from the device.
    pub(super) fn planned(&mut self, position: u32) -> Left {
        self.case.positions.fill(position);
        self.positions.zero_set().unwrap();
        let position = position as usize;
        let first = self.case.first_seen(position);
        let positions = Positions::Known { first, position, settled: position };
        self.launch(AttendCall { positions, ..self.call })
    }

    fn launch(&self, call: AttendCall) -> Left {
        let before = Tensor::from_vec(self.before(), self.cache.dims(), &self.device).unwrap();
        self.cache.slice_set(&before.to_dtype(self.case.dtype).unwrap(), 0, 0).unwrap();
        let nan = Tensor::full(f32::NAN, self.y.dims(), &self.device).unwrap();
        self.y.slice_set(&nan.to_dtype(self.case.dtype).unwrap(), 0, 0).unwrap();
        let stream = self.device.as_cuda_device().unwrap().cuda_stream();
        let plan = call.plan(Card::of(stream.context()).unwrap()).unwrap();
        let params = call.params(&plan, &self.memory).unwrap();
        let grid = Grid { blocks: (plan.splits, plan.shares), shared_bytes: plan.shared_bytes };
        // SAFETY: the addresses are those of tensors that this holds, of the sizes that the header asks for; what is read back
        // below waits for the launch.
        unsafe { launch(&stream, plan.kernel, grid, &params) }.unwrap();
        let arrivals = self.arrivals.to_vec1::<u32>().unwrap();
        assert!(arrivals.iter().all(|arrivals| *arrivals == 0), "{:?}: arrivals are left", self.case);
        Left { y: bits(&self.y), cache: bits(&self.cache) }
    }

    /// Against f64: outputs, of which only rounding them makes an error; keys, which are rounded once; and nothing else is
    /// written.
    #[track_caller]
    pub(super) fn check(&self, left: &Left) {
        let Case { dtype, heads, kv_heads, head_dim, .. } = self.case;
        let before = self.before();
        let mut expected_cache = before.clone();
        let (mut expected, mut found) = (Vec::new(), Vec::new());
        for (sequence, &position) in self.case.positions.iter().enumerate() {
            let y = &left.y[sequence * heads * head_dim..][..heads * head_dim];
            if !self.case.is_active(position) {
                assert!(
                    y.iter().all(|y| f32::from_bits(*y).is_nan()),
                    "{:?}: {sequence} has outputs",
                    self.case
                );
                continue;
            }
            found.extend(y.iter().map(|y| f32::from_bits(*y)));
            let position = position as usize;
            let gates = if self.case.has_gate { 2 } else { 1 };
            let placed = |of, all: &[f32], heads: usize, head: usize| {
                let stride = if of == Of::Queries { gates } else { 1 };
                let row = &all[(sequence * heads + head) * stride * head_dim..][..head_dim];
                self.case.placed(of, &self.tables, head, position, row)
            };
            for kv_head in 0..kv_heads {
                let at = [false, true].map(|of_values| self.row(of_values, sequence, kv_head));
                let new = [
                    placed(Of::Keys, &self.k, kv_heads, kv_head),
                    self.v[(sequence * kv_heads + kv_head) * head_dim..][..head_dim]
                        .iter()
                        .map(|v| f64::from(*v))
                        .collect(),
                ];
                let mut seen = at.map(|at| {
                    let rows = self.case.first_seen(position)..position;
                    let row = |row| before[(at + row) * head_dim..][..head_dim].iter().map(|x| f64::from(*x));
                    rows.map(|index| row(index).collect::<Vec<f64>>()).collect::<Vec<_>>()
                });
                for ((new, at), seen) in new.iter().zip(at).zip(&mut seen) {
                    let row = (at + position) * head_dim..(at + position + 1) * head_dim;
                    let written: Vec<f32> =
                        left.cache[row.clone()].iter().map(|x| f32::from_bits(*x)).collect();
                    let largest = new.iter().fold(0f64, |largest, x| largest.max(x.abs()));
                    for (exact, written) in new.iter().zip(&written) {
                        let least = (f64::from(rounded(*exact, dtype)) - exact).abs();
                        let error = (f64::from(*written) - exact).abs();
                        assert!(
                            error <= least + 1e-6 * largest,
                            "{:?}: wrote {written} for {exact}",
                            self.case
                        );
                    }
                    // As it is multiplied: what is written, which may be rounded to the other side of a tie.
                    seen.push(written.iter().map(|x| f64::from(*x)).collect());
                    expected_cache[row].copy_from_slice(&written);
                }
                let group = heads / kv_heads;
                for head in kv_head * group..(kv_head + 1) * group {
                    let query = placed(Of::Queries, &self.q, heads, head);
                    let query: Vec<f64> = query.iter().map(|q| f64::from(rounded(*q, dtype))).collect();
                    let gate = &self.q[((sequence * heads + head) * gates + gates - 1) * head_dim..];
                    let through = |(y, gate): (f64, &f32)| match self.case.has_gate {
                        true => y / (1. + (-f64::from(*gate)).exp()),
                        false => y,
                    };
                    let seen = self.case.attended(&query, &seen[0], &seen[1]);
                    expected.extend(seen.into_iter().zip(gate).map(through));
                }
            }
        }
        if !expected.is_empty() {
            let error = relative_error(found.into_iter(), &expected);
            let most = if dtype == DType::F32 {
                1e-6
            } else {
                1.1 * relative_error(expected.iter().map(|y| rounded(*y, dtype)), &expected)
            };
            assert!(error <= most, "{:?}: relative error {error:.2e}, at most {most:.2e}", self.case);
        }
        let nan = |bits: &u32| f32::from_bits(*bits).is_nan();
        let same = |(found, expected): (&u32, &f32)| {
            *found == expected.to_bits() || (nan(found) && expected.is_nan())
        };
        let changed = left.cache.iter().zip(&expected_cache).position(|pair| !same(pair));
        assert_eq!(changed.map(|index| index / head_dim), None, "{:?}: another row was written", self.case);
    }
}
