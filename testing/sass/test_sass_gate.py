"""The gate on machine code that it must accept, and on code that it must not: python3 -m unittest discover testing/sass"""
import unittest

from gemv import Gemv
from made_up import BODY, LOADS, assembled, kernel
from measure import measure
from sass_gate import compare
from whole import Whole

LAUNCHES = {"starts_early": {}, "gemv": [], "threads": {}}
COPY = "LDGSTS.E.BYPASS.128 [R31], desc[UR8][R20.64], P3"
BUDGETS = {"goals": {"gemv_a4_g64_m1": 0.5},
           "kernels": {"gemv_a4_g64_m1": {"registers": 80, "instructions_per_weight": 0.344, "load_bytes": 16, "hmma_chain": 16}}}


def complaints_of(kernel, launches=LAUNCHES):
    return measure(kernel, launches)[1]


class Measuring(unittest.TestCase):
    def test_counts_the_hot_loop(self):
        measured, complaints = measure(kernel(), LAUNCHES)
        self.assertEqual(complaints, [])
        self.assertEqual((measured.registers, min(measured.hot_loop.load_bytes)), (80, 16))
        self.assertEqual(measured.hot_loop.per_weight, 44 / 128)
        # 4.3 TB/s are 29.25 weights of 0.5625 bytes for each clock of 132 multiprocessors at 1.98 GHz.
        self.assertAlmostEqual(measured.hot_loop.issue, 44 / 128 * 29.25 / 128, places=3)

    def test_what_is_rare_in_the_hot_loop_is_not_counted(self):
        def instructions(region):
            body = [*BODY, "@P2 BRA behind", *region, "behind: NOP"]
            return measure(kernel(body=body), LAUNCHES)[0].hot_loop.instructions

        integers = ["IADD3 R20, R20, R21, RZ", "LDC R22, c[0x0][0x210]", "IMAD R23, R22, R20, RZ"]
        self.assertEqual(instructions(integers), len(BODY) + 3)
        # Who branches is not always right: these are what the loop is for.
        for work in ("FFMA R20, R21, R22, R20", "LDS.128 R20, [R24]", "HMMA.16816.F32 R4, R8, R12, R4", LOADS[0]):
            self.assertEqual(instructions([*integers, work]), len(BODY) + 7, work)

    def test_unrolling_does_not_change_the_figure(self):
        measured, _ = measure(kernel(body=BODY + BODY), LAUNCHES)
        self.assertEqual(measured.hot_loop.per_weight, 87 / 256)

    def test_local_memory(self):
        for instruction in ("LDL R1, [R2]", "@!P0 STL.64 [R2], R4"):
            self.assertIn("local memory", complaints_of(kernel(before=["NOP", instruction]))[0])
        self.assertIn("local memory", complaints_of(kernel(local=8))[0])
        self.assertIn("local memory", complaints_of(kernel(name="dequantize_a4", local=8))[0])

    def test_static_shared_memory(self):
        for name in ("gemv_a4_g64_m1", "absmax"):
            self.assertIn("16 bytes of static shared memory", complaints_of(kernel(name=name, shared=1024 + 16))[0])
        self.assertEqual(complaints_of(kernel(shared=0)), [])

    def test_two_blocks_fit_a_multiprocessor(self):
        early = {"starts_early": {"experts_sort": 113 << 10}, "gemv": [], "threads": {}}
        code = ["ACQBULK", "BAR.SYNC.DEFER_BLOCKING 0x0", "EXIT"]
        self.assertEqual(complaints_of(assembled(code, name="experts_sort", registers=128), early), [])
        self.assertEqual(complaints_of(assembled(code, name="experts_sort", registers=129), early),
                         ["129 registers: no two blocks fit a multiprocessor"])
        early["starts_early"]["experts_sort"] += 1
        self.assertEqual(complaints_of(assembled(code, name="experts_sort"), early),
                         ["115713 bytes of shared memory: no two blocks fit a multiprocessor"])
        # Of 128 threads, twice the registers.
        smaller = {"starts_early": {}, "gemv": [], "threads": {"attend_f32": 128}}
        self.assertEqual(complaints_of(assembled(code, name="attend_f32", registers=255), smaller), [])
        # Whether it starts early or not.
        self.assertIn("129 registers", complaints_of(assembled(code, name="absmax", registers=129))[0])

    def test_narrow_loads(self):
        narrow = [text.replace("E.128", "E.64") for text in BODY]
        self.assertIn("loads of 8 bytes", complaints_of(kernel(body=narrow))[0])
        self.assertEqual(complaints_of(kernel(body=narrow, name="gemv_a4_g64_m1_narrow")), [])
        one_narrow = [BODY[0].replace("E.128", "E"), *BODY[1:]]
        self.assertIn("loads of 4 bytes", complaints_of(kernel(body=one_narrow))[0])

    def test_no_tensor_cores(self):
        fma = [text.replace("HMMA.16816.F32", "FFMA") for text in BODY]
        self.assertIn("no loop", complaints_of(kernel(body=fma))[0])

    def test_fewer_multiplications_than_weights(self):
        self.assertIn("15 HMMA", complaints_of(kernel(body=BODY[:-1]))[0])

    def test_tiles(self):
        body = [COPY, *BODY, *[BODY[-1]] * 16]  # 32 HMMA
        measured, complaints = measure(kernel(name="tiles_a4_g64_c32", body=body, registers=128), LAUNCHES)
        self.assertEqual((complaints, measured.instructions_per_hmma, measured.hot_loop), ([], 61 / 32, None))
        budget = {"registers": 128, "instructions_per_hmma": 1.8, "hmma_chain": 32}
        self.assertEqual(compare("tiles_a4_g64_c32", measured, {"goals": {}, "kernels": {"tiles_a4_g64_c32": budget}}),
                         ["1.9062 instructions per HMMA, budget 1.8"])
        self.assertEqual(complaints_of(kernel(name="tiles_a4_g64_c32", body=body, registers=129)),
                         ["129 registers: no two blocks fit a multiprocessor"])
        # Of many columns one block; passes are trips of a loop within: eight of 16 HMMA.
        passes = [COPY, f"inner: {BODY[0]}", *BODY[1:], "@P2 BRA inner"]
        measured, complaints = measure(kernel(name="tiles_a4_g32_c128", body=passes, registers=255), LAUNCHES)
        self.assertEqual((complaints, measured.instructions_per_hmma), ([], (46 + 7 * 44) / 128))
        measured, _ = measure(kernel(name="tiles_nf4_c32", body=passes), LAUNCHES)
        self.assertEqual(measured.instructions_per_hmma, (46 + 3 * 44) / 64)

    def test_width_of_copies(self):
        narrow = COPY.replace("128", "64")
        for copies, told in [([narrow], ["copies of 8 bytes at most, not 16"]), ([COPY, narrow], [])]:
            self.assertEqual(complaints_of(kernel(name="tiles_a4_g64_c128", body=[*copies, *BODY])), told)
        self.assertIn("no loop", complaints_of(kernel(name="tiles_a4_g64_c128"))[0])
        attend = {"name": "attend_prompt_f16_d64", "body": [COPY, narrow, *BODY]}
        self.assertEqual(complaints_of(kernel(**attend)), ["copies of 8 bytes, not 16"])

    def test_hmma_in_a_row(self):
        def chain(*hmma):
            return measure(kernel(body=[*BODY[:-16], *hmma]), LAUNCHES)[0].hmma_chain

        one, other = "HMMA.16816.F32 R4, R8, R12, R4", "HMMA.16816.F32 R20, R8, R14, R20"
        self.assertEqual(chain(*[one] * 16), 16)
        self.assertEqual(chain(*[one, other] * 8), 8)
        # Sums begin at zero, or go from register to register.
        self.assertEqual(chain(*[one] * 9, "HMMA.16816.F32 R4, R8.reuse, R12, RZ", *[one] * 6), 9)
        self.assertEqual(chain(*[one] * 15, "HMMA.16816.F32 R20, R8, R12, R4"), 16)
        # What is written over is no sum any more.
        for lost in ("CS2R R4, SRZ", "MOV R7, RZ", "@P0 LDS.128 R4, [R30]"):
            self.assertEqual(chain(*[one] * 10, lost, *[one] * 6), 10, lost)
        for kept in ("ISETP.GE.AND P0, PT, R4, RZ, PT", "STS [R4], R12", "IADD3 R3, R4, R5, RZ"):
            self.assertEqual(chain(*[one] * 10, kept, *[one] * 6), 16, kept)

    def test_a_format_that_is_not_known(self):
        self.assertIn("does not list", complaints_of(kernel(name="gemv_q9_k_m1"))[0])

    def test_a_loop_that_is_not_unrolled(self):
        body = [*BODY[:-1], f"inner: {BODY[-1]}", "@P2 BRA inner"]
        self.assertIn("not unrolled", complaints_of(kernel(body=body))[0])


