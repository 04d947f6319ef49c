//! Graphs: captured work, to be done again.

use std::ffi::c_ulonglong;
use std::sync::Arc;

use crate::argument::Out;
use crate::driver;
use crate::handles::{Handle, Handles};
use crate::status::{fail, INVALID_HANDLE, INVALID_VALUE};
use crate::stream::{self, Work};

/// Work in the order in which it was submitted.
#[derive(Clone)]
pub struct Graph {
    /// Its device.
    pub device: usize,
    /// What to do.
    pub work: Vec<Work>,
}

/// Graphs as captured.
pub static GRAPHS: Handles<Graph> = Handles::new("graph");
static EXECUTABLE: Handles<Graph> = Handles::new("executable graph");

/// Free memory at launch, upload, use node priorities: no difference here.
const HARMLESS_FLAGS: c_ulonglong = 1 | 2 | 8;

driver! {
    /// Makes a graph that can be launched.
    fn cuGraphInstantiateWithFlags(executable: Out<Handle>, graph: Handle, flags: c_ulonglong) {
        let graph = GRAPHS.get(graph)?;
        if flags & !HARMLESS_FLAGS != 0 {
            return fail(INVALID_VALUE, format!("flags of a graph: {flags}"));
        }
        executable.set(EXECUTABLE.insert(Graph::clone(&graph)))
    }

    /// Nothing to upload.
    fn cuGraphUpload(executable: Handle, stream: Handle) {
        EXECUTABLE.get(executable)?;
        stream::find(stream).map(drop)
    }

    /// Does the work again.
    fn cuGraphLaunch(executable: Handle, stream: Handle) {
        let (graph, stream) = (EXECUTABLE.get(executable)?, stream::find(stream)?);
        if graph.device != stream.device {
            let message = format!("a graph of device {} on a stream of device {}", graph.device, stream.device);
            return fail(INVALID_HANDLE, message);
        }
        stream.submit(Arc::new(move || graph.work.iter().try_for_each(|work| work())))
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
