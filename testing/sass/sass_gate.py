"""Checks the machine code of the CUDA kernels against committed budgets; needs no GPU.

    python3 testing/sass/sass_gate.py                    compile cuda/*.cu for sm_90 and check
    python3 testing/sass/sass_gate.py --archs all        also: every architecture that is supported compiles
    python3 testing/sass/sass_gate.py --update           make the measured figures the budgets, and print what changed
    python3 testing/sass/sass_gate.py --cubin FILE ..    check these instead of compiling
    python3 testing/sass/sass_gate.py --explain a4_g64_m1    the opcodes of one hot loop

Every kernel: no local memory, no spills, no more registers than its budget. Every tensor-core GEMV also: its hot loop
loads weights 16 bytes at a time, multiplies them with HMMA, and takes no more instructions per weight than its budget
(a regression) and its goal (what the design needs to reach the memory bandwidth of an H200). Every tile kernel: no more
instructions per HMMA than its budget.
"""
import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gemv import Gemv
from machine_code import ALU, parse
from toolkit import Toolkit, ToolError

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent.parent / "cuda"
BUDGETS = HERE / "budgets.json"
CHECKED_ARCH = "90"
ARCHS = ["75", "80", "86", "89", "90", "100", "120"]

# The same compiler gives the same code; another patch level may differ by an instruction or two.
TOLERANCE = 1.01

# What an H200 has to keep up with: bytes a second, multiprocessors, clock; and the lane-instructions that a
# multiprocessor issues per clock, in all and to the pipe for integers and logic.
READ_BANDWIDTH, MULTIPROCESSORS, CLOCK, ISSUE, ISSUE_ALU = 4.3e12, 132, 1.98e9, 128, 64

# What a multiprocessor has for the blocks of a GEMV, and the threads of such a block.
REGISTERS, REGISTER_UNIT, THREADS = 65536, 8, 256

# A lane's share of the 16x16 weights of one HMMA.
WEIGHTS_PER_HMMA = 16 * 16 // 32


@dataclass
class Measured:
    """What is known of one kernel from its code."""

    registers: int
    instructions_per_weight: float = None
    load_bytes: int = None
    instructions_per_hmma: float = None
    summary: str = ""

    def budget(self):
        values = {"registers": self.registers}
        if self.instructions_per_weight is not None:
            values |= {"instructions_per_weight": round(self.instructions_per_weight, 3), "load_bytes": self.load_bytes}
        if self.instructions_per_hmma is not None:
            values["instructions_per_hmma"] = round(self.instructions_per_hmma, 2)
        return values


def measure(kernel):
    """(Measured, complaints that need no budget)."""
    measured, complaints = Measured(kernel.registers), []
    local = kernel.count("LDL", "STL")
    if local or kernel.local or kernel.stack:
        complaints.append(f"local memory: {local} loads and stores, {kernel.local + kernel.stack} bytes")
    gemv, tiles = Gemv.from_name(kernel.name), kernel.name.startswith("tiles_")
    if not gemv and not tiles:
        return measured, complaints
    loop = kernel.hot_loop()
    if not loop:
        return measured, complaints + ["no loop that loads weights and multiplies them on tensor cores"]
    hmma = loop.count("HMMA")
    if tiles:
        measured.instructions_per_hmma = len(loop.body) / hmma
        measured.summary = f"{len(loop.body):5d} {hmma:5d} HMMA, {measured.instructions_per_hmma:.2f} instructions for each"
        return measured, complaints
    if loop.inner_loops:
        complaints.append("a loop inside the hot loop is not unrolled")
    loads = [load.load_bytes for load in loop.weight_loads]
    weights = sum(loads) * 8 / gemv.bits
    if hmma * WEIGHTS_PER_HMMA < weights:
        complaints.append(f"{hmma} HMMA cannot multiply the {weights:.0f} weights that the hot loop loads")
    measured.load_bytes = min(loads)
    if measured.load_bytes < gemv.least_load_bytes:
        complaints.append(f"loads of {measured.load_bytes} bytes in the hot loop, not {gemv.least_load_bytes}")
    measured.instructions_per_weight = len(loop.body) / weights
    weights_per_clock = READ_BANDWIDTH / gemv.bytes_per_weight / MULTIPROCESSORS / CLOCK
    issue = measured.instructions_per_weight * weights_per_clock / ISSUE
    alu = loop.count(*ALU) / weights * weights_per_clock / ISSUE_ALU
    blocks = REGISTERS // (THREADS * -(-kernel.registers // REGISTER_UNIT) * REGISTER_UNIT)
    in_flight = sum(loads) * THREADS * blocks // 1024
    measured.summary = (f"{len(loop.body):5d} {weights:7.0f} {measured.instructions_per_weight:7.2f} {issue:6.0%} {alu:5.0%}"
                        f" {len(loads):3d} x {min(loads):2d} {in_flight:4d} KB {hmma:5d}")
    return measured, complaints


