"""The report on a run whose figures are known: python3 -m unittest discover -s benches"""
import csv
import json
import tempfile
import unittest
import xml.etree.ElementTree
from pathlib import Path

import report

READ = 4000.0  # GB/s


def product(name, m, n, k, us, size, library=report.OURS, **more):
    return {"kind": "product", "library": library, "name": name, "dtype": "bf16", "n": n, "k": k, "m": m, "us": us,
            "bytes": int(size), "gb_per_s": size / us / 1e3, "share_of_read": size / us / 1e3 / READ, "error": 1e-3,
            "error_over_rounding": 1.0, **more}


def experts(name, m, sizes, us, size=1e6, library=report.OURS):
    n, k, count, top_k = sizes
    return {**product(name, m, n, k, us, size, library), "kind": "experts", "experts": count, "top_k": top_k}


def decode_step(name, context, mode, speed, gb_per_s):
    return {"kind": "decode step", "library": report.OURS, "name": name, "dtype": "bf16", "context": context, "mode": mode,
            "tokens_per_s": speed, "least": speed - 1, "greatest": speed + 1, "us": 1e6 / speed, "launches": 163, "bytes": 10**9, "gb_per_s": gb_per_s}


def floor(size):
    return {"kind": "floor", "library": "", "name": "read", "bytes": int(size), "us": 1 + size / READ / 1e3,
            "gb_per_s": size / (1 + size / READ / 1e3) / 1e3}


def misses(results, start):
    return next((count, missed) for goal, count, missed in report.goals(results) if goal.startswith(start))


