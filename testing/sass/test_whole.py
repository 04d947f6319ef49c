"""Instructions of a whole kernel, counted by hand."""
import unittest

from gemv import Gemv
from made_up import BODY, assembled
from measure import measure
from whole import Regions, whole

NAME = "gemv_a4_g64_m1"
# 5 instructions before the barrier on the longer way; 2 of staging, 4 for a trip of its loop; 44 for one of the hot loop.
START = ["@P0 BRA short", "NOP", "NOP", "short: @P1 BRA waited", "ACQBULK", "waited: BAR.SYNC.DEFER_BLOCKING 0x0", "PREEXIT"]
STAGING = ["x: LDG.E.128 R4, desc[UR8][R2.64]", "LDG.E.128 R8, desc[UR8][R2.64+0x10]", "STS [R4], R12", "@P1 BRA x"]
HOT_LOOP = [f"loop: {BODY[0]}", *BODY[1:], "@P1 BRA loop"]
# Where k is split, one thread counts; then, or else, 3 instructions for all, and 4 more for a warp that stores.
END = ["@P0 BRA whole", "@P3 BRA counted", "ATOMG.E.ADD PT, R4, desc[UR4][R2.64], R5", *["counted: NOP", *["NOP"] * 99], "EXIT",
       "whole: NOP", "@P3 EXIT", "@P4 BRA stored", "NOP", "stored: STG.E desc[UR4][R2.64], R4", "EXIT"]
LAUNCH = {"kernel": NAME, "n": 4096, "k": 4096, "blocks": 256, "splits": 1, "k_per_split": 4096, "threads": 256, "k_warps": 8,
          "rows_per_block": 16}


def code(start=START, staging=STAGING, end=END):
    return [*start, *staging, *HOT_LOOP, *end]


def regions(code):
    return Regions.of(assembled(code), Gemv.from_name(NAME))


class Whole(unittest.TestCase):
    def test_regions(self):
        of = regions(code())
        # The wait's barrier is counted with what follows it.
        self.assertEqual((of.before_wait, of.staging, of.staging_trip, of.hot_trip, of.stores, of.leaves), (5, 2, 4, 44, 7, 3))
        # Four loads of 32 4-bit weights, of two rows by four lanes; two of 8 elements of x.
        self.assertEqual((of.k_of_trip, of.x_of_trip), (256, 16))

    def test_a_launch(self):
        of = whole(regions(code()), Gemv.from_name(NAME), LAUNCH)
        # Eight warps, of which one stores; 4096 elements of x are one trip of 256 threads, 4096 of k two trips of 8 warps.
        instructions = 8 * (5 + 2 + 4 + 2 * 44) + 7 + 7 * 3
        self.assertEqual(of.per_weight, instructions * 32 / (16 * 4096))
        self.assertAlmostEqual(of.limit, 128 * 132 * 1.98e9 * 0.5625 / 4.3e12)
        # 256 blocks are two for the busiest of 132 multiprocessors.
        self.assertAlmostEqual(of.busiest, of.per_weight / of.limit * 2 * 132 / 256)

    def test_longer_rows(self):
        of = whole(regions(code()), Gemv.from_name(NAME), LAUNCH | {"k": 14336, "k_per_split": 14336})
        instructions = 8 * (5 + 2 + 3.5 * 4 + 7 * 44) + 7 + 7 * 3
        self.assertAlmostEqual(of.per_weight, instructions * 32 / (16 * 14336))

    def test_branches_of_rare_cases(self):
        rare = ["BRA.DIV UR4, rare", "back: NOP"]
        plain = regions(code(start=[*START, "NOP", "NOP"]))
        self.assertEqual(regions([*code(start=[*START, *rare]), *["rare: NOP", *["NOP"] * 50], "BRA back"]), plain)

    def test_what_cannot_be_counted(self):
        def complaint(code, launch=LAUNCH):
            return measure(assembled(code), {"starts_early": {}, "gemv": [launch], "threads": {}})[1]

        self.assertEqual(complaint(code()), [])
        self.assertIn("0 loops that load x", complaint(code(staging=STAGING[2:3]))[0])
        twice = [text.replace("x: ", "y: ").replace("BRA x", "BRA y") for text in STAGING]
        self.assertIn("2 loops that load x", complaint(code(staging=[*STAGING, *twice]))[0])
        self.assertIn("no way through the wait", complaint(code(start=["NOP"]))[0])
        self.assertIn("no way from the hot loop", complaint(code(end=["here: BRA here"]))[0])
        self.assertIn("k has 2 parts", complaint(code(), LAUNCH | {"splits": 2, "k_per_split": 2048})[0])


if __name__ == "__main__":
    unittest.main()