def compare(name, measured, budgets):
    """Complaints about what exceeds its budget or goal."""
    budget, goal = budgets["kernels"].get(name), budgets["goals"].get(name)
    complaints = []
    ceiling = budgets["most_registers"]
    if measured.registers > ceiling:
        complaints.append(f"{measured.registers} registers, of which two blocks a multiprocessor leave {ceiling}")
    per_weight = measured.instructions_per_weight
    if goal and (per_weight is None or per_weight > goal):
        complaints.append(f"{per_weight or 0:.2f} instructions per weight, more than the goal of {goal}")
    if not budget:
        return complaints + ["no budget: run with --update, and commit"]
    if measured.registers > budget["registers"]:
        complaints.append(f"{measured.registers} registers, budget {budget['registers']}")
    if "instructions_per_weight" in budget:
        if per_weight is None or per_weight > budget["instructions_per_weight"] * TOLERANCE:
            complaints.append(f"{per_weight or 0:.3f} instructions per weight, budget {budget['instructions_per_weight']}")
        if (measured.load_bytes or 0) < budget["load_bytes"]:
            complaints.append(f"loads of {measured.load_bytes} bytes, budget {budget['load_bytes']}")
    if "instructions_per_hmma" in budget:
        per_hmma = measured.instructions_per_hmma
        if per_hmma is None or per_hmma > budget["instructions_per_hmma"] * TOLERANCE:
            complaints.append(f"{per_hmma or 0:.2f} instructions per HMMA, budget {budget['instructions_per_hmma']}")
    return complaints


def compile_all(toolkit, archs, folder, jobs):
    """Compiles every source for every architecture; the cubins of the architecture that is checked."""
    sources = sorted(SOURCES.glob("*.cu"))
    if not sources:
        raise ToolError(f"no .cu file in {SOURCES}")
    # The architecture that is checked comes first.
    pairs = [(arch, source) for arch in sorted(archs, key=lambda arch: arch != CHECKED_ARCH) for source in sources]
    taken = {}

    def compile_one(pair):
        arch, source = pair
        start = time.monotonic()
        cubin = toolkit.compile(source, arch, Path(folder, f"{source.stem}.sm_{arch}.cubin"))
        taken[pair] = time.monotonic() - start
        return cubin

    start = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:
        cubins = list(pool.map(compile_one, pairs))
    for arch in archs:
        seconds = sum(time for (of, _), time in taken.items() if of == arch)
        print(f"sm_{arch}: {len(sources)} sources, {seconds:.0f} s")
    print(f"compiled in {time.monotonic() - start:.0f} s with {jobs} at a time")
    return [cubin for (arch, _), cubin in zip(pairs, cubins) if arch == CHECKED_ARCH]


def read_kernels(toolkit, cubins):
    kernels = {}
    for cubin in cubins:
        kernels |= parse(toolkit.disassembly(cubin), toolkit.resource_usage(cubin))
    if not kernels:
        raise ToolError("no kernels in " + ", ".join(map(str, cubins)))
    return kernels


