"""What a kernel that starts early may do before it waits."""
import unittest

from made_up import BODY, assembled
from measure import measure
from order import complaints as complaints_of_order

LOADS = BODY[:4]
WAIT = ["@P0 BRA waited", "ACQBULK", "waited: BAR.SYNC.DEFER_BLOCKING 0x0"]
HOT_LOOP = [f"loop: {BODY[0]}", *BODY[1:], "@P1 BRA loop"]
END = ["STG.E desc[UR4][R2.64], R4", "EXIT"]
STORES = ("STG.E desc[UR4][R2.64], R4", "@P3 RED.E.ADD desc[UR4][R2.64], R4", "ATOMG.E.ADD PT, R4, desc[UR4][R2.64], R5")


def complaints(code, name="gemv_a4_g64_m1"):
    return measure(assembled(code, name=name), {"starts_early": {name: 0}, "gemv": [], "threads": {}})[1]


class Order(unittest.TestCase):
    def test_loads_wait_trigger_stores(self):
        self.assertEqual(complaints([*LOADS, *WAIT, "PREEXIT", *HOT_LOOP, *END]), [])

    def test_loads_behind_the_wait(self):
        """What the assembler makes of the sources where every warp waits."""
        code = ["ACQBULK", *LOADS, "BAR.SYNC.DEFER_BLOCKING 0x0", "PREEXIT", *HOT_LOOP, *END]
        self.assertEqual(complaints(code), ["0 bytes of the first weights of a lane are copied before the wait for the kernel ahead"])
        self.assertIn("16 bytes of", complaints([*LOADS[3:], *WAIT, *LOADS[:3], *HOT_LOOP, *END])[0])

    def test_copies_of_attention(self):
        copies = ["LDGSTS.E.BYPASS.128 [R31], desc[UR8][R20.64], P3"] * 4
        loop = [f"loop: {copies[0]}", *copies[1:], "HMMA.16816.F32 R4, R8, R12, R4", "@P1 BRA loop"]
        right = [*copies, *WAIT, "PREEXIT", *loop, *END]
        self.assertEqual(complaints(right, name="attend_f16_d64"), [])
        late = [*copies[1:], *WAIT, "PREEXIT", copies[0], *loop, *END]
        self.assertEqual(complaints(late, name="attend_bf16_d128"),
                         ["3 of the 4 copies of a tile precede the wait for the kernel ahead"])
        self.assertIn("no loop", complaints([*copies, *WAIT, *END], name="attend_bf16_d128")[0])

    def test_no_wait(self):
        self.assertIn("does not wait", complaints([*LOADS, *HOT_LOOP, *END])[0])

    def test_kernels_that_do_not_start_early(self):
        measured = measure(assembled([*LOADS, *HOT_LOOP, *END]), {"starts_early": {}, "gemv": [], "threads": {}})
        self.assertEqual(measured[1], [])

    def test_stores_before_the_wait(self):
        for store in STORES:
            found = complaints([*LOADS, store, *WAIT, "PREEXIT", *HOT_LOOP, *END])
            self.assertEqual(len(found), 1, store)
            self.assertRegex(found[0], r"(STG|RED|ATOMG)\.E.* before the wait")
        # Shared memory is a block's own.
        self.assertEqual(complaints([*LOADS, "STS [R4], RZ", *WAIT, *HOT_LOOP, *END]), [])

    def test_stores_of_the_warps_that_do_not_wait(self):
        """Their way goes around the wait, but not around the barrier."""
        code = ["@P0 BRA others", "ACQBULK", "BRA waited", f"others: {STORES[0]}", "waited: BAR.SYNC.DEFER_BLOCKING 0x0"]
        self.assertEqual(len(complaints([*LOADS, *code, *HOT_LOOP, *END])), 1)

    def test_trigger_before_the_wait(self):
        self.assertEqual(complaints([*LOADS, "PREEXIT", *WAIT, *HOT_LOOP, *END]), ["PREEXIT before the wait for the kernel ahead"])

    def test_experts_wait_for_ids(self):
        code = [*WAIT, *LOADS, "@P0 BRA again", "ACQBULK", "again: BAR.SYNC.DEFER_BLOCKING 0x0", "PREEXIT", *HOT_LOOP, *END]
        for name in ("gemv_a4_g64_experts", "gemv_a4_g64_m1"):
            behind = name.endswith("_m1")
            self.assertEqual(len(complaints(code, name)), behind, name)
        # Between two waits it is too late to be too early.
        self.assertEqual(complaints([*WAIT, STORES[0], *LOADS, "ACQBULK", "BAR.SYNC.DEFER_BLOCKING 0x0", *HOT_LOOP, *END],
                                    "gemv_a4_g64_experts"), [])
        self.assertIn("before the wait", complaints([STORES[0], *WAIT, *LOADS, *HOT_LOOP, *END], "gemv_a4_g64_experts")[0])

    def test_a_wait_in_the_first_trip_of_a_loop(self):
        def simt(first, second):
            return [f"steps: {first[0]}", *first[1:], "@P2 BRA later", *WAIT, "PREEXIT", "later: BAR.SYNC.DEFER_BLOCKING 0x0", *second,
                    "FFMA R4, R8, R12, R4", "@P1 BRA steps", *END]

        def of_simt(code, name):
            # One loop, where the kernel has three: only its order is looked at.
            return complaints_of_order(assembled(code, name=name))

        self.assertEqual(of_simt(simt(LOADS, ["NOP"]), "simt_a4"), [])
        self.assertIn("2 of the 4 loads", of_simt(simt(LOADS[:2], LOADS[2:]), "simt_a4")[0])
        self.assertEqual(of_simt(simt(LOADS[:2], LOADS[2:]), "simt_a4_experts"), [])
        self.assertIn("STG.E before", of_simt(simt([*LOADS, STORES[0]], ["NOP"]), "simt_a4")[0])


if __name__ == "__main__":
    unittest.main()