class Run(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = Path(self.folder.name)

    def results(self, *records, cut=""):
        # A read of no floor at all fixes the bandwidth.
        records = [{"kind": "device", "name": "NVIDIA Test GPU"},
                   {"kind": "floor", "library": "", "name": "read", "bytes": 10**10, "us": 2.5e6, "gb_per_s": READ}, *records]
        (self.path / "kernels.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n" + cut)
        return report.Results(self.path)

    def test_time_goal(self):
        # 36.8 MB at 92 % of 4000 GB/s are 10 us, and 2 us for the launch.
        fast, slow = product("mxfp4", 1, 1, 1, 11.9, 36.8e6), product("mxfp4", 1, 2, 2, 12.1, 36.8e6)
        count, missed = misses(self.results(fast, slow), "M = 1: at most 2 us")
        self.assertEqual((count, len(missed)), (2, 1))
        self.assertIn("2x2", missed[0])

    def test_share_goal_depends_on_size_and_bits(self):
        def at(share, name, size):
            return product(name, 1, 1, 1, size / (share * READ * 1e3), size)
        results = self.results(at(0.89, "mxfp4", 81e6), at(0.89, "mxfp8", 81e6), at(0.84, "mxfp8", 81e6), at(0.5, "mxfp4", 79e6))
        count, missed = misses(results, "M = 1, 80 MB")
        self.assertEqual((count, len(missed)), (3, 2))

    def test_goals_beside_others(self):
        dense = product("dense", 1, 4096, 4096, 10.0, 33e6, library="cuBLAS")
        results = self.results(dense, product("mxfp4", 1, 4096, 4096, 4.3, 9e6), product("mxfp4", 8, 4096, 4096, 5.0, 9e6),
                               product("nvfp4", 1, 4096, 4096, 4.4, 9e6, error_over_rounding=1.06))
        self.assertEqual(misses(results, "M = 1, 4 bits, over cuBLAS"), (2, ["nvfp4 bf16 4096x4096 M=1: 2.27"]))
        self.assertEqual(misses(results, "M = 8"), (1, ["mxfp4 bf16 4096x4096 M=8: 1.16"]))
        self.assertEqual(misses(results, "error"), (3, ["nvfp4 bf16 4096x4096 M=1: 1.060"]))
        self.assertEqual(misses(results, "M >= 512"), (0, []))

    def test_goals_of_many_rows(self):
        results = self.results(product("affine 4-bit g64", 16, 14336, 4096, 15.1, 35e6), product("affine 4-bit g64", 64, 14336, 4096, 26.0, 35e6),
                               product("affine 4-bit g64", 64, 4096, 4096, 99.0, 9e6), product("mxfp4", 64, 14336, 4096, 99.0, 35e6))
        self.assertEqual(misses(results, "14336x4096"), (2, ["affine 4-bit g64 bf16 14336x4096 M=16: 15.1 us"]))
        attention = [{"kind": "prefill attention", "m": 512, "context": context, "tflops": tflops}
                     for context, tflops in [(512, 100), (8192, 251), (32768, 249)]]
        self.assertEqual(misses(self.results(*attention), "attention of prompts"), (2, ["512 of 32768 tokens: 249"]))

    def test_goals_of_experts(self):
        mixtral, gpt_oss = (14336, 4096, 8, 2), (2880, 2880, 32, 4)
        # Reading 53 MB takes 14.25 us.
        results = self.results(floor(53e6),
                               experts("affine 4-bit g64", 1, mixtral, 60.1), experts("nvfp4", 1, mixtral, 59.9),
                               experts("mxfp4", 8, mixtral, 200), experts("mxfp4", 1, (768, 2048, 128, 8), 61),
                               experts("mxfp4", 1, gpt_oss, 28.4, 53e6), experts("affine 4-bit g64", 1, gpt_oss, 99, 53e6),
                               experts("mxfp4", 2048, mixtral, 100), experts("nvfp4", 2048, mixtral, 101),
                               experts("dense of equal FLOPs", 2048, mixtral, 60, library="cuBLAS"),
                               experts("mxfp4", 2048, gpt_oss, 1))
        self.assertEqual(misses(results, "experts of Mixtral"), (2, ["affine 4-bit g64 bf16 14336x4096, 2 of 8, 1 tokens: 60.10 us"]))
        self.assertEqual(misses(results, "experts of gpt-oss"), (1, []))
        self.assertEqual(misses(results, "experts of 512 tokens"), (2, ["nvfp4 bf16 14336x4096, 2 of 8, 2048 tokens: 0.59"]))
        # Experts are no products.
        self.assertEqual(misses(results, "M = 1: at most 2 us"), (0, []))
        slow = self.results(floor(53e6), experts("mxfp4", 1, gpt_oss, 28.6, 53e6))
        self.assertEqual(misses(slow, "experts of gpt-oss"), (1, ["mxfp4 bf16 2880x2880, 4 of 32, 1 tokens: 2.01"]))

    def test_table_of_experts(self):
        sizes = (768, 2048, 128, 8)
        results = self.results(experts("mxfp4", 1, sizes, 10.0, 20e6), experts("mxfp4", 2048, sizes, 100.0),
                               experts("dense of equal FLOPs", 2048, sizes, 75.0, library="cuBLAS"))
        lines = report.table_of_experts(results)
        self.assertEqual(lines[-2:], ["| 768x2048, 8 of 128 | 1 | 10.00 (50%) |  |", "| 768x2048, 8 of 128 | 2048 | 100.00 (75%) | 75.00 |"])

    def test_decode_steps(self):
        results = self.results(decode_step(report.LLAMA_3_8B, 128, "graph", 625.0, 3000.0), decode_step(report.LLAMA_3_8B, 128, "eager", 500.0, 2400.0),
                               decode_step(report.QWEN3_4B, 128, "graph", 800.0, 2000.0), decode_step("Llama-3-8B mxfp4", 128, "graph", 1.0, 1.0),
                               decode_step(report.LLAMA_3_8B, 4096, "eager", 1.0, 1.0))
        # A bar is of graphs, and of its layout and context.
        self.assertEqual(misses(results, "decode steps"), (2, [f"{report.QWEN3_4B} behind 128: 800.0"]))
        lines = report.table_of_decode_steps(results)
        self.assertIn(f"| {report.LLAMA_3_8B} | 128 | 600 | 812 or 669 | 625.0, 624.0 to 626.0 (75%) | 1600.0 "
                      "| 500.0, 499.0 to 501.0 (60%) | 2000.0 | 163 |", lines)
        self.assertEqual(len(lines), 3 + 4 + 1)
        self.assertIn("Llama-3-8B mxfp4 behind 128 tokens, graph: 1000000.0 us", report.answers(results)[11])
        self.assertEqual(report.table_of_decode_steps(self.results()), [])

    def test_floor_between_sizes(self):
        results = self.results(floor(10e6), floor(20e6))
        self.assertAlmostEqual(results.floor_us(15e6), 1 + 15e6 / READ / 1e3)

    def test_a_line_that_was_cut_off(self):
        results = self.results(floor(10e6), cut='{"kind": "floor", "na')
        self.assertEqual(len(results.of("floor")), 2)

    def test_peers_get_their_share(self):
        peer = product("int4 g64", 1, 4096, 4096, 5.0, 10e6, library="PyTorch")
        del peer["share_of_read"]
        self.assertAlmostEqual(self.results(peer).products(library="PyTorch")[0]["share_of_read"], 0.5)

    def test_answers(self):
        probe = {"kind": "probe", "name": "issue rate", "instruction": "F2FP", "threads": 1024, "per_clock": 16.0}
        found = report.answers(self.results(probe, {"kind": "wrapper", "name": "mma subnormal A", "wrong": 3, "cases": 9}))
        self.assertEqual(found, {2: "F2FP 16 per clock", 5: "mma subnormal A: 3 wrong"})

    def test_record(self):
        self.results(floor(10e6), product("mxfp4", 1, 4096, 4096, 4.3, 9e6), product("dense", 1, 4096, 4096, 10.0, 33e6, library="cuBLAS"),
                     experts("mxfp4", 1, (768, 2048, 128, 8), 10.0, 20e6))
        into = self.path / "into"
        report.record(self.path, into)
        self.assertEqual(len(json.loads((into / "results.json").read_text())), 6)
        with open(into / "results.csv") as file:
            self.assertEqual([row["library"] for row in csv.DictReader(file)], ["", "", "candle-quant", "cuBLAS", "candle-quant"])
        self.assertIn("| 4096x4096 | 4.30 (52%) | 10.00 (82%) |", (into / "README.md").read_text())
        for chart in ("share-of-read.svg", "time-over-floor.svg"):
            drawn = xml.etree.ElementTree.parse(into / chart)
            self.assertEqual(len(drawn.findall(".//{*}circle")), 2)


if __name__ == "__main__":
    unittest.main()
