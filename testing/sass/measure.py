"""What is known of a kernel from its code alone, and what is wrong with it whatever its budget."""
import re
from dataclasses import dataclass, field

import h200
import order
import whole
from gemv import Gemv
from machine_code import ALU
from order import ATTENTION_ON_TENSOR_CORES

# A lane's share of the 16x16 weights of one HMMA.
WEIGHTS_PER_HMMA = 16 * 16 // 32

# With more in a row, each HMMA waits for the one before, and a multiprocessor's warps are too few to fill the time.
GOAL_OF_HMMA_CHAIN = 12

COPY_BYTES = 16

# So that a kernel that starts early finds room beside the one ahead.
BLOCKS_OF_MULTIPROCESSOR = 2
TILES = r"tiles_.*_c\d+"
# Of products of many rows of x a block has all registers.
STAYS_ALONE = r"tiles_.*_c128|delta_net(_d128)?"
CODES = r"attend_(k\d|prompt_codes)_"


@dataclass
class HotLoop:
    """Of a GEMV: of a usual trip."""

    instructions: int
    weights: float  # of a lane, in a trip
    load_bytes: list
    hmma: int
    issue: float  # share of an H200's issue slots at its memory bandwidth
    alu: float  # the same of the pipe for integers and logic
    kilobytes_in_flight: int  # loads of a trip, of all blocks on a multiprocessor

    @property
    def per_weight(self):
        return self.instructions / self.weights

    def __str__(self):
        return (f"{self.instructions:5d} {self.weights:7.0f} {self.per_weight:7.2f} {self.issue:6.0%} {self.alu:5.0%}"
                f" {len(self.load_bytes):3d} x {min(self.load_bytes):2d} {self.kilobytes_in_flight:4d} KB {self.hmma:5d}")


@dataclass
class Measured:
    registers: int
    hot_loop: HotLoop = None
    hmma_chain: int = None
    instructions_per_hmma: float = None
    of_rows: dict = field(default_factory=dict)  # rows of x: instructions per weight, on CUDA cores
    wholes: dict = field(default_factory=dict)  # N x K: whole.Whole

    def budget(self):
        values = {"registers": self.registers}
        if self.hot_loop:
            per_weight = round(self.hot_loop.per_weight, 3)
            values |= {"instructions_per_weight": per_weight, "load_bytes": min(self.hot_loop.load_bytes)}
        if self.instructions_per_hmma is not None:
            values["instructions_per_hmma"] = round(self.instructions_per_hmma, 2)
        if self.hmma_chain is not None:
            values["hmma_chain"] = self.hmma_chain
        if self.of_rows:
            values["of_rows"] = {rows: round(per_weight, 3) for rows, per_weight in self.of_rows.items()}
        if self.wholes:
            values["whole"] = {shape: round(launch.per_weight, 3) for shape, launch in self.wholes.items()}
        return values

    def __str__(self):
        if self.hot_loop:
            return f"{self.hot_loop} {self.hmma_chain:5d}"
        if self.instructions_per_hmma is not None:
            return f"{self.instructions_per_hmma:.2f} instructions for each HMMA, of which {self.hmma_chain} in a row"
        if self.of_rows:
            figures = ", ".join(f"{per_weight:.2f}" for per_weight in self.of_rows.values())
            return f"{figures} instructions per weight of {', '.join(self.of_rows)} rows of x"
        return ""


def measure(kernel, launches):
    """(Measured, complaints that need no budget). `launches` is what launches.json says."""
    early = launches["starts_early"].get(kernel.name)
    measured = Measured(kernel.registers)
    threads = launches["threads"].get(kernel.name, h200.THREADS)
    blocks = 1 if re.fullmatch(STAYS_ALONE, kernel.name) else BLOCKS_OF_MULTIPROCESSOR
    complaints = memory_complaints(kernel) + room_complaints(kernel, early or 0, threads, blocks)
    if early is not None:
        complaints += order.complaints(kernel)
    if re.fullmatch(ATTENTION_ON_TENSOR_CORES, kernel.name) or kernel.name.startswith("attend_prompt_"):
        loop = kernel.loop_of_tiles()
        if not loop:
            return measured, complaints + ["no loop that copies keys and multiplies them on tensor cores"]
        measured.hmma_chain = loop.hmma_chain
        measured.instructions_per_hmma = len(loop.body) / loop.count("HMMA")
        # Codes of four bits, scales and biases are few bytes for each lane.
        return measured, complaints + ([] if re.match(CODES, kernel.name) else copy_complaints(kernel))
    if simt := re.fullmatch(SIMT, kernel.name):
        measured.of_rows = of_rows(kernel.loops_of_fma(), simt[1])
        found = [] if measured.of_rows else [f"not {len(ROWS_OF_SIMT)} loops that load weights and multiply them"]
        return measured, complaints + found
    gemv, tiles = Gemv.from_name(kernel.name), re.fullmatch(TILES, kernel.name)
    if not gemv and kernel.name.startswith("gemv_"):
        return measured, complaints + ["a format that gemv.py does not list: its instructions would not be counted"]
    if not gemv and not tiles:
        return measured, complaints
    loop = kernel.loop_of_tiles() if tiles else kernel.hot_loop()
    if not loop:
        return measured, complaints + ["no loop that loads weights and multiplies them on tensor cores"]
    measured.hmma_chain = loop.hmma_chain
    if tiles:
        measured.instructions_per_hmma = instructions_per_hmma(kernel.name, loop)
        widest = max(copy.load_bytes for copy in loop.body if copy.name == "LDGSTS")
        # Narrow ones are of sums of x, and of weights that are not aligned.
        return measured, complaints + ([] if widest == COPY_BYTES else [f"copies of {widest} bytes at most, not {COPY_BYTES}"])
    measured.hot_loop = hot_loop(kernel, loop, gemv)
    complaints += hot_loop_complaints(measured.hot_loop, loop, gemv)
    mine = [launch for launch in launches["gemv"] if launch["kernel"] == kernel.name]
    try:
        regions = whole.Regions.of(kernel, gemv) if mine else None
        measured.wholes = {f"{launch['n']}x{launch['k']}": whole.whole(regions, gemv, launch) for launch in mine}
    except whole.NotCounted as why:
        complaints.append(f"instructions of the whole kernel: {why}")
    return measured, complaints


