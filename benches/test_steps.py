"""What outputs of programs mean, and when a run counts: python3 -m unittest discover -s benches"""
import tempfile
import unittest
from pathlib import Path

import report
import steps


def result(passed, failed):
    return f"test result: {'FAILED' if failed else 'ok'}. {passed} passed; {failed} failed; 0 ignored; 0 measured; 3 filtered out; finished in 1.2s\n"


def step(name="tests", rc=0, required=True, fault=None, **counts):
    return {"name": name, "required": required, "rc": rc, "seconds": 1.0, "limit": 9.0, "fault": fault, **counts}


class Tests(unittest.TestCase):
    def test_all_pass(self):
        self.assertEqual(steps.count_tests("test a::b ... ok\n" + result(7, 0)), ({"passed": 7, "failed": []}, None))

    def test_failures_are_named(self):
        text = "test a::b ... FAILED\ntest c - should panic ... FAILED\ntest d ... ok\nfailures:\n    a::b\n    c\n" + result(1, 2)
        self.assertEqual(steps.count_tests(text), ({"passed": 1, "failed": ["a::b", "c"]}, "failed tests: a::b, c"))
        # Of another program before it, and without its line, as kernels print in between.
        self.assertEqual(steps.count_tests(result(0, 1) + result(5, 0))[1], "failed tests without a name")

    def test_no_test(self):
        self.assertEqual(steps.count_tests(result(0, 0))[1], "no test ran")

    def test_a_program_that_ended_early(self):
        for text in ("", "running 2 tests\ntest a ... ok\n", "Segmentation fault\n"):
            self.assertEqual(steps.count_tests(text)[1], "no test result in its output")


class Records(unittest.TestCase):
    def test_figures_are_counted(self):
        self.assertEqual(steps.count_records('{"kind": "device"}\n{"kind": "probe"}\n{"kind": "failure"}\n'), ({"records": 1}, None))

    def test_no_figures(self):
        self.assertEqual(steps.count_records('{"kind": "device"}\n{"kind": "failure"}\n')[1], "no figures")
        self.assertEqual(steps.count_records("")[1], "no figures")

    def test_garbage(self):
        for line in ("garbage", '{"kind": "pro', "[1]", "7", "null", '{"name": "read"}', "", '{"kind": "a"}}'):
            records, fault = steps.parse_records('{"kind": "probe"}\n' + line + '\n{"kind": "floor"}\n')
            self.assertEqual([record["kind"] for record in records], ["probe", "floor"])
            self.assertEqual(fault, f"line 2 is no record: {line!r}")

    def test_wrong_results_are_named(self):
        text = '{"kind": "wrapper", "name": "load_1", "wrong": 0}\n{"kind": "wrapper", "name": "mma", "wrong": 3}\n'
        self.assertEqual(steps.count_records(text)[1], "wrong results: mma")


class Verdict(unittest.TestCase):
    def test_every_required_step_has_to_succeed(self):
        good = step(passed=3)
        self.assertEqual(steps.faults([good, step("peers", 1, required=False), step("ncu", None, required=False, fault="not run")]), [])
        self.assertEqual(steps.faults([good, step("bench", None)]), ["bench: not run"])
        self.assertEqual(steps.faults([good, step("bench", 3)]), ["bench: exit status 3"])
        self.assertEqual(steps.faults([good, step("bench", 0, fault="no figures")]), ["bench: no figures"])

    def test_a_run_without_tests_or_steps(self):
        self.assertEqual(steps.faults([step("compile"), step(passed=0)]), ["tests: none passed"])
        for nothing in ([], None):
            self.assertEqual(steps.faults(nothing), ["steps.json: no steps"])

    def test_a_report_starts_with_the_verdict(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            (folder / "probe.jsonl").write_text('{"kind": "device", "name": "NVIDIA Test GPU"}\n')
            for written, text in ((None, "nobody knows which steps succeeded"), ([step("core", passed=3)], "3 tests passed"),
                                  ([step("core", 101, passed=3)], "**This run failed:**\n\n* core: exit status 101")):
                if written:
                    steps.write(folder, written)
                report.record(folder, folder / "into")
                self.assertIn(text, (folder / "into/README.md").read_text().split("## Goals")[0])


if __name__ == "__main__":
    unittest.main()
