"""The part of scripts/gpu.sh that runs on the GPU machine.

Every step has a time limit of its own, a share of what is left, and writes as it goes, so that whatever stops one of
them costs no other. $OUT/steps.json says what became of each; the exit status is 0 only if every required one succeeded.
"""
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benches"))
import steps  # noqa: E402

OUT = Path(os.environ.get("OUT") or "gpu-results").absolute()
END = float(os.environ.get("END") or 560)
ONLY = [word for word in (os.environ.get("ONLY") or "").split(",") if word]  # parts of the names of steps; tests are always run
NEEDED = ("what is here", "unpack", "compile", "report")
LEAST = 5.0  # seconds of a step, if so much is left
CARRY = ROOT / "carry"
# Programs of carry/ that steps name.
CORE_TESTS, KERNELS_BENCH, STEPS_BENCH = "test-candle-quant-cuda", "bench-candle-quant-kernels", "bench-candle-quant-decode_steps"
# A few kernels of each kind: the sanitizer makes everything a hundred times slower.
SANITIZED = ["k_that_is_split", "gated_products", "awkward_shapes", "weights_at_an_offset"]
PROBES = {"issue_rates": 8, "launches": 8, "bandwidth": 20, "splits": 8, "strides": 8}  # and their shares of the time
FACTS = "name,driver_version,compute_cap,clocks.max.sm,clocks.max.mem,power.limit,memory.total"
CLOCKS = "timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu"
PROFILED = [word for section in ("SpeedOfLight", "MemoryWorkloadAnalysis", "WarpStateStats", "LaunchStats") for word in ("--section", section)]
# Of the launches of a decode step.
TIMED = "gpu__time_duration.sum,dram__bytes_read.sum,sm__inst_executed.sum,smsp__cycles_active.avg,sm__warps_active.avg.pct_of_peak_sustained_active"
LAUNCHED = "regex:^(gemv|attend|norm_rows|elementwise|sample|dequantize)"


@dataclass
class Step:
    name: str
    weight: float  # its share of the time that is left
    commands: Callable  # one after the other; given the seconds that they have
    required: bool = True
    count: Optional[Callable] = None  # of steps.py: reads the result
    result: str = "log.txt"  # where the output goes
    written: Optional[str] = None  # the result, where the program writes it itself
    tool: Optional[str] = None  # does not work on every machine; without it the step is not run

    def outcome(self):
        return {"name": self.name, "required": self.required, "rc": None, "seconds": 0.0, "limit": 0.0, "fault": None}