# HMMA of a step of the tile kernels, by how many columns they take; formats of a table have two halves for each weight.
HMMA_OF_STEP = {"c32": 32, "c128": 128}
FORMATS_OF_TWO_HALVES = ("nf4", "fp4")


def instructions_per_hmma(name, loop):
    """Of a step of the tile kernels, whose passes may be trips of a loop within it."""
    _, format_, *_, columns = name.split("_")
    hmma = HMMA_OF_STEP[columns] * (2 if format_ in FORMATS_OF_TWO_HALVES else 1)
    passes = [inner for inner in loop.inner_loops if inner.count("HMMA")]
    more_trips = hmma // loop.count("HMMA") - 1
    return (len(loop.body) + more_trips * sum(len(inner.body) for inner in passes)) / hmma


# The matmuls in f32 have a loop for each of these rows of x. A lane has two rows of the weight, of each 32 weights at a time,
# of the other formats 16: `LANE_WEIGHTS` of cuda/formats/codes.cuh.
SIMT = r"simt_(\w+?)(_experts)?"
ROWS_OF_SIMT = ("1", "2", "4")
SIXTEEN_OF_A_LANE = ("nvfp4", "q2_k", "q6_k")


def of_rows(loops, format_):
    """{rows of x: instructions per weight}, empty if there are other loops than those."""
    weights = 2 * (16 if format_ in SIXTEEN_OF_A_LANE else 32)
    if len(loops) != len(ROWS_OF_SIMT):
        return {}
    return {rows: len(loop.body) / weights for rows, loop in zip(ROWS_OF_SIMT, loops)}


def memory_complaints(kernel):
    complaints = []
    local = kernel.count("LDL", "STL")
    if local or kernel.local or kernel.stack:
        complaints.append(f"local memory: {local} loads and stores, {kernel.local + kernel.stack} bytes")
    # Static shared memory is not in what a launch asks for, but in what the driver gives at most.
    static = kernel.shared - h200.RESERVED_SHARED_BYTES if kernel.shared else 0
    if static:
        complaints.append(f"{static} bytes of static shared memory, not 0")
    return complaints


def room_complaints(kernel, shared_bytes, threads, blocks):
    """Of a kernel of which so many blocks shall fit a multiprocessor, which have so many threads, and ask for so much shared memory
    at most."""
    complaints, do_not_fit = [], "no two blocks fit" if blocks == 2 else "no block fits"
    if h200.blocks_by_registers(kernel.registers, threads) < blocks:
        complaints.append(f"{kernel.registers} registers: {do_not_fit} a multiprocessor")
    if h200.blocks_by_shared_memory(shared_bytes) < blocks:
        complaints.append(f"{shared_bytes} bytes of shared memory: {do_not_fit} a multiprocessor")
    return complaints


def copy_complaints(kernel):
    copies = [copy.load_bytes for copy in kernel.instructions if copy.name == "LDGSTS"]
    if not copies:
        return ["nothing is copied to shared memory (no LDGSTS)"]
    return [f"copies of {min(copies)} bytes, not {COPY_BYTES}"] if min(copies) < COPY_BYTES else []


def hot_loop(kernel, loop, gemv):
    loads, usual = [load.load_bytes for load in loop.weight_loads], loop.usual
    weights = sum(loads) * 8 / gemv.bits
    # For the weights of a trip of one lane: what a multiprocessor reads meanwhile is its share of the bandwidth.
    seconds = h200.seconds_to_read(weights * gemv.bytes_per_weight) * h200.MULTIPROCESSORS
    return HotLoop(
        instructions=len(usual),
        weights=weights,
        load_bytes=loads,
        hmma=loop.count("HMMA"),
        issue=h200.seconds_to_issue(len(usual), h200.ISSUE) / seconds,
        alu=h200.seconds_to_issue(sum(i.name in ALU for i in usual), h200.ISSUE_ALU) / seconds,
        kilobytes_in_flight=sum(loads) * h200.THREADS * h200.blocks_by_registers(kernel.registers) // 1024,
    )


def hot_loop_complaints(measured, loop, gemv):
    complaints = []
    if loop.inner_loops:
        complaints.append("a loop inside the hot loop is not unrolled")
    if measured.hmma * WEIGHTS_PER_HMMA < measured.weights:
        complaints.append(f"{measured.hmma} HMMA cannot multiply the {measured.weights:.0f} weights that the hot loop loads")
    if min(measured.load_bytes) < gemv.least_load_bytes:
        complaints.append(f"loads of {min(measured.load_bytes)} bytes in the hot loop, not {gemv.least_load_bytes}")
    return complaints