def write_budgets(budgets):
    """One line for each kernel and goal."""
    def lines(section):
        return ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(section.items()))
    text = (f'{{\n  "nvcc": {json.dumps(budgets["nvcc"])},\n  "most_registers": {budgets["most_registers"]},\n'
            f'  "goals": {{\n{lines(budgets["goals"])}\n  }},\n  "kernels": {{\n{lines(budgets["kernels"])}\n  }}\n}}\n')
    BUDGETS.write_text(text)


def update(budgets, measured, version):
    """Makes the measured figures the budgets; prints what changed."""
    new = {name: figures.budget() for name, figures in measured.items()}
    old = budgets["kernels"]
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            print(f"{name}: {old.get(name, 'new')} -> {new.get(name, 'gone')}")
    write_budgets(budgets | {"nvcc": version, "kernels": new})


def check(kernels, budgets, whole):
    """Prints the table; returns what was measured, and {kernel: complaints}."""
    measured, failures = {}, {}
    print("hot loop: instructions, weights of a lane, instructions per weight, share of an H200's issue slots and of its\n"
          "integer pipe that they take at its memory bandwidth, loads of weights x bytes of a trip, as much of all\n"
          "blocks that fit on a multiprocessor (23 KB in flight are needed), HMMA")
    print(f"{'kernel':26s} regs  loop weights /weight  issue   ALU    loads in flight  HMMA")
    for name, kernel in sorted(kernels.items()):
        measured[name], complaints = measure(kernel)
        complaints += compare(name, measured[name], budgets)
        print(f"{name:26s} {kernel.registers:4d} {measured[name].summary}")
        if complaints:
            failures[name] = complaints
    if whole:
        gone = (budgets["kernels"].keys() | budgets["goals"].keys()) - kernels.keys()
        failures |= {name: ["has a budget or a goal but does not exist"] for name in sorted(gone)}
    return measured, failures


def explain(kernels, name):
    loop = (kernels.get(name) or kernels[f"gemv_{name}"]).hot_loop()
    print(f"{loop.kernel.name}: {len(loop.body)} instructions from {loop.first:#x} to {loop.last:#x}")
    print(", ".join(f"{opcode} {count}" for opcode, count in loop.histogram()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", default=CHECKED_ARCH, help="compile for these (75;90), or all; sm_90 is checked")
    parser.add_argument("--cubin", nargs="+", type=Path, help="check these, instead of compiling")
    parser.add_argument("--update", action="store_true", help="write budgets.json")
    parser.add_argument("--explain", metavar="KERNEL", help="print the opcodes of this kernel's hot loop")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    budgets = json.loads(BUDGETS.read_text())
    try:
        toolkit = Toolkit()
        version = toolkit.version()
        if version != budgets["nvcc"]:
            print(f"nvcc {version}: the budgets are those of {budgets['nvcc']}")
        with tempfile.TemporaryDirectory() as folder:
            archs = ARCHS if arguments.archs == "all" else arguments.archs.split(";")
            cubins = arguments.cubin or compile_all(toolkit, sorted({*archs, CHECKED_ARCH}, key=int), folder, arguments.jobs)
            kernels = read_kernels(toolkit, cubins)
    except ToolError as error:
        sys.exit(f"sass gate: {error}")
    if arguments.explain:
        explain(kernels, arguments.explain)
        return
    measured, failures = check(kernels, budgets, whole=not arguments.cubin)
    if arguments.update:
        update(budgets, measured, version)
        _, failures = check(kernels, json.loads(BUDGETS.read_text()), whole=not arguments.cubin)
    for name, complaints in failures.items():
        for complaint in complaints:
            print(f"FAIL {name}: {complaint}")
    print(f"{len(kernels)} kernels, {len(failures)} over budget" if failures else f"{len(kernels)} kernels, all within budget")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
