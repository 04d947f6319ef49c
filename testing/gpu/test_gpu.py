"""scripts/gpu.sh with fakes: a build, a run and a record that succeed, and runs with one fault each.

python3 -m unittest discover -s testing/gpu
"""
import json
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAKES = Path(__file__).resolve().parent / "fakes"
CORE, TOOLS, BENCH = "test-candle-quant-cuda", "test-candle-quant-tools-cuda", "bench-candle-quant-kernels"
STEPS_BENCH, BINARY = "bench-candle-quant-decode_steps", "bin-candle-quant-tools-candle-quant"
BENCH_STEP = "products and experts, of this crate and others"

TESTS = """#!/bin/sh
cat <<END
running 2 tests
test products::awkward_shapes ... ok
test views::weights_at_an_offset ... ok

test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
END
"""
FAILED_TESTS = """#!/bin/sh
cat <<END
running 2 tests
test products::awkward_shapes ... ok
test views::weights_at_an_offset ... FAILED

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
END
exit 101
"""
NO_TESTS = TESTS.replace("running 2", "running 0").replace("2 passed", "0 passed")
HANGS = """#!/bin/sh
sleep 600 &
echo $$ $! >"$FAKE_CALLS"
wait
"""
RECORD = {"kind": "product", "library": "candle-quant", "name": "mxfp4", "dtype": "bf16", "n": 4096, "k": 4096, "m": 1, "us": 4.5,
          "bytes": 9000000, "gb_per_s": 2000.0, "error": 1e-3, "error_over_rounding": 1.0}
WRITES = """#!/bin/sh
while [ "$1" != --out ]; do shift; done
mkdir -p "$2" && cat >"$2/kernels.jsonl" <<'END'
{}
END
"""
DEVICE = json.dumps({"kind": "device", "name": "NVIDIA Fake GPU"})
BENCHES = WRITES.format("\n".join([DEVICE, json.dumps(RECORD)]))
DECODED = {"kind": "decode step", "library": "candle-quant", "name": "Llama-3-8B affine 4-bit g64", "context": 128, "mode": "$mode",
           "tokens_per_s": 640.0, "least": 630.0, "greatest": 645.0, "us": 1562.5, "launches": 163, "bytes": 4, "gb_per_s": 2.0}
