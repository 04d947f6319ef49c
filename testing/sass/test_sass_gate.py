"""The gate on machine code that it must accept, and on code that it must not: python3 -m unittest discover testing/sass"""
import unittest

from gemv import Gemv
from machine_code import parse
from sass_gate import compare, measure

# Four weight loads of 16 bytes (4-bit: 128 weights of a lane), 16 HMMA, 44 instructions in all.
LOADS = ["LDG.E.128.NA.LTC128B.CONSTANT R8, desc[UR4][R2.64]"] * 4
BODY = [*LOADS, *["LOP3.LUT R4, R8, 0xf000f, R5, 0xea, !PT"] * 22, "@P0 LDG.E.U16.CONSTANT R3, desc[UR4][R6.64]",
        *["HMMA.16816.F32 R4, R8, R12, R4"] * 16]


def kernel(body=BODY, name="gemv_a4_g64_m1", registers=80, local=0, before=("MOV R1, c[0x0][0x28]",)):
    """A kernel whose instructions are `before`, a loop of `body`, an exit, and a branch to itself."""
    first = 16 * len(before)
    last = first + 16 * len(body)
    code = [*before, *body, f"@P1 BRA {first:#x}", "EXIT", f"BRA {last + 32:#x}"]
    lines = [f"\t\tFunction : {name}"]
    lines += [f"        /*{16 * i:04x}*/                   {text} ;  /* 0x0 */" for i, text in enumerate(code)]
    usage = f" Function {name}:\n  REG:{registers} STACK:0 SHARED:1024 LOCAL:{local} CONSTANT[0]:580 TEXTURE:0 SURFACE:0 SAMPLER:0"
    return parse("\n".join(lines), usage)[name]


def complaints_of(kernel):
    return measure(kernel)[1]


BUDGETS = {"most_registers": 128, "goals": {"gemv_a4_g64_m1": 0.5},
           "kernels": {"gemv_a4_g64_m1": {"registers": 80, "instructions_per_weight": 0.344, "load_bytes": 16}}}


class Measuring(unittest.TestCase):
    def test_counts_the_hot_loop(self):
        measured, complaints = measure(kernel())
        self.assertEqual(complaints, [])
        self.assertEqual((measured.registers, measured.load_bytes), (80, 16))
        self.assertEqual(measured.instructions_per_weight, 44 / 128)

    def test_unrolling_does_not_change_the_figure(self):
        measured, _ = measure(kernel(body=BODY + BODY))
        self.assertEqual(measured.instructions_per_weight, 87 / 256)

    def test_local_memory(self):
        for instruction in ("LDL R1, [R2]", "@!P0 STL.64 [R2], R4"):
            self.assertIn("local memory", complaints_of(kernel(before=["NOP", instruction]))[0])
        self.assertIn("local memory", complaints_of(kernel(local=8))[0])
        self.assertIn("local memory", complaints_of(kernel(name="dequantize_a4", local=8))[0])

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
        measured, complaints = measure(kernel(name="tiles_a4_f16"))
        self.assertEqual((complaints, measured.instructions_per_hmma, measured.instructions_per_weight), ([], 44 / 16, None))
        budgets = {"most_registers": 128, "goals": {}, "kernels": {"tiles_a4_f16": {"registers": 80, "instructions_per_hmma": 2.7}}}
        self.assertIn("2.75 instructions per HMMA", compare("tiles_a4_f16", measured, budgets)[0])

    def test_a_loop_that_is_not_unrolled(self):
        first_hmma = 16 * (1 + len(BODY) - 16)
        self.assertIn("not unrolled", complaints_of(kernel(body=[*BODY, f"@P2 BRA {first_hmma:#x}"]))[0])


class Comparing(unittest.TestCase):
    def compare(self, kernel, **changes):
        return compare(kernel.name, measure(kernel)[0], BUDGETS | changes)

    def test_within_budget(self):
        self.assertEqual(self.compare(kernel()), [])

    def test_registers(self):
        self.assertIn("81 registers, budget 80", self.compare(kernel(registers=81)))
        self.assertIn("129 registers, of which", self.compare(kernel(registers=129))[0])

    def test_instructions(self):
        slower = kernel(body=BODY + ["IADD3 R1, R2, R3, RZ"])
        self.assertIn("0.352 instructions per weight, budget", self.compare(slower)[0])
        goals = {"gemv_a4_g64_m1": 0.3}
        self.assertIn("more than the goal of 0.3", self.compare(kernel(), goals=goals)[0])

    def test_load_width(self):
        budgets = {"gemv_a4_g64_m1": {"registers": 80, "instructions_per_weight": 1, "load_bytes": 32}}
        self.assertEqual(self.compare(kernel(), kernels=budgets), ["loads of 16 bytes, budget 32"])

    def test_no_budget(self):
        self.assertIn("no budget", self.compare(kernel(), kernels={})[0])


class Names(unittest.TestCase):
    def test_formats(self):
        self.assertEqual(Gemv.from_name("gemv_nvfp4_experts").rows_of_x, 1)
        self.assertEqual(Gemv.from_name("gemv_a3_g128_m16_narrow"), Gemv("a3_g128", 3, 128, 16, True))
        self.assertEqual(Gemv.from_name("gemv_nvfp4_m2"), Gemv("nvfp4", 4, 16, 2, False))
        self.assertEqual(Gemv.from_name("gemv_a4_g64_m1").bytes_per_weight, 0.5625)
        self.assertEqual(Gemv.from_name("gemv_mxfp8_m1").bytes_per_weight, 1.03125)
        self.assertIsNone(Gemv.from_name("simt_a4"))


if __name__ == "__main__":
    unittest.main()