def plan(programs, work, arch):
    """All steps after the first."""
    tools = work / "tools"
    always = lambda *command: lambda seconds: [command]
    # A program that is given its time needs some of it to end.
    timed = lambda *command: lambda seconds: [[*command, "--seconds", max(1, int(seconds * 0.9))]]
    tests = [program for program in programs if program.startswith("test-")]
    probe = {"count": steps.count_records, "result": "probe.jsonl"}
    sanitizer = ["compute-sanitizer", "--error-exitcode", 9, "--tool"]
    sanitized = [work / CORE_TESTS, "--test-threads", 1, *SANITIZED]
    ncu = ["ncu", "--clock-control", "none", "--kernel-name"]
    profiled = [*ncu, "regex:gemv", "--launch-count", 5, *PROFILED, work / KERNELS_BENCH, "--only", "affine 4-bit g64",
                "--shapes", "4096x14336", "--rows", 1, "--replays", 1, "--out", work / "profiled"]
    # Three steps of two layers, and the last of them in full.
    two_layers = [work / STEPS_BENCH, "--only", "Llama-3-8B affine", "--layers", 2, "--contexts", 4096, "--rounds", 1, "--steps", 3]
    by_launch = [["env", "CANDLE_QUANT_GRAPH=eager", *ncu, LAUNCHED, *what, *two_layers]
                 for what in (("--metrics", TIMED, "--csv", "--launch-count", 60), ("--launch-skip", 14, "--launch-count", 14, *PROFILED))]
    wanted = lambda step: not ONLY or step.name in NEEDED or step.name in tests or any(word in step.name for word in ONLY)
    return [step for step in [
        Step("what is here", 20, lambda seconds: [
            ["cat", CARRY / "commit"],
            ["nvidia-smi", f"--query-gpu={FACTS}", "--format=csv"],
            [os.environ.get("NVCC") or "nvcc", "--version"],
            [sys.executable, "-c", "import torch, triton; print('torch', torch.__version__, 'triton', triton.__version__)"],
        ], required=False),
        Step("unpack", 20, always(sys.executable, ROOT / "scripts/gpu/unpack.py", work, *programs)),
        Step("compile", 60, always("scripts/gpu/compile.sh", tools, arch)),
        Step("wrappers against their branches for the host", 20, always(tools / "wrappers/wrappers"),
             count=steps.count_records, result="probe.jsonl"),
        Step("the same, as an older card has them", 20, always(tools / "wrappers-75/wrappers", "wrapper of sm_75"),
             count=steps.count_records, result="probe.jsonl"),
        *(Step(program, 100 if program == CORE_TESTS else 50, always(work / program), count=steps.count_tests, result="tests.txt") for program in tests),
        *(Step(f"compute-sanitizer {tool}", weight, always(*sanitizer, tool, *sanitized), count=steps.count_tests, result="tests.txt",
               tool="compute-sanitizer") for tool, weight in (("memcheck", 20), ("racecheck", 70))),
        *(Step(f"probe: {name}", weight, always(tools / name), **probe) for name, weight in PROBES.items()),
        Step("decode steps", 120, lambda seconds: [
            ["env", f"CANDLE_QUANT_GRAPH={mode}", work / STEPS_BENCH, "--seconds", max(1, int(seconds * 0.45))] for mode in ("on", "eager")
        ], **probe),
        Step("products and experts, of this crate and others", 150, timed(work / KERNELS_BENCH, "--out", OUT),
             count=steps.count_records, written="kernels.jsonl"),
        Step("products of other libraries", 40, timed(sys.executable, "benches/peers/gpu_peers.py", "--out", OUT / "peers.jsonl"),
             count=steps.count_records, written="peers.jsonl", required=False),
        Step("probe: gemv", 40, lambda seconds: [[path] for path in sorted(tools.glob("gemv-*")) if path.suffix != ".log"], **probe),
        Step("a decode step, launch by launch", 40, lambda seconds: by_launch, required=False, tool="ncu"),
        Step("ncu", 40, timed(*profiled), required=False, tool="ncu"),
        Step("report", 10, always(sys.executable, "benches/report.py", "summary", OUT)),
    ] if wanted(step)]


def say(text):
    """To the terminal and the log."""
    print(text, flush=True)
    with open(OUT / "log.txt", "a") as log:
        log.write(text + "\n")


def call(command, limit, stdout, stderr):
    """The exit status of a command that is stopped after `limit` seconds, with all that it started: 124, then."""
    try:
        program = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True)
    except OSError as error:
        stderr.write(f"{command[0]}: {error.strerror}\n".encode())
        stderr.flush()
        return 127
    try:
        return program.wait(limit)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        for end in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(program.pid, end)
                program.wait(3)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass


def ask(*command, limit=30):
    """(whether a command succeeded, what it printed)"""
    with tempfile.TemporaryFile() as printed:
        status = call(command, limit, printed, printed)
        printed.seek(0)
        return status == 0, printed.read().decode(errors="replace").strip()


def last_line(text):
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def find_gpu(work):
    """The architecture of the GPU and its name, once a kernel has run there: (architecture, name, why there is none)."""
    here, printed = ask("nvidia-smi", "--query-gpu=compute_cap,name", "--format=csv,noheader")
    capability, _, name = printed.partition("\n")[0].partition(", ")
    arch = "sm_" + capability.replace(".", "")
    if not here or not arch[3:].isdecimal():
        return None, None, f"nvidia-smi: {last_line(printed) or 'failed'}"
    compiled, printed = ask("scripts/gpu/compile.sh", work, arch, "alive", limit=60)
    runs, printed = ask(work / "alive", limit=30) if compiled else (False, printed)
    return (arch, name, None) if runs else (None, None, f"no kernel runs on {name} ({arch}): {printed or 'it hangs'}")


