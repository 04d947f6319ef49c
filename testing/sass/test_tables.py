"""The tables of docs/tuning.md."""
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from made_up import kernel
from measure import measure
from sass_gate import check_document
from tables import BEGIN, END, inserted, tables
from whole import Whole

LAUNCHES = {"starts_early": {}, "gemv": [], "threads": {}}


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

    def test_the_gate_fails_if_they_are_stale_and_writes_them(self):
        measured = {"gemv_a4_g64_m1": measure(kernel(), LAUNCHES)[0]}
        with tempfile.TemporaryDirectory() as folder, mock.patch("tables.DOCUMENT", Path(folder, "tuning.md")) as document:
            document.write_text(f"{BEGIN}\n{END}\n")
            self.assertIn("not those of the machine code", check_document(measured, "13.0.88", write=False)["tuning.md"][0])
            self.assertEqual(check_document(measured, "13.0.88", write=True), {})
            self.assertIn("| a4_g64 | 80 |", document.read_text())
            self.assertEqual(check_document(measured, "13.0.88", write=False), {})
            document.write_text(document.read_text().replace("| 80 |", "| 81 |"))
            self.assertEqual(list(check_document(measured, "13.0.88", write=False)), ["tuning.md"])


if __name__ == "__main__":
    unittest.main()
