"""Kernels that start before the one ahead of them has finished: what they do before they wait for it.

`griddepcontrol.wait` is ACQBULK, `griddepcontrol.launch_dependents` is PREEXIT. One warp waits; the others are held by
the barrier behind.
"""
import re

from flow import Flow

LEAST_SHARE_OF_LOADS = 0.9
LEAST_BYTES_OF_RING = 40  # of a lane: those of the smallest ring, with eight rows of x
ATTENTION_ON_TENSOR_CORES = r"attend_(b?f16|k\d_v\d)_d\d+"
GLOBAL_WRITES = ("ST", "STG", "RED", "REDG", "ATOM", "ATOMG")


def before_the_wait(flow):
    """What a warp may execute before it has passed a wait."""
    barriers = {min((n for n in flow.numbers("BAR") if n > wait), default=wait) for wait in flow.numbers("ACQBULK")}
    return flow.reached_from(0, stops=barriers) & flow.reaching(barriers)


def complaints(kernel):
    flow = Flow(kernel)
    if not flow.numbers("ACQBULK"):
        return ["starts early and does not wait for the kernel ahead of it (no ACQBULK)"]
    before = before_the_wait(flow)
    found = [f"{kernel.instructions[n].opcode} before the wait for the kernel ahead" for n in sorted(before)
             if kernel.instructions[n].name in (*GLOBAL_WRITES, "PREEXIT")]
    if re.fullmatch(ATTENTION_ON_TENSOR_CORES, kernel.name):
        loop = kernel.loop_of_tiles()
        of_tile = loop.count("LDGSTS") if loop else 0
        early = sum(kernel.instructions[n].name == "LDGSTS" for n in before & flow.reaching(flow.numbers("ACQBULK")))
        if early < LEAST_SHARE_OF_LOADS * of_tile:
            found.append(f"{early} of the {of_tile} copies of a tile precede the wait for the kernel ahead")
        return found
    if not re.match(r"(gemv|simt|dense)_(?!.*_experts)", kernel.name):  # the ids of experts have to be awaited
        return found
    early = [kernel.instructions[n] for n in before & flow.reaching(flow.numbers("ACQBULK")) if kernel.instructions[n].loads_weights]
    if kernel.name.startswith("gemv_"):
        loop = kernel.hot_loop()
        of_batch = sum(load.load_bytes for load in loop.weight_loads) if loop else 0
        copied = sum(load.load_bytes for load in early)
        if copied < min(of_batch, LEAST_BYTES_OF_RING):
            found.append(f"{copied} bytes of the first weights of a lane are copied before the wait for the kernel ahead")
        return found
    # The matmuls in f32 wait in their loops.
    batch = len([load for load in kernel.instructions if load.loads_weights])
    if len(early) < LEAST_SHARE_OF_LOADS * batch:
        found.append(f"{len(early)} of the {batch} loads of the first weights precede the wait for the kernel ahead")
    return found
