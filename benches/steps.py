"""What a run of scripts/gpu.sh did: the steps in steps.json, what their results say, and whether the run counts.

A step is a dictionary: name, required, rc (None if it was not run), seconds, limit, fault (None if there is none), and
what was counted in its result: `passed` and `failed` tests, or `records`.
"""
import json
import re

NAME = "steps.json"
FAILED_TEST = re.compile(r"^test (\S+)(?: - \S.*?)? \.\.\. FAILED", re.MULTILINE)
TEST_RESULT = re.compile(r"^test result: \S+\. (\d+) passed; (\d+) failed;", re.MULTILINE)


def count_tests(text):
    """What a test program of Rust printed: (counts, fault)."""
    results = TEST_RESULT.findall(text)
    failed = sorted(set(FAILED_TEST.findall(text)))
    passed = sum(int(count) for count, _ in results)
    counts = {"passed": passed, "failed": failed}
    if failed:
        return counts, "failed tests: " + ", ".join(failed)
    if not results:
        return counts, "no test result in its output"
    if any(int(count) for _, count in results):
        return counts, "failed tests without a name"
    return counts, None if passed else "no test ran"


def parse_records(text):
    """Lines of JSON, each a record with a kind: (records, fault)."""
    records, fault = [], None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
            record["kind"]
        except (ValueError, TypeError, KeyError):
            fault = fault or f"line {number} is no record: {line[:60]!r}"
        else:
            records.append(record)
    return records, fault


def count_records(text):
    """What a program wrote that measures or compares: (counts, fault)."""
    records, fault = parse_records(text)
    figures = [record for record in records if record["kind"] not in ("device", "failure")]
    wrong = sorted({record["name"] for record in figures if record.get("wrong")})
    if wrong and not fault:
        fault = "wrong results: " + ", ".join(wrong)
    return {"records": len(figures)}, fault or (None if figures else "no figures")


def write(folder, steps):
    """At once or not at all: a run may be stopped at any time."""
    new = folder / (NAME + ".new")
    new.write_text(json.dumps(steps, indent=1) + "\n")
    new.replace(folder / NAME)


def read(folder):
    """The steps of a run; None if the folder has none."""
    path = folder / NAME
    return json.loads(path.read_text()) if path.exists() else None


def faults(steps):
    """Why a run does not count: a line for each required step that failed or was not run. Empty if it does."""
    if not steps:
        return [f"{NAME}: no steps"]
    found = [f"{step['name']}: {step['fault'] or ('not run' if step['rc'] is None else 'exit status %d' % step['rc'])}"
             for step in steps if step["required"] and (step["rc"] != 0 or step["fault"])]
    if not any(step.get("passed") for step in steps):
        found.append("tests: none passed")
    return found


def table(steps):
    lines = ["| step | result | seconds | counted |", "|---|---|---|---|"]
    for step in steps:
        result = step["fault"] or {None: "not run", 0: "done"}.get(step["rc"], f"exit status {step['rc']}")
        counted = ", ".join(f"{step[what]} {what}" for what in ("passed", "records") if what in step)
        lines.append(f"| {step['name']}{'' if step['required'] else ' (not required)'} | {result} | {step['seconds']:.0f} | {counted} |")
    return lines
