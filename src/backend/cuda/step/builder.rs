//! From a plan to launches: which kernels, in which order, and where each finds what the one before has left.

use super::super::attention::Turns;
use super::super::bindings::*;
use super::super::card::Card;
use super::super::gemv_call::PLAIN;
use super::super::kernel::Kernel;
use super::super::launch::Grid;
use super::super::memory::{float_dtype, u32_of};
use super::super::plan::THREADS;
use super::super::sample::{DrawAt, SampleCall};
use super::memory::{Addresses, Constants};
use super::projections::{Source, Target};
use super::{Entry, Exchange, Launch, LaunchParams};
use crate::backend::sample::Choice;
use crate::backend::step::{Activation, Node, Norm, Plan, StepMemory, MOST_PROJECTIONS};
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::{bail, DType, Result};
use std::borrow::Cow;
use std::sync::Arc;

/// What a plan is made into launches with.
pub(super) struct Builder<'a> {
    pub(super) plan: &'a Plan,
    pub(super) memory: &'a StepMemory,
    /// Positions for which tables have rows.
    pub(super) turn_rows: usize,
    pub(super) stream: &'a Arc<CudaStream>,
    pub(super) card: Card,
    pub(super) dtype: DType,
    pub(super) sequences: usize,
    pub(super) is_long: bool,
    pub(super) constants: Constants,
    pub(super) work: Addresses,
    pub(super) shared: Shared,
    pub(super) entries: Vec<Entry>,
    /// Orders of columns, and where they are.
    pub(super) orders: Vec<(Arc<[u32]>, u64)>,
}

/// The most that a launch needs of what all use in turn: sums of parts, and how many of them have come.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Shared {
    partial: usize,
    arrivals: usize,
}

impl Shared {
    /// Behind all other memory.
    fn take(&self, work: &mut Addresses) -> (u64, u64) {
        (work.take(self.partial * size_of::<f32>()), work.take(self.arrivals * size_of::<u32>()))
    }
}

pub(super) struct Built {
    pub(super) entries: Vec<Entry>,
    pub(super) places: Places,
    pub(super) constants: Constants,
    pub(super) work: Addresses,
    pub(super) shared: Shared,
}

/// Addresses of what launches leave for each other: rows of all sequences, in the dtype of activations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    pub(super) sequences: usize,
    dtype: DType,
    vocabulary: usize,
    /// Bytes of what a step is given; on the host it gives what it draws behind them.
    pub(super) input_bytes: usize,
    /// Seed and step; then, without a gap, positions and ids, all that a step is given.
    pub(super) draw: u64,
    pub(super) positions: u64,
    pub(super) ids: u64,
    /// What launches of a draw tell each other; zero between draws.
    sample_state: u64,
    sample_shares: u64,
    pub(super) hidden: u64,
    pub(super) normed: u64,
    /// What a projection sees, in the order of its columns.
    pub(super) ordered: u64,
    /// What the projections of a block make: queries, keys and values, or what linear attention is given.
    pub(super) projected: [u64; MOST_PROJECTIONS],
    pub(super) attended: u64,
    pub(super) gate: u64,
    pub(super) inner: u64,
    /// Of a block, before what ranks sum and its norm.
    pub(super) output: u64,
    pub(super) logits: u64,
    /// Of this rank.
    part_of_logits: u64,
    /// In f32, as what follows.
    pub(super) logits_of_experts: u64,
    pub(super) expert_ids: u64,
    pub(super) expert_shares: u64,
    /// Of each pair of a token and an expert, in the dtype of activations.
    pub(super) inner_of_experts: u64,
    partial: u64,
    arrivals: u64,
}

impl Places {
    pub(super) fn host_bytes(&self) -> usize {
        self.input_bytes + self.sequences * size_of::<u32>()
    }

