//! Memory nodes (NUMA): which threads run beside which memory, and which rows of a weight lie there.
//!
//! A machine with several nodes reads memory of another node slower than its own. With `CANDLE_QUANT_NUMA=on` every node has a part of
//! each weight's rows, copied there by a thread of the node, which so is the first to touch the memory; the threads of a step are
//! spread over the nodes, stay there while it lasts, and multiply the rows of their node first (`backend/cpu/cursor.rs`).
//! A number in place of `on` pretends so many nodes: parts of the CPUs that there are.

use candle_core::{CpuStorage, Device, Result, Storage, Tensor};
use half::slice::HalfFloatSliceExt;
use half::vec::HalfBitsVecExt;
use std::ops::Range;
use std::sync::OnceLock;

/// The most nodes that are told apart.
pub(crate) const MOST_NODES: usize = 8;

/// Rows of a weight that are multiplied together at least, and lie on one node.
pub(crate) const BLOCK: usize = 16;

/// The CPUs of each node; no nodes where nothing is told apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Nodes(Vec<Vec<usize>>);

impl Nodes {
    /// Those that `CANDLE_QUANT_NUMA` asks for.
    pub(crate) fn current() -> &'static Self {
        static CURRENT: OnceLock<Nodes> = OnceLock::new();
        CURRENT.get_or_init(|| {
            let wanted = std::env::var("CANDLE_QUANT_NUMA").unwrap_or_default();
            match wanted.as_str() {
                "" | "off" => Self::default(),
                wanted => Self::wanted(wanted, &os::allowed_cpus(), os::cpus_of_nodes),
            }
        })
    }

    fn wanted(wanted: &str, allowed: &[usize], of_machine: impl FnOnce() -> Vec<Vec<usize>>) -> Self {
        let mut nodes = match (wanted, wanted.parse::<usize>()) {
            ("on", _) => of_machine(),
            (_, Ok(count @ 1..=MOST_NODES)) => pretended(count, allowed),
            _ => {
                log::warn!(
                    "CANDLE_QUANT_NUMA={wanted}: not on, off, or a number of nodes up to {MOST_NODES}, ignored"
                );
                Vec::new()
            }
        };
        nodes.iter_mut().for_each(|cpus| cpus.retain(|cpu| allowed.contains(cpu)));
        nodes.retain(|cpus| !cpus.is_empty());
        nodes.truncate(MOST_NODES);
        Self(if nodes.len() < 2 { Vec::new() } else { nodes })
    }

    /// How many there are, at least one.
    pub(crate) fn count(&self) -> usize {
        self.0.len().max(1)
    }

    /// Keeps this thread on the CPUs of a node until what is returned is dropped; nowhere, if there is one node or the system refuses.
    #[must_use]
    pub(crate) fn stay(&self, node: usize) -> Option<os::Stay> {
        self.0.get(node).and_then(|cpus| os::Stay::on(cpus))
    }

    /// A copy of matrices with so many numbers in each, and in each row, whose parts the nodes' threads write.
    fn copied<T: Copy + Default + Send + Sync>(&self, from: &[T], matrix: usize, width: usize) -> Vec<T> {
        // Of zeros, the system gives pages that nobody has touched.
        let mut all = vec![T::default(); from.len()];
        let mut of_nodes: Vec<Vec<(&mut [T], &[T])>> = Vec::new();
        of_nodes.resize_with(self.count(), Vec::new);
        let blocks = (matrix / width.max(1)).div_ceil(BLOCK);
        for pair in all.chunks_mut(matrix.max(1)).zip(from.chunks(matrix.max(1))) {
            let (mut to, mut from) = pair;
            for (node, own) in of_nodes.iter_mut().enumerate() {
                let len = (part(blocks, node, self.count()).len() * BLOCK * width).min(to.len());
                let (first, rest) = to.split_at_mut(len);
                own.push((first, from.get(..len).unwrap_or_default()));
                (to, from) = (rest, from.get(len..).unwrap_or_default());
            }
        }
        std::thread::scope(|scope| {
            for (node, own) in of_nodes.into_iter().enumerate() {
                scope.spawn(move || {
                    let _stay = self.stay(node);
                    own.into_iter().for_each(|(to, from)| to.copy_from_slice(from));
                });
            }
        });
        all
    }

    /// See [`placed`].
    fn placed(&self, tensor: &Tensor) -> Result<Tensor> {
        let (Device::Cpu, [.., rows, width], 2..) = (tensor.device(), tensor.dims(), self.count()) else {
            return Ok(tensor.clone());
        };
        let (storage, layout) = tensor.storage_and_layout();
        let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
            return Ok(tensor.clone());
        };
        let matrix = rows * width;
        /// The same in memory of the nodes, as numbers of this kind.
        macro_rules! copied {
            ($numbers:expr) => {
                self.copied($numbers.get(start..end).unwrap_or_default(), matrix, *width)
            };
        }
        let dims = tensor.dims();
        match storage {
            CpuStorage::U8(all) => Tensor::from_vec(copied!(all), dims, &Device::Cpu),
            CpuStorage::U32(all) => Tensor::from_vec(copied!(all), dims, &Device::Cpu),
            CpuStorage::F32(all) => Tensor::from_vec(copied!(all), dims, &Device::Cpu),
            // As bits: of other numbers, zeros are written.
            CpuStorage::F16(all) => {
                let bits: Vec<u16> = copied!(all.reinterpret_cast());
                Tensor::from_vec(bits.reinterpret_into::<half::f16>(), dims, &Device::Cpu)
            }
            CpuStorage::BF16(all) => {
                let bits: Vec<u16> = copied!(all.reinterpret_cast());
                Tensor::from_vec(bits.reinterpret_into::<half::bf16>(), dims, &Device::Cpu)
            }
            _ => Ok(tensor.clone()),
        }
    }
}

