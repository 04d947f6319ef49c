"""The tables of docs/tuning.md."""
import unittest

from made_up import kernel
from measure import measure
from tables import BEGIN, END, inserted, tables
from whole import Whole

LAUNCHES = {"starts_early": {}, "gemv": []}


class Tables(unittest.TestCase):
    def test_rows_are_those_of_one_row_of_x(self):
        names = ["gemv_a4_g64_m1", "gemv_a4_g64_m2", "gemv_a4_g64_experts", "tiles_a4_f16", "absmax"]
        measured = {name: measure(kernel(name=name), LAUNCHES)[0] for name in names}
        measured["gemv_a4_g64_m1"].wholes = {"6144x4096": Whole(3.6259, 4.376, 0.8544)}
        lines = tables(measured, "13.0.88").splitlines()
        self.assertEqual([line for line in lines if line.startswith("| a")],
                         ["| a4_g64 | 80 | 0.34 | 8% | 8% | 48 | 16 |", "| a4_g64 | 6144x4096 | 3.63 | 4.38 | 85% |"])
        self.assertIn("nvcc 13.0.88", lines[0])

    def test_they_stand_between_two_lines(self):
        document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
        new = f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
        self.assertEqual((inserted(document, "new"), inserted(new, "new")), (new, new))
        for broken in ("before", f"{BEGIN}\n", f"{END}\n"):
            with self.assertRaises(ValueError):
                inserted(broken, "new")


if __name__ == "__main__":
    unittest.main()