class OnCudaCores(unittest.TestCase):
    NAME = "simt_q4_k"

    @staticmethod
    def code(*bodies):
        """Loops of weights' loads and so many multiplications, one behind the other, in one that goes through rows."""
        code = []
        for number, (fma, others) in enumerate(bodies):
            load = "LDG.E.128.LTC128B.CONSTANT R8, desc[UR4][R2.64]"
            code += [f"loop{number}: {load}", *["FFMA R4, R8, R12, R4"] * fma, *["NOP"] * others, f"@P1 BRA loop{number}"]
        return ["rows: MOV R1, R2", *code, "@P2 BRA rows", "EXIT"]

    def measure(self, *bodies, name=NAME):
        return measure(assembled(self.code(*bodies), name=name), LAUNCHES)

    def test_counts_the_loop_of_each_number_of_rows(self):
        measured, complaints = self.measure((256, 60), (64, 30), (128, 40))
        self.assertEqual((complaints, measured.of_rows), ([], {"1": 96 / 64, "2": 170 / 64, "4": 318 / 64}))
        self.assertEqual(self.measure((32, 62), (64, 30), (128, 30), name="simt_q6_k_experts")[0].of_rows["1"], 3)

    def test_other_loops(self):
        self.assertEqual(self.measure((256, 60), (64, 30))[1], ["not 3 loops that load weights and multiply them"])

    def test_instructions(self):
        budget = self.measure((256, 60), (64, 30), (128, 40))[0].budget()
        self.assertEqual(budget, {"registers": 80, "of_rows": {"1": 1.5, "2": 2.656, "4": 4.969}})
        budgets = {"goals": {}, "kernels": {self.NAME: budget}}
        twice = self.measure((256, 60), (128, 60), (128, 40))[0]
        self.assertEqual(compare(self.NAME, twice, budgets), ["2.9688 instructions per weight of 1 rows of x, budget 1.5"])
        none = {"goals": {}, "kernels": {self.NAME: {"registers": 80}}}
        self.assertEqual(len(compare(self.NAME, twice, none)), 3)