/// A weight `[.., N, ..]`, or scales of one, with a part of its rows on each memory node: a copy, where there are several.
///
/// # Errors
/// None; candle's constructors may fail.
pub(crate) fn placed(tensor: &Tensor) -> Result<Tensor> {
    Nodes::current().placed(tensor)
}

/// The part of some items that a node has.
pub(crate) fn part(items: usize, node: usize, nodes: usize) -> Range<usize> {
    items * node / nodes..items * (node + 1) / nodes
}

/// Parts of the CPUs; where these are fewer than nodes, some have the same.
fn pretended(count: usize, cpus: &[usize]) -> Vec<Vec<usize>> {
    let of_node = |node| match part(cpus.len(), node, count) {
        own if own.is_empty() => cpus.iter().cycle().skip(node).take(1).copied().collect(),
        own => cpus.get(own).unwrap_or_default().to_vec(),
    };
    (0..count).map(of_node).collect()
}

#[cfg(target_os = "linux")]
mod os {
    use rustix::thread::{sched_getaffinity, sched_setaffinity, CpuSet};

    /// A thread on some CPUs; when this is dropped, on those where it was before.
    pub(crate) struct Stay {
        before: CpuSet,
    }

    impl Stay {
        pub(super) fn on(cpus: &[usize]) -> Option<Self> {
            let before = sched_getaffinity(None).ok()?;
            let mut own = CpuSet::new();
            cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| own.set(*cpu));
            sched_setaffinity(None, &own).ok()?;
            Some(Self { before })
        }
    }

    impl Drop for Stay {
        fn drop(&mut self) {
            if let Err(error) = sched_setaffinity(None, &self.before) {
                log::warn!("a thread stays on the CPUs of one memory node: {error}");
            }
        }
    }

    pub(super) fn allowed_cpus() -> Vec<usize> {
        let set = sched_getaffinity(None).ok();
        set.map_or(Vec::new(), |set| (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
    }

    pub(super) fn cpus_of_nodes() -> Vec<Vec<usize>> {
        let read = |path: String| super::numbers(&std::fs::read_to_string(path).unwrap_or_default());
        let folder = "/sys/devices/system/node";
        let nodes = read(format!("{folder}/online"));
        nodes.into_iter().map(|node| read(format!("{folder}/node{node}/cpulist"))).collect()
    }
}

#[cfg(not(target_os = "linux"))]
mod os {
    /// Nothing: threads are not told where to run.
    pub(crate) struct Stay;

    impl Stay {
        pub(super) fn on(_cpus: &[usize]) -> Option<Self> {
            None
        }
    }

    pub(super) fn allowed_cpus() -> Vec<usize> {
        (0..std::thread::available_parallelism().map_or(1, |count| count.get())).collect()
    }

    pub(super) fn cpus_of_nodes() -> Vec<Vec<usize>> {
        Vec::new()
    }
}

/// The numbers of a list as Linux writes it: `0-3,8,10-11`.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
fn numbers(list: &str) -> Vec<usize> {
    let numbers = list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        // A machine has fewer.
        Some(first..=last.min(first.saturating_add(1 << 16)))
    });
    numbers.flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::DType;

    #[test]
    fn the_variable_says_which_nodes_there_are() {
        let cpus: Vec<usize> = (2..8).collect();
        let machine = || vec![vec![0, 1, 2, 3], vec![], vec![4, 5, 6, 7], vec![9]];
        let nodes = |wanted| Nodes::wanted(wanted, &cpus, machine).0;
        assert_eq!(
            nodes("on"),
            [vec![2, 3], vec![4, 5, 6, 7]],
            "CPUs that this process may not use are left out"
        );
        assert_eq!(nodes("2"), [vec![2, 3, 4], vec![5, 6, 7]]);
        assert_eq!(nodes("4"), [vec![2], vec![3, 4], vec![5], vec![6, 7]]);
        assert_eq!(nodes("8").len(), 8);
        assert!(nodes("8").iter().all(|cpus| cpus.len() == 1));
        for none in ["0", "1", "9", "yes", "-1"] {
            assert!(nodes(none).is_empty(), "{none}");
        }
        assert!(Nodes::wanted("on", &cpus, || vec![vec![2, 3]]).0.is_empty());
    }

    #[test]
    fn lists_of_cpus_are_read() {
        assert_eq!(numbers("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(numbers("0\n"), [0]);
        assert!(numbers("").is_empty());
        assert_eq!(numbers("x,3-x,5"), [5]);
    }

    #[test]
    fn copies_have_all_rows() {
        let nodes = Nodes(vec![os::allowed_cpus(), os::allowed_cpus(), os::allowed_cpus()]);
        for dims in [vec![1, 3], vec![16, 2], vec![100, 3], vec![3, 40, 5], vec![2, 2, 17, 1]] {
            let all = Tensor::arange(0u32, dims.iter().product::<usize>() as u32, &Device::Cpu).unwrap();
            let all = all.reshape(dims.as_slice()).unwrap();
            for dtype in [DType::U8, DType::U32, DType::F16, DType::BF16, DType::F32] {
                let all = all.to_dtype(dtype).unwrap();
                let copy = nodes.placed(&all).unwrap();
                let numbers = |tensor: &Tensor| {
                    tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
                };
                assert_eq!((copy.dims(), copy.dtype()), (all.dims(), dtype));
                assert_eq!(numbers(&copy), numbers(&all), "{dims:?} {dtype:?}");
            }
        }
        let part = Tensor::arange(0u32, 60, &Device::Cpu).unwrap().reshape((20, 3)).unwrap();
        let part = part.narrow(0, 7, 12).unwrap();
        assert_eq!(nodes.placed(&part).unwrap().to_vec2::<u32>().unwrap(), part.to_vec2::<u32>().unwrap());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_thread_stays_as_long_as_it_is_asked_to() {
        let all = os::allowed_cpus();
        let nodes = Nodes(all.iter().map(|cpu| vec![*cpu]).collect());
        std::thread::spawn(move || {
            for (node, cpu) in all.iter().enumerate() {
                let stay = nodes.stay(node);
                assert!(stay.is_some() && os::allowed_cpus() == [*cpu]);
                drop(stay);
                assert_eq!(os::allowed_cpus(), all);
            }
            assert!(nodes.stay(all.len()).is_none());
        })
        .join()
        .unwrap();
    }
}