    /// The launches of a draw. Tokens drawn take the place of those that the step was given.
    pub(super) fn draws(&self, choice: &Choice) -> Result<Vec<Entry>> {
        let call = SampleCall {
            logits: self.logits,
            dtype: self.dtype,
            rows: self.sequences,
            vocabulary: self.vocabulary,
            choice,
            draw: DrawAt::Device(self.draw),
            ids: self.ids,
            state: self.sample_state,
            shares: self.sample_shares,
        };
        let (grid, launches) = call.launches()?;
        let of_step =
            |(kernel, params)| Entry::Launch(Launch { kernel, grid, params: LaunchParams::Sample(params) });
        Ok(launches.into_iter().map(of_step).collect())
    }
}

impl Builder<'_> {
    pub(super) fn build(mut self) -> Result<Built> {
        let places = self.places();
        let turns = self.turns()?;
        for node in &self.plan.nodes {
            self.node(node, &places, &turns)?;
        }
        let Self { entries, constants, mut work, shared, .. } = self;
        // As far as it was not known before.
        shared.take(&mut work);
        Ok(Built { entries, places, constants, work, shared })
    }

    fn places(&mut self) -> Places {
        let (rows, size) = (self.sequences, self.dtype.size_in_bytes());
        let widths = Widths::of(self.plan);
        let (work, shared) = (&mut self.work, self.shared);
        let input = [2 * size_of::<u64>(), rows * size_of::<u32>()];
        let draw = work.take(input.iter().sum::<usize>() + rows * size_of::<u32>());
        let positions = draw + input[0] as u64;
        let (sample_state, sample_shares) =
            (work.take(SampleCall::zeros(rows)), work.take(SampleCall::others(rows)));
        let mut of = |width: usize| work.take(rows * width * size);
        let mut places = Places {
            sequences: rows,
            dtype: self.dtype,
            vocabulary: self.plan.outputs(),
            input_bytes: input.iter().sum::<usize>() + rows * size_of::<u32>(),
            draw,
            positions,
            ids: positions + input[1] as u64,
            sample_state,
            sample_shares,
            hidden: of(self.plan.hidden),
            normed: of(self.plan.hidden),
            ordered: of(widths.ordered),
            projected: widths.projected.map(&mut of),
            attended: of(widths.attended),
            gate: of(widths.inner),
            inner: of(widths.inner),
            output: of(self.plan.hidden),
            logits: of(widths.logits),
            part_of_logits: of(widths.part_of_logits),
            inner_of_experts: of(widths.inner_of_experts),
            logits_of_experts: work.take(rows * widths.logits_of_experts * size_of::<f32>()),
            expert_ids: work.take(rows * widths.top_k * size_of::<u32>()),
            expert_shares: work.take(rows * widths.top_k * size_of::<f32>()),
            partial: 0,
            arrivals: 0,
        };
        (places.partial, places.arrivals) = shared.take(work);
        places
    }

    fn node(&mut self, node: &Node, places: &Places, turns: &[Turns]) -> Result<()> {
        let (hidden, k) = (places.hidden, self.plan.hidden);
        let plain = Target { y: &[], gated: false, finish: PLAIN, residual: 0 };
        match node {
            Node::Embed { table, factor, first_token } => self.embed(table, *factor, *first_token, places),
            Node::Project(norm, projections, clip) => {
                let finish = CqFinish { limit: clip.unwrap_or(0.), ..PLAIN };
                let source = Source { x: hidden, k, norm: norm.as_ref() };
                let target = Target { y: &places.projected, finish, ..plain };
                self.project(&projections.iter().collect::<Vec<_>>(), source, target, places)
            }
            Node::DeltaNet(net) => self.delta_net(net, places),
            Node::Attend(heads) => self.attend(heads, places, turns),
            Node::AddAttended(projection, out) => self.add(projection, places.attended, out, places),
            Node::Inner { norm, gate, up, activation } => {
                let source = Source { x: hidden, k, norm: norm.as_ref() };
                let (activation, y) = (kernels_activation(*activation), &[places.inner][..]);
                let finish = CqFinish { activation, ..PLAIN };
                let target = Target { y, gated: gate.is_some(), finish, ..plain };
                match gate {
                    None => self.project(&[up], source, target, places),
                    Some(gate) => self.project(&[gate, up], source, target, places),
                }
            }
            Node::AddInner(projection, out) => self.add(projection, places.inner, out, places),
            Node::Experts(block) => self.experts(block, places),
            Node::Logits { norm, head, scale, softcap, parts } => {
                let finish = CqFinish { factor: *scale, softcap: softcap.unwrap_or(0.), ..PLAIN };
                let source = Source { x: hidden, k, norm: norm.as_ref() };
                let y = if parts.is_some() { places.part_of_logits } else { places.logits };
                self.project(&[head], source, Target { y: &[y], finish, ..plain }, places)?;
                if let Some(parts) = parts {
                    let addresses = [places.part_of_logits, places.logits];
                    let (rows, counts) = (self.sequences, parts.clone());
                    let exchange = Exchange::Gather { addresses, rows, counts, dtype: self.dtype };
                    self.entries.push(Entry::Exchange(exchange));
                }
                Ok(())
            }
        }
    }

    /// `y = residual + factor * norm(x)`, of rows of a width.
    pub(super) fn norm(
        &mut self,
        norm: &Norm,
        (rows, width): (usize, usize),
        (x, y): (u64, u64),
        (factor, residual): (f32, u64),
    ) -> Result<()> {
        let params =
            CqNorm { residual: residual as *const _, factor, ..self.norm_params(Some(norm), width, (x, y))? };
        self.push(Kernel::Norm, norm_grid(rows), LaunchParams::Norm(params));
        Ok(())
    }

    /// `y = norm(x)` in the order of columns, of rows of a width.
    pub(super) fn order(
        &mut self,
        norm: Option<&Norm>,
        columns: &Arc<[u32]>,
        (rows, width): (usize, usize),
        (x, y): (u64, u64),
    ) -> Result<()> {
        let known = self.orders.iter().find_map(|(known, at)| Arc::ptr_eq(known, columns).then_some(*at));
        let at = known.unwrap_or_else(|| {
            let at = self.constants.add_words(columns.len(), || columns.to_vec());
            self.orders.push((Arc::clone(columns), at));
            at
        });
        let params = self.norm_params(norm, width, (x, y))?;
        let y_width = u32_of("columns of a weight", columns.len())?;
        let params = CqNorm { columns: at as *const _, y_width, ..params };
        self.push(Kernel::Order, norm_grid(rows), LaunchParams::Norm(params));
        Ok(())
    }

    fn norm_params(&mut self, norm: Option<&Norm>, width: usize, (x, y): (u64, u64)) -> Result<CqNorm> {
        let weight = norm.and_then(|norm| norm.weight.as_deref());
        let bias = norm.and_then(|norm| norm.bias.as_deref());
        let width = u32_of("width of a norm", width)?;
        Ok(CqNorm {
            x: x as *const _,
            weight: self.numbers(weight) as *const _,
            bias: self.numbers(bias) as *const _,
            residual: std::ptr::null(),
            y: y as *mut _,
            columns: std::ptr::null(),
            width,
            y_width: width,
            normalizes: norm.is_some().into(),
            subtracts_mean: norm.is_some_and(|norm| norm.subtracts_mean).into(),
            eps: norm.map_or(0., |norm| norm.eps),
            factor: 1.,
            dtype: float_dtype(self.dtype)?,
            unused: 0,
        })
    }

    pub(super) fn elementwise(&mut self, x: u64, up: u64, width: usize, target: Target) -> Result<()> {
        let &[y] = target.y else { bail!("one output is finished at a time") };
        let count = self.sequences * width;
        let params = CqElementwise {
            x: x as *const _,
            up: up as *const _,
            residual: target.residual as *const _,
            y: y as *mut _,
            finish: target.finish,
            count: u32_of("elements", count)?,
            dtype: float_dtype(self.dtype)?,
        };
        let grid = Grid { blocks: (count.div_ceil(THREADS as usize), 1), shared_bytes: 0 };
        self.push(Kernel::Elementwise, grid, LaunchParams::Elementwise(params));
        Ok(())
    }

    /// The address of a norm's weight, ones if it has none.
    pub(super) fn weight_of(&mut self, norm: &Norm, width: usize) -> u64 {
        let ones = || norm.weight.as_deref().map_or(Cow::Owned(vec![1.; width]), Cow::Borrowed);
        self.constants.add(width, ones)
    }

    /// The address of numbers, or none.
    pub(super) fn numbers(&mut self, numbers: Option<&[f32]>) -> u64 {
        numbers.map_or(0, |numbers| self.constants.add(numbers.len(), || Cow::Borrowed(numbers)))
    }

    /// Memory for sums of parts, which launches use in turn.
    pub(super) fn split(&mut self, partial: usize, arrivals: usize, places: &Places) -> (*mut f32, *mut u32) {
        self.shared.partial = self.shared.partial.max(partial);
        self.shared.arrivals = self.shared.arrivals.max(arrivals);
        (places.partial as *mut f32, places.arrivals as *mut u32)
    }

    pub(super) fn push(&mut self, kernel: Kernel, grid: Grid, params: LaunchParams) {
        self.entries.push(Entry::Launch(Launch { kernel, grid, params }));
    }
}

