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
        self.assertEqual(misses(results, "M >= 1024"), (0, []))

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
        self.results(floor(10e6), product("mxfp4", 1, 4096, 4096, 4.3, 9e6), product("dense", 1, 4096, 4096, 10.0, 33e6, library="cuBLAS"))
        into = self.path / "into"
        report.record(self.path, into)
        self.assertEqual(len(json.loads((into / "results.json").read_text())), 5)
        with open(into / "results.csv") as file:
            self.assertEqual([row["library"] for row in csv.DictReader(file)], ["", "", "candle-quant", "cuBLAS"])
        self.assertIn("| 4096x4096 | 4.30 (52%) | 10.00 (82%) |", (into / "README.md").read_text())
        for chart in ("share-of-read.svg", "time-over-floor.svg"):
            drawn = xml.etree.ElementTree.parse(into / chart)
            self.assertEqual(len(drawn.findall(".//{*}circle")), 2)


if __name__ == "__main__":
    unittest.main()
