"""The tables of docs/tuning.md, which stand between two lines of their own."""
from pathlib import Path

from gemv import Gemv
from measure import GOAL_OF_HMMA_CHAIN

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "tuning.md"
BEGIN, END = "<!-- printed by scripts/sass-gate.sh --update -->", "<!-- end -->"


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(measured, version):
    """Of {name: Measured}."""
    loops, wholes = [], []
    for name, figures in sorted(measured.items()):
        gemv = Gemv.from_name(name)
        if not gemv or gemv.rows_of_x != 1 or name.endswith("_experts"):
            continue
        loop = figures.hot_loop
        loops.append([gemv.format, str(figures.registers), f"{loop.per_weight:.2f}", f"{loop.issue:.0%}", f"{loop.alu:.0%}",
                      str(loop.kilobytes_in_flight), str(figures.hmma_chain)])
        wholes += [[gemv.format, shape, f"{whole.per_weight:.2f}", f"{whole.limit:.2f}", f"{whole.busiest:.0%}"]
                   for shape, whole in figures.wholes.items()]
    return "\n".join([
        f"Compiled for sm_90 by nvcc {version}. The hot loop, of which the goal is at most {GOAL_OF_HMMA_CHAIN} HMMA in a row:",
        "",
        table(["format", "registers", "instructions per weight", "issue slots", "integer pipe", "KB in flight", "HMMA in a row"], loops),
        "",
        "The whole kernel at the shapes of some layers, N x K:",
        "",
        table(["format", "shape", "instructions per weight", "limit", "issue slots of the busiest multiprocessor"], wholes),
    ])


def inserted(document, text):
    """The document with this text between its two lines."""
    before, begin, rest = document.partition(BEGIN + "\n")
    _, end, after = rest.partition(END + "\n")
    if not begin or not end:
        raise ValueError(f"{DOCUMENT.name} has no lines {BEGIN} and {END}")
    return f"{before}{begin}\n{text}\n\n{end}{after}"