/// The largest outputs of a plan's nodes.
#[derive(Default)]
struct Widths {
    projected: [usize; MOST_PROJECTIONS],
    attended: usize,
    inner: usize,
    logits: usize,
    part_of_logits: usize,
    logits_of_experts: usize,
    top_k: usize,
    inner_of_experts: usize,
    ordered: usize,
}

impl Widths {
    fn of(plan: &Plan) -> Self {
        let mut widths = Self::default();
        let orders = plan.nodes.iter().flat_map(Node::projections).filter_map(|of| of.columns.as_ref());
        widths.ordered = orders.map(|columns| columns.len()).max().unwrap_or(0);
        for node in &plan.nodes {
            match node {
                Node::Project(_, projections, _) => {
                    for (width, projection) in widths.projected.iter_mut().zip(projections) {
                        *width = projection.rows.max(*width);
                    }
                }
                Node::Attend(heads) => widths.attended = widths.attended.max(heads.heads * heads.head_dim),
                Node::DeltaNet(net) => widths.attended = widths.attended.max(net.width()),
                Node::Inner { up, .. } => widths.inner = widths.inner.max(up.rows),
                Node::Experts(block) => {
                    let (experts, top_k) = (block.routing.experts, block.routing.top_k);
                    // Behind those of experts is the one of a shared expert.
                    widths.logits_of_experts =
                        widths.logits_of_experts.max(experts + usize::from(block.shared_gate.is_some()));
                    widths.top_k = widths.top_k.max(top_k);
                    widths.inner_of_experts = widths.inner_of_experts.max(top_k * block.up.rows);
                }
                Node::Logits { head, parts, .. } => {
                    widths.logits = plan.outputs();
                    widths.part_of_logits = if parts.is_some() { head.rows } else { 0 };
                }
                Node::Embed { .. } | Node::AddAttended(..) | Node::AddInner(..) => {}
            }
        }
        widths
    }
}

fn norm_grid(rows: usize) -> Grid {
    Grid { blocks: (rows, 1), shared_bytes: CQ_NORM_SHARED_BYTES as usize }
}

fn kernels_activation(activation: Activation) -> CqActivation {
    match activation {
        Activation::Silu => CQ_ACTIVATION_SILU,
        Activation::Gelu => CQ_ACTIVATION_GELU,
        Activation::GeluTanh => CQ_ACTIVATION_GELU_TANH,
        Activation::Relu2 => CQ_ACTIVATION_RELU2,
    }
}
