//! Graphs: captured work, to be done again.

use std::ffi::c_ulonglong;
use std::sync::Arc;

use crate::argument::Out;
use crate::driver;
use crate::edge::Edge;
use crate::handles::{Handle, Handles};
use crate::memory;
use crate::status::{fail, Result, INVALID_HANDLE, INVALID_VALUE};
use crate::stream::{self, Work};

/// Work in the order in which it was submitted.
#[derive(Clone)]
pub struct Graph {
    /// Its device.
    pub device: usize,
    /// What to do.
    pub work: Vec<Work>,
    /// Memory that it allocates, and frees or not.
    pub memory: Arc<GraphMemory>,
}

/// Memory allocated by work of a graph, each time it runs at the same addresses.
#[derive(Default)]
pub struct GraphMemory {
    /// Addresses, and whether work frees them.
    allocations: Vec<(u64, bool)>,
}

impl GraphMemory {
    /// The address of memory, and the work that allocates it.
    pub fn allocate(&mut self, device: usize, bytes: usize) -> Result<(u64, Work)> {
        let address = memory::reserve(device, bytes)?;
        self.allocations.push((address, false));
        Ok((address, Work::new(move || memory::revive(address))))
    }

    /// The work that frees memory; none if it is not memory of this graph, or freed already.
    pub fn free(&mut self, address: u64) -> Option<Work> {
        let allocation = self.allocations.iter_mut().find(|(other, freed)| *other == address && !*freed)?;
        allocation.1 = true;
        Some(Work::new(move || memory::free(address)))
    }

    /// What a launch left behind.
    fn left_over(&self) -> impl Iterator<Item = u64> + '_ {
        self.allocations.iter().map(|(address, _)| *address).filter(|address| memory::is_revived(*address))
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        self.allocations.iter().for_each(|(address, _)| memory::release(*address));
    }
}

struct Executable {
    graph: Graph,
    frees_at_launch: bool,
}

impl Executable {
    /// Between the last kernel of a launch and the first of the next one, nothing overlaps.
    fn run(&self, edge: &mut Edge) -> Result<()> {
        edge.cut();
        for address in self.graph.memory.left_over() {
            if !self.frees_at_launch {
                return fail(
                    INVALID_VALUE,
                    "memory that the graph allocates was not freed since its last launch",
                );
            }
            memory::free(address)?;
        }
        let result = self.graph.work.iter().try_for_each(|work| work.run(edge));
        edge.cut();
        result
    }
}

/// Graphs as captured.
pub static GRAPHS: Handles<Graph> = Handles::new("graph");
static EXECUTABLE: Handles<Executable> = Handles::new("executable graph");

const AUTO_FREE_ON_LAUNCH: c_ulonglong = 1;
/// Upload, use priorities of nodes: no difference here.
const HARMLESS_FLAGS: c_ulonglong = 2 | 8;

driver! {
    /// Makes a graph that can be launched.
    fn cuGraphInstantiateWithFlags(executable: Out<Handle>, graph: Handle, flags: c_ulonglong) {
        let graph = GRAPHS.get(graph)?;
        if flags & !(AUTO_FREE_ON_LAUNCH | HARMLESS_FLAGS) != 0 {
            return fail(INVALID_VALUE, format!("flags of a graph: {flags}"));
        }
        let frees_at_launch = flags & AUTO_FREE_ON_LAUNCH != 0;
        executable.set(EXECUTABLE.insert(Executable { graph: Graph::clone(&graph), frees_at_launch }))
    }

    /// Nothing to upload.
    fn cuGraphUpload(executable: Handle, stream: Handle) {
        EXECUTABLE.get(executable)?;
        stream::find(stream).map(drop)
    }

    /// Does the work again.
    fn cuGraphLaunch(executable: Handle, stream: Handle) {
        let (executable, stream) = (EXECUTABLE.get(executable)?, stream::find(stream)?);
        let graph = &executable.graph;
        if graph.device != stream.device {
            let message = format!("a graph of device {} on a stream of device {}", graph.device, stream.device);
            return fail(INVALID_HANDLE, message);
        }
        stream.submit(Work::of_kernels(move |edge| executable.run(edge)))
    }

    /// How many pieces of work there are; they cannot be looked at.
    fn cuGraphGetNodes(graph: Handle, nodes: Out<Handle>, count: Out<usize>) {
        let graph = GRAPHS.get(graph)?;
        if !nodes.is_null() {
            return fail(INVALID_VALUE, "only the number of nodes is known");
        }
        count.set(graph.work.len())
    }

    /// Forgets a graph.
    fn cuGraphDestroy(graph: Handle) {
        GRAPHS.remove(graph).map(drop)
    }

    /// Forgets a graph.
    fn cuGraphExecDestroy(executable: Handle) {
        EXECUTABLE.remove(executable).map(drop)
    }
}