class Run:
    """Goes through the steps and keeps steps.json up to date."""

    def __init__(self, work, end):
        self.work, self.end = work, end
        self.plan, self.outcomes = [], []

    def add(self, plan):
        self.plan += plan
        self.outcomes += [step.outcome() for step in plan]
        steps.write(OUT, self.outcomes)

    def go(self, index):
        step, outcome = self.plan[index], self.outcomes[index]
        left, start = self.end - time.monotonic(), time.monotonic()
        limit = min(left, max(LEAST, left * step.weight / sum(later.weight for later in self.plan[index:])))
        say(f"\n== {step.name} (at most {limit:.0f} s of {left:.0f})")
        outcome["limit"] = round(limit, 1)
        if limit < 1:
            outcome["fault"] = "no time left"
        elif not self.tool_works(step, outcome):
            outcome["required"] = False
        else:
            self.run(step, outcome, start + limit)
        outcome["seconds"] = round(time.monotonic() - start, 1)
        if outcome["fault"]:
            say(outcome["fault"] if step.required else f"{outcome['fault']} (not required)")
        steps.write(OUT, self.outcomes)

    def tool_works(self, step, outcome):
        if step.tool is None:
            return True
        works, printed = ask(step.tool, self.work / "alive")
        if not works:
            outcome["fault"] = f"not run: {step.tool} does not work here: {last_line(printed)}"
        return works

    def run(self, step, outcome, deadline):
        result, log = OUT / step.result, OUT / "log.txt"
        result.touch()
        begin, log_begin = result.stat().st_size, log.stat().st_size
        commands = step.commands(deadline - time.monotonic())
        if not commands:
            outcome["fault"] = "nothing to run"
        for command in commands:
            with open(result, "ab") as stdout, open(log, "ab") as stderr:
                # The output of tests comes with their errors in between.
                errors = stderr if step.count is steps.count_records else stdout
                status = call(command, max(0.1, deadline - time.monotonic()), stdout, errors)
            outcome["rc"] = outcome["rc"] or status
            if status:
                program = Path(command[0]).name
                outcome["fault"] = outcome["fault"] or (f"{program}: stopped at its limit" if status == 124 else f"{program}: exit status {status}")
        printed = read_from(log, log_begin) if step.result == "log.txt" or step.count is steps.count_records else read_from(result, begin)
        print(printed[-6000:], flush=True)
        if outcome["fault"] and last_line(printed):
            outcome["fault"] += f": {last_line(printed)[:200]}"
        if step.count:
            path, begin = (OUT / step.written, 0) if step.written else (result, begin)
            counts, fault = step.count(read_from(path, begin)) if path.exists() else ({}, f"no {path.name}")
            outcome.update(counts)
            outcome["fault"] = "; ".join(filter(None, [fault, outcome["fault"]])) or None


def read_from(path, begin):
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")


def set_environment():
    """Libraries of CUDA may lie in Python's packages."""
    try:
        import nvidia
        found = [str(folder) for root in nvidia.__path__ for folder in Path(root).glob("*/lib")]
    except ImportError:
        found = []
    folders = [*found, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    os.environ.update(LD_LIBRARY_PATH=":".join(folders), CANDLE_QUANT_REQUIRE_CUDA="1", PYTHONUNBUFFERED="1", PYTHONDONTWRITEBYTECODE="1")


def main():
    end = time.monotonic() + END
    # So that the programs of a run that is stopped are stopped as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.chdir(ROOT)
    OUT.mkdir(parents=True, exist_ok=True)
    if (OUT / steps.NAME).exists():
        sys.exit(f"{OUT} holds the results of another run")
    set_environment()
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        run = Run(work, end)
        arch, name, fault = find_gpu(work)
        gpu = Step("a kernel runs", 0, None)
        run.add([gpu])
        run.outcomes[0].update(rc=1 if fault else 0, fault=fault and f"no GPU: {fault}")
        steps.write(OUT, run.outcomes)
        if fault:
            say(run.outcomes[0]["fault"])
            return 1
        say(f"GPU: {name}, {arch}")
        programs = (CARRY / "programs").read_text().split() if (CARRY / "programs").exists() else [CORE_TESTS, KERNELS_BENCH, STEPS_BENCH]
        run.add(plan(programs, work, arch))
        with open(OUT / "clocks.csv", "wb") as out:
            clocks = subprocess.Popen(["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv", "-lms", "500"], stdout=out, stderr=out)
        try:
            for index in range(1, len(run.plan)):
                run.go(index)
        finally:
            clocks.kill()
            clocks.wait()
    # What counts is what was written.
    written = steps.read(OUT)
    print("\n".join(["", *steps.table(written)]))
    faults = steps.faults(written)
    say("\n" + ("\n".join(["THIS RUN FAILED:", *faults]) if faults else "all required steps succeeded"))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