class Comparing(unittest.TestCase):
    def compare(self, kernel, **changes):
        return compare(kernel.name, measure(kernel, LAUNCHES)[0], BUDGETS | changes)

    def test_within_budget(self):
        self.assertEqual(self.compare(kernel()), [])

    def test_registers(self):
        self.assertIn("81 registers, budget 80", self.compare(kernel(registers=81)))

    def test_instructions(self):
        slower = kernel(body=BODY + ["IADD3 R1, R2, R3, RZ"])
        self.assertIn("0.35156 instructions per weight, budget", self.compare(slower)[0])
        goals = {"gemv_a4_g64_m1": 0.3}
        self.assertIn("more than the goal of 0.3", self.compare(kernel(), goals=goals)[0])

    def test_load_width(self):
        budgets = {"gemv_a4_g64_m1": BUDGETS["kernels"]["gemv_a4_g64_m1"] | {"load_bytes": 32}}
        self.assertEqual(self.compare(kernel(), kernels=budgets), ["loads of 16 bytes, budget 32"])

    def test_hmma_in_a_row(self):
        budget = BUDGETS["kernels"]["gemv_a4_g64_m1"]
        shorter = {"gemv_a4_g64_m1": budget | {"hmma_chain": 15}}
        self.assertEqual(self.compare(kernel(), kernels=shorter), ["16 HMMA in a row, budget 15"])
        none = {"gemv_a4_g64_m1": {key: value for key, value in budget.items() if key != "hmma_chain"}}
        self.assertEqual(self.compare(kernel(), kernels=none), ["16 HMMA in a row, budget None"])

    def test_whole_kernel(self):
        def compare_whole(figure, budget):
            measured = measure(kernel(), LAUNCHES)[0]
            measured.wholes = {"4096x4096": Whole(figure, 4, 1)}
            whole = {"gemv_a4_g64_m1": BUDGETS["kernels"]["gemv_a4_g64_m1"] | {"whole": budget}}
            return compare("gemv_a4_g64_m1", measured, BUDGETS | {"kernels": whole})

        self.assertEqual(compare_whole(3.63, {"4096x4096": 3.6}), [])
        self.assertEqual(compare_whole(3.64, {"4096x4096": 3.6}),
                         ["3.64 instructions per weight of the whole kernel at 4096x4096, budget 3.6"])
        self.assertIn("budget None", compare_whole(3.6, {})[0])
        self.assertIn("no instructions per weight of the whole kernel at 1x1", compare_whole(3.6, {"4096x4096": 3.6, "1x1": 1})[0])

    def test_no_budget(self):
        self.assertIn("no budget", self.compare(kernel(), kernels={})[0])


class Names(unittest.TestCase):
    def test_formats(self):
        self.assertEqual(Gemv.from_name("gemv_nvfp4_experts").rows_of_x, 1)
        self.assertEqual(Gemv.from_name("gemv_a3_g128_m16_narrow"), Gemv("a3_g128", 3, 128, 16, True))
        self.assertEqual(Gemv.from_name("gemv_nvfp4_m2"), Gemv("nvfp4", 4, 16, 2, False))
        self.assertEqual(Gemv.from_name("gemv_a4_g64_m1").bytes_per_weight, 0.5625)
        self.assertEqual(Gemv.from_name("gemv_mxfp8_m1").bytes_per_weight, 1.03125)
        self.assertEqual(Gemv.from_name("gemv_iq1_m_m1"), Gemv("iq1_m", 3, 16, 1, False))
        # As in files: 144 bytes of Q4_K and 210 of Q6_K hold 256 weights, but that Q4_K's scales have 8 bits here, not 6.
        self.assertEqual(Gemv.from_name("gemv_q4_k_m1").bytes_per_weight, (144 + 4) / 256)
        self.assertEqual(Gemv.from_name("gemv_q6_k_m8").bytes_per_weight, 210 / 256)
        self.assertEqual(Gemv.from_name("gemv_iq4_nl_m1").bytes_per_weight, 18 / 32)
        self.assertEqual([Gemv.from_name(f"gemv_{name}").least_load_bytes for name in ("q5_k_m1", "q5_k_m2", "q6_k_m1", "a5_g64_m1")],
                         [8, 4, 16, 16])
        self.assertIsNone(Gemv.from_name("simt_a4"))


if __name__ == "__main__":
    unittest.main()