DECODES = f"""#!/bin/sh
case $CANDLE_QUANT_GRAPH in on) mode=graph ;; *) mode=$CANDLE_QUANT_GRAPH ;; esac
cat <<END
{DEVICE}
{json.dumps(DECODED)}
END
"""
FAILS = "#!/bin/sh\necho out of memory >&2\nexit 3\n"


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Checkout:
    """A small repository with the scripts, on a machine of fakes."""

    def __init__(self, folder):
        self.root, self.out, self.programs, self.calls = folder / "tree", folder / "out", folder / "programs", folder / "calls"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        self.root.joinpath("benches/peers").mkdir(parents=True)
        for name in ("report.py", "steps.py", "charts.py", "svg.py"):
            if (ROOT / "benches" / name).exists():
                shutil.copy(ROOT / "benches" / name, self.root / "benches" / name)
        # Without PyTorch.
        (self.root / "benches/peers/gpu_peers.py").write_text("import sys\nsys.exit('no torch')\n")
        (self.root / ".gitignore").write_text("/carry\n")
        for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "all"]):
            subprocess.run(["git", "-C", self.root, *command], check=True)
        modules = ("driver", "cublas", "cublaslt", "curand", "nvrtc")
        for module in modules:
            (self.programs / "cudarc/src" / module / "sys").mkdir(parents=True)
            prefix = {"driver": "cu", "cublaslt": "cublasLt"}.get(module, module)
            (self.programs / "cudarc/src" / module / "sys/mod.rs").write_text(f"pub fn {prefix}Init(")
        for name, text in ((CORE, TESTS), (TOOLS, TESTS), (BENCH, BENCHES), (STEPS_BENCH, DECODES), (BINARY, "")):
            self.program(name, text)
        self.calls.touch()

    def program(self, name, text):
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)

    def gpu(self, *arguments, without=(), **variables):
        """scripts/gpu.sh: its exit status and what it printed."""
        fakes = self.root.parent / "fakes"
        shutil.rmtree(fakes, ignore_errors=True)
        shutil.copytree(FAKES, fakes, ignore=shutil.ignore_patterns(*without))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "NVCC", "CARGO", "OUT", "END"))}
        environment |= {"PATH": f"{fakes}:{environment['PATH']}", "FAKE_CALLS": str(self.calls), "FAKE_PROGRAMS": str(self.programs),
                        "CUDA_HOME": str(fakes), "NVCC": str(fakes / "nvcc"), "CARGO_TARGET_DIR": str(self.root.parent / "target"),
                        "OUT": str(self.out), "END": "60", **variables}
        (fakes / "bin").mkdir()
        (fakes / "bin/nvcc").symlink_to("../nvcc")
        done = subprocess.run([self.root / "scripts/gpu.sh", *map(str, arguments)], env=environment, text=True, timeout=120,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.returncode, done.stdout


class Gpu(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.checkout = Checkout(Path(folder.name))

    def build(self):
        status, printed = self.checkout.gpu("build")
        self.assertEqual(status, 0, printed)
        return printed

    def run_with(self, **variables):
        self.build()
        return self.checkout.gpu("run", **variables)

    def assert_fails(self, run, step, fault):
        """It ends with an error, and both the end of what it prints and steps.json name the step and its fault."""
        status, printed = run
        self.assertNotEqual(status, 0, printed)
        self.assertRegex(printed.rpartition("THIS RUN FAILED")[2], f"(?m)^{step}: .*{fault}")
        self.assertRegex(self.outcome(step)["fault"], fault)

    def outcome(self, name):
        return next(step for step in json.loads(self.checkout.out.joinpath("steps.json").read_text()) if step["name"] == name)

    def test_all_good(self):
        status, printed = self.run_with()
        self.assertEqual(status, 0, printed)
        self.assertTrue(printed.startswith("GPU: NVIDIA Fake GPU, sm_90"), printed)
        self.assertEqual(self.outcome(TOOLS)["passed"], 2)
        self.assertEqual(self.outcome("probe: gemv")["records"], 13)
        # PyTorch is not there: said, but the run counts without it.
        self.assertIn("no torch", self.outcome("products of other libraries")["fault"])
        files = [path for path in self.checkout.out.iterdir()]
        self.assertLessEqual(len(files), 8, "no more come back from the machine")
        into = self.checkout.root / "recorded"
        self.assertEqual(self.checkout.gpu("record", self.checkout.out, "--into", into)[0], 0)
        report = (into / "README.md").read_text()
        self.assertIn("Every required step succeeded; 8 tests passed.", report)
        self.assertEqual([record["us"] for record in json.loads((into / "results.json").read_text()) if record["kind"] == "product"], [4.5])
        self.assertEqual(self.outcome("decode steps")["records"], 2)
        self.assertIn("| 600 | 812 or 669 | 640.0, 630.0 to 645.0 | 1562.5 | 640.0, 630.0 to 645.0 | 1562.5 | 163 |", report)
        self.assertTrue((into / "steps.json").exists())

    def test_steps_that_are_asked_for_run_behind_the_tests(self):
        status, printed = self.run_with(ONLY="decode,splits")
        self.assertEqual(status, 0, printed)
        names = [step["name"] for step in json.loads(self.checkout.out.joinpath("steps.json").read_text())]
        self.assertEqual([name for name in names if "probe" in name or "decode" in name], ["probe: splits", "decode steps", "a decode step, launch by launch"])
        self.assertTrue(CORE in names and TOOLS in names and BENCH_STEP not in names, names)

    def test_a_test_fails(self):
        self.checkout.program(TOOLS, FAILED_TESTS)
        run = self.run_with()
        self.assert_fails(run, TOOLS, "views::weights_at_an_offset")
        self.assertEqual(self.outcome(TOOLS)["rc"], 101)
        # The others ran, and what was found is kept, with the verdict.
        self.assertEqual(self.outcome(BENCH_STEP)["rc"], 0)
        into = self.checkout.root / "recorded"
        self.assertEqual(self.checkout.gpu("record", self.checkout.out, "--into", into)[0], 0)
        self.assertIn("**This run failed:**\n\n* test-candle-quant-tools-cuda: failed tests: views::weights_at_an_offset", (into / "README.md").read_text())

    def test_no_test_runs(self):
        self.checkout.program(CORE, NO_TESTS)
        self.assert_fails(self.run_with(), CORE, "no test ran")

    def test_a_test_hangs(self):
        self.checkout.program(TOOLS, HANGS)
        self.assert_fails(self.run_with(END="30"), TOOLS, "stopped at its limit")
        self.assertLess(self.outcome(TOOLS)["seconds"], 20)
        for process in self.checkout.calls.read_text().split():
            self.assertFalse(is_running(process), "what hangs is stopped, with all that it started")
        # The steps after it have had their time.
        self.assertEqual(self.outcome(BENCH_STEP)["rc"], 0)

    def test_the_bench_writes_garbage(self):
        self.checkout.program(BENCH, WRITES.format('{"kind": "product", "us"'))
        self.assert_fails(self.run_with(), BENCH_STEP, "line 1 is no record")

    def test_the_bench_measures_nothing(self):
        self.checkout.program(BENCH, WRITES.format(DEVICE))
        self.assert_fails(self.run_with(), BENCH_STEP, "no figures")

    def test_faults_of_the_bench_of_steps(self):
        for program, fault in ((FAILS, "exit status 3: out of memory"), ("#!/bin/sh\necho garbage\n", "line 1 is no record: 'garbage'"),
                               ("#!/bin/sh\n", "no figures"), (HANGS, "stopped at its limit")):
            with self.subTest(fault):
                shutil.rmtree(self.checkout.out, ignore_errors=True)
                self.checkout.program(STEPS_BENCH, program)
                self.assert_fails(self.run_with(END="30"), "decode steps", fault)
                self.assertEqual(self.outcome(BENCH_STEP)["rc"], 0)

    def test_a_probe_writes_garbage(self):
        self.assert_fails(self.run_with(FAKE_GARBAGE="splits"), "probe: splits", "line 1 is no record: 'garbage'")

    def test_a_program_is_missing(self):
        self.build()
        carry = self.checkout.root / "carry"
        (carry / "programs").write_text(carry.joinpath("programs").read_text() + "test-of-another-crate\n")
        self.assert_fails(self.checkout.gpu("run"), "unpack", "missing in carry/programs.tar.xz: test-of-another-crate:")
        self.assertEqual((self.outcome("test-of-another-crate")["rc"], self.outcome(TOOLS)["rc"]), (127, 0))

    def test_nothing_was_carried(self):
        self.assert_fails(self.checkout.gpu("run"), "unpack", f"missing in carry/programs.tar.xz: {CORE}, {BENCH}, {STEPS_BENCH}:")

    def test_tree_and_carry_are_too_big_together(self):
        # Neither of them is.
        with open(self.checkout.programs / CORE, "ab") as program:
            program.write(os.urandom(3 << 20))
        with open(self.checkout.root / "untracked", "wb") as untracked:
            untracked.truncate(62 << 20)
        status, printed = self.checkout.gpu("build")
        self.assertNotEqual(status, 0, printed)
        self.assertRegex(printed.splitlines()[-1], r"too big to travel: the tree is 62\.\d MiB, carry/ is 3\.\d MiB")

    def test_no_gpu(self):
        for variables in ({"FAKE_NO_GPU": "1"}, {"FAKE_DEAD": "1"}, {"without": ["nvidia-smi"]}):
            with self.subTest(variables):
                self.checkout.calls.write_text("")
                shutil.rmtree(self.checkout.out, ignore_errors=True)
                status, printed = self.checkout.gpu("run", **variables)
                self.assertNotEqual(status, 0, printed)
                self.assertTrue(printed.startswith("no GPU: "), printed)
                compiled = self.checkout.calls.read_text().splitlines()
                self.assertEqual(len(compiled), "FAKE_DEAD" in variables, compiled)

    def test_tools_that_do_not_work(self):
        self.build()
        status, printed = self.checkout.gpu("run", without=["compute-sanitizer", "ncu"])
        self.assertEqual(status, 0, printed)
        memcheck = self.outcome("compute-sanitizer memcheck")
        self.assertEqual((memcheck["rc"], memcheck["required"]), (None, False))
        self.assertIn("not run: compute-sanitizer does not work here", memcheck["fault"])

    def test_results_of_two_runs_are_not_mixed(self):
        self.build()
        self.assertEqual(self.checkout.gpu("run")[0], 0)
        status, printed = self.checkout.gpu("run")
        self.assertNotEqual(status, 0)
        self.assertIn("holds the results of another run", printed)


if __name__ == "__main__":
    unittest.main()
