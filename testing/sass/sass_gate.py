"""Checks the machine code of the CUDA kernels against committed budgets; needs no GPU.

    python3 testing/sass/sass_gate.py                    compile cuda/*.cu for sm_90 and check
    python3 testing/sass/sass_gate.py --archs all        also: every architecture that is supported compiles
    python3 testing/sass/sass_gate.py --update           make the measured figures the budgets and the tables of
                                                         docs/tuning.md, and print what changed
    python3 testing/sass/sass_gate.py --cubin FILE ..    check these instead of compiling
    python3 testing/sass/sass_gate.py --explain a4_g64_m1    the opcodes of one hot loop

Every kernel: no local memory, no static shared memory, no spills, no more registers than its budget; two blocks fit a
multiprocessor, of products of many rows of x and of linear attention one. Every kernel that starts before the one ahead of it has finished: it waits, writes nothing before, lets
the next one start only after, and where no ids have to be awaited its first weights are loaded before. Every tensor-core
GEMV also: its hot loop loads weights 16 bytes at a time, multiplies them with HMMA, and takes no more instructions per
weight than its budget (a regression) and its goal (what the design needs to reach the memory bandwidth of an H200);
nor does the whole kernel at the shapes of launches.json. Every product on CUDA cores: no more instructions per weight than its
budget for that many rows of x. Every tile kernel: weights and x are copied 16 bytes at a time, no
more instructions per HMMA than its budget; so are keys and values of attention, those of the first tiles before the wait if there
is but one new token. Of all these: no more HMMA in a row than its budget.
"""
import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tables
from machine_code import parse
from measure import GOAL_OF_HMMA_CHAIN, measure
from toolkit import Toolkit, ToolError

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parent.parent / "cuda"
BUDGETS = HERE / "budgets.json"
# What the crate launches; a test of src/backend/cuda/kernel.rs writes it.
LAUNCHES = HERE.parent.parent / "src" / "backend" / "cuda" / "launches.json"
CHECKED_ARCH = "90"
ARCHS = ["75", "80", "86", "89", "90", "100", "120"]

# The same compiler gives the same code; another patch level may differ by an instruction or two.
TOLERANCE = 1.01


def compare(name, measured, budgets):
    """Complaints about what exceeds its budget or goal."""
    budget, goal = budgets["kernels"].get(name), budgets["goals"].get(name)
    per_weight = measured.hot_loop.per_weight if measured.hot_loop else None
    complaints = []
    if goal and (per_weight is None or per_weight > goal):
        complaints.append(f"{per_weight or 0:.2f} instructions per weight, more than the goal of {goal}")
    if not budget:
        return complaints + ["no budget: run with --update, and commit"]
    wholes, of_rows = {shape: whole.per_weight for shape, whole in measured.wholes.items()}, budget.get("of_rows", {})
    figures = [
        ("registers", measured.registers, budget["registers"], 1),
        ("instructions per weight", per_weight, budget.get("instructions_per_weight"), TOLERANCE),
        ("instructions per HMMA", measured.instructions_per_hmma, budget.get("instructions_per_hmma"), TOLERANCE),
        ("HMMA in a row", measured.hmma_chain, budget.get("hmma_chain"), 1),
        *((f"instructions per weight of {rows} rows of x", measured.of_rows.get(rows), of_rows.get(rows), TOLERANCE)
          for rows in sorted(measured.of_rows.keys() | of_rows.keys())),
        *((f"instructions per weight of the whole kernel at {shape}", wholes.get(shape), budget.get("whole", {}).get(shape),
           TOLERANCE) for shape in sorted(wholes.keys() | budget.get("whole", {}).keys())),
    ]
    for what, figure, most, tolerance in figures:
        if (figure is None) != (most is None) or most is not None and figure > most * tolerance:
            complaints.append(f"{'no' if figure is None else f'{figure:.5g}'} {what}, budget {most}")
    if "load_bytes" in budget:
        loads = min(measured.hot_loop.load_bytes) if measured.hot_loop else 0
        if loads < budget["load_bytes"]:
            complaints.append(f"loads of {loads} bytes, budget {budget['load_bytes']}")
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
    text = (f'{{\n  "nvcc": {json.dumps(budgets["nvcc"])},\n'
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


def check(kernels, budgets, launches, whole):
    """Prints what was measured; returns it, and {kernel: complaints}."""
    measured, failures = {}, {}
    print("hot loop: instructions, weights of a lane, instructions per weight, share of an H200's issue slots and of its\n"
          "integer pipe that they take at its memory bandwidth, loads of weights x bytes of a trip, as much of all\n"
          "blocks that fit on a multiprocessor (23 KB in flight are needed), HMMA, the most of them in a row")
    print(f"{'kernel':26s} regs  loop weights /weight  issue   ALU    loads in flight  HMMA chain")
    for name, kernel in sorted(kernels.items()):
        measured[name], complaints = measure(kernel, launches)
        complaints += compare(name, measured[name], budgets)
        print(f"{name:26s} {kernel.registers:4d} {measured[name]}")
        if complaints:
            failures[name] = complaints
    print("\nwhole kernel: instructions per weight, limit at the memory bandwidth, issue slots of the busiest multiprocessor")
    for name, figures in measured.items():
        for shape, launch in figures.wholes.items():
            print(f"{name:26s} {shape:>12s} {launch.per_weight:7.2f} {launch.limit:7.2f} {launch.busiest:6.0%}")
    chains = [figures.hmma_chain for figures in measured.values() if figures.hmma_chain]
    print(f"\n{sum(chain > GOAL_OF_HMMA_CHAIN for chain in chains)} of {len(chains)} kernels have more HMMA in a row than the"
          f" goal of {GOAL_OF_HMMA_CHAIN}")
    if whole:
        gone = (budgets["kernels"].keys() | budgets["goals"].keys() | launches["starts_early"].keys()) - kernels.keys()
        failures |= {name: ["has a budget, a goal or a launch but does not exist"] for name in sorted(gone)}
    return measured, failures


def check_document(measured, version, write):
    """Complaints if the tables of the document are not these; or writes them."""
    document = tables.DOCUMENT.read_text()
    right = tables.inserted(document, tables.tables(measured, version))
    if write:
        tables.DOCUMENT.write_text(right)
    elif document != right:
        return {tables.DOCUMENT.name: ["its tables are not those of the machine code: run with --update, and commit"]}
    return {}


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
    budgets, launches = json.loads(BUDGETS.read_text()), json.loads(LAUNCHES.read_text())
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
    whole = not arguments.cubin
    measured, failures = check(kernels, budgets, launches, whole)
    if arguments.update:
        update(budgets, measured, version)
        _, failures = check(kernels, json.loads(BUDGETS.read_text()), launches, whole)
    # Another compiler gives other figures.
    if whole and (arguments.update or version == budgets["nvcc"]):
        failures |= check_document(measured, version, arguments.update)
    for name, complaints in failures.items():
        for complaint in complaints:
            print(f"FAIL {name}: {complaint}")
    print(f"{len(kernels)} kernels, {len(failures)} over budget" if failures else f"{len(kernels)} kernels, all within budget")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
