"""The pictures of the README, made from what is recorded in benches/: python3 benches/pictures.py

docs/speed.svg and docs/perplexity.svg are of tables under benches/results, docs/chat.svg of benches/chat.ansi, which
benches/record_chat.py records. test_pictures.py fails if they are others than these records make.
"""
import statistics
from pathlib import Path

import record_chat
import svg
import terminal

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches/results"
SPEED = RESULTS / "2026-11-22-epyc-2-cores"
# Kernels for one row are the same in all of these, those for eight rows in the first three.
RUNS = ["matmul", "matmul_2", "matmul_3", "matmul_1288df4", "matmul_1288df4_2", "matmul_1288df4_3", "matmul_fe933cf"]
PERPLEXITY = RESULTS / "2026-11-25-xeon-2-cores/perplexity.md"


def table(path):
    """The rows of the first table of a Markdown file, by the names of its columns."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names, _, *rows = cells
    return [dict(zip(names, row, strict=True)) for row in rows]


class Panel:
    """Bars of one number of rows. `shape` is that of the weight as the tables name it, `most` where the axis ends, in ms."""

    def __init__(self, rows, shape, names, most, title, subtitle):
        self.most, self.title, self.subtitle = most, title, subtitle
        self.runs = [{row["weights"]: row for row in table(SPEED / f"{name}.md") if (row["N x K"], row["M"], row["x"]) == (shape, str(rows), "f32")}
                     for name in names]

    def times(self, weights):
        """(median, least, greatest) in ms."""
        found = [float(run[weights]["ms"]) for run in self.runs]
        return statistics.median(found), min(found), max(found)

    def errors(self, weights):
        return [float(run[weights]["error"]) for run in self.runs]


def speed():
    cached, streamed = "11008x4096", "11008x4096 streamed"
    panels = [
        Panel(1, streamed, RUNS, 1.6, "1 row", "7 runs"),
        Panel(8, streamed, RUNS[:3], 3.2, "8 rows", "3 runs"),
        Panel(32, cached, RUNS[:1], 13, "32 rows", "1 run"),
        Panel(512, cached, RUNS[:1], 130, "512 rows", "1 run"),
    ]
    # As the tables name them, and how they are called here.
    groups = [
        ("8 bits", [("candle Q8_0", None), ("affine 8-bit g64", "affine 8-bit"), ("mxfp8", "MXFP8")]),
        ("4 bits", [("candle Q4_K", None), ("affine 4-bit g64", "affine 4-bit"), ("mxfp4", "MXFP4"), ("nvfp4", "NVFP4")]),
        ("fewer", [("affine 3-bit g64", "affine 3-bit"), ("affine 2-bit g64", "affine 2-bit")]),
        ("32 bits", [("candle dense f32", None)]),
    ]
    left, top, pitch, gap, bar = 178, 104, 21, 13, 13
    column, inside = 172, 118
    height = top + sum(len(rows) * pitch + gap for _, rows in groups) + 28
    over = lambda panel: panel.times("affine 4-bit g64")[0] / panel.times("candle Q4_K")[0]
    title = f"4 bits: one row takes {over(panels[0]):.1f} times as long as with candle’s Q4_K, 512 rows {over(panels[-1]):.1f} times"
    picture = svg.Picture(880, height, title, "Milliseconds for x times W transposed, by format of W and rows of x, candle-quant beside candle.")
    picture.text(20, 30, title, size=16, bold=True)
    picture.text(20, 50, "Milliseconds for x · Wᵀ, W of 11008 x 4096: one row of x is a token that is decoded, many are a prompt. Medians;", "muted")
    picture.text(20, 66, "lines go from the least to the greatest. W comes from memory for 1 and 8 rows. Two cores of Zen 5, 2026-11-22.", "muted")
    for at, panel in enumerate(panels):
        x = left + at * column
        picture.text(x, top - 10, panel.title, bold=True)
        picture.text(x + 12 + 7 * len(panel.title), top - 10, panel.subtitle, "muted", size=11)
        picture.path(f"M{x + 0.5} {top}V{height - 34}", "grid")
    y = top
    for group, rows in groups:
        picture.text(20, y + bar + 1, group, "muted")
        for weights, ours in rows:
            colour = "ours" if ours else "theirs"
            picture.text(left - 10, y + bar + 1, ours or weights.replace("dense ", ""), "ours" if ours else "ink", anchor="end")
            for at, panel in enumerate(panels):
                x = left + at * column
                bar_of(picture, x, y + 3, inside, bar, colour, panel, weights)
            y += pitch
        y += gap
    weights = [weights for _, rows in groups for weights, _ in rows]
    errors = lambda chosen: [error for panel in panels for each in chosen for error in panel.errors(each)]
    rounded = [each for each in weights if each.startswith("candle Q")]
    exact = [each for each in weights if each not in rounded]
    picture.text(20, height - 14, f"Blue: candle-quant. Grey: candle 0.11.1, whose Q8_0 and Q4_K round x to 8 bits (error {span(errors(rounded))}, others "
                 f"{span(errors(exact))}).", "muted")
    return str(picture)


def bar_of(picture, x, y, inside, height, colour, panel, weights):
    median, least, greatest = panel.times(weights)
    scale = inside / panel.most
    # What is longer than the axis ends in a gap, and its number says how long it is.
    is_cut = median > panel.most
    length = inside if is_cut else median * scale
    picture.rect(x, y, length, height, colour)
    if is_cut:
        picture.path(f"M{x + length - 16:.1f} {y + height + 2}l6 {-height - 4}", "page", 3)
        end = length
    else:
        if greatest > least:
            picture.path(f"M{x + least * scale:.1f} {y + height / 2}H{x + greatest * scale:.1f}", "ink", 1)
        end = max(length, greatest * scale)
    picture.text(x + end + 5, y + height - 2, digits(median), size=11)


def span(errors):
    least, greatest = (f"{error:.0e}".replace("e-0", "e-") for error in (min(errors), max(errors)))
    return f"{least} to {greatest}"


def perplexity():
    rows = {row["format"]: (float(row["bits per weight"]), float(row["perplexity"])) for row in table(PERPLEXITY)}
    affine = {bits: rows[f"affine {bits}-bit g64"] for bits in range(8, 0, -1) if bits != 7}
    dense = rows["bf16"][1]
    stories = len((ROOT / "assets/heldout.txt").read_text().strip().split("\n\n"))
    rise = lambda bits: f"{affine[bits][1] / dense - 1:.1%}".replace("%", " %")
    title = f"Perplexity rises by {rise(4)} at 4 bits and by {rise(3)} at 3; 2 bits break this model"
    width, height = 880, 372
    left, right, top, bottom = 64, 860, 84, 318
    most_bits, (low, high) = 9.2, (1.2, 1.2175)
    x = lambda bits: left + (right - left) * (bits - 1) / (most_bits - 1)
    y = lambda value: bottom - (bottom - top) * (value - low) / (high - low)
    picture = svg.Picture(width, height, title, "Perplexity by bits per weight, for formats of weights.")
    picture.text(20, 30, title, size=16, bold=True)
    picture.text(20, 50, f"Perplexity of the bundled model on {stories} stories that it has not seen, all weights in one format. Less is better.", "muted")
    for tick in (1.2, 1.205, 1.21, 1.215):
        picture.path(f"M{left} {y(tick):.1f}H{right}", "grid")
        picture.text(left - 8, y(tick) + 4, f"{tick:.3f}", "muted", anchor="end")
    for tick in range(1, 10):
        picture.text(x(tick), bottom + 20, str(tick), "muted", anchor="middle")
    picture.path(f"M{left} {bottom}H{right}", "muted")
    picture.text(right, bottom + 40, "bits per weight, scales included", "muted", anchor="end")
    picture.path(f"M{left} {y(dense):.1f}H{right}", "theirs", dash="4 4")
    picture.text(left + 6, y(dense) - 6, f"bf16, 16 bits per weight: {dense:.3f}", "muted")
    # The line as far as the axis goes; what is beyond stands at its end in numbers.
    inside = [point for point in affine.values() if point[1] <= high]
    (last_bits, last), (bits, value) = inside[-1], next(point for point in affine.values() if point[1] > high)
    end = last_bits + (bits - last_bits) * (high - last) / (value - last)
    path = "L".join(f"{x(bits):.1f} {y(value):.1f}" for bits, value in [*inside, (end, high)])
    picture.path("M" + path, "ours", 2)
    for bits, (size, value) in affine.items():
        name = f"affine {bits}-bit"
        if value > high:
            picture.path(f"M{x(size):.1f} {top + 18}V{top}m-5 7l5 -7l5 7", "ours", 2)
            picture.text(x(size), top + 34, name, "ours", anchor="middle")
            picture.text(x(size), top + 50, f"{value:,.2f}" if value < 100 else f"{value:,.0f}", "ours", anchor="middle")
            continue
        picture.circle(x(size), y(value), 4, "ours")
        across, down, anchor = {8: (-4, 18, None), 6: (0, 18, "middle"), 5: (0, 18, "middle"), 4: (-6, 18, "end")}.get(bits, (10, 4, None))
        picture.text(x(size) + across, y(value) + down, name, "ours", anchor=anchor)
    for name, across, down, anchor in [("mxfp8", 0, -9, "middle"), ("mxint8", 4, 18, "end"), ("mxfp4", -9, 4, "end"), ("nf4", -9, 4, "end"),
                                       ("nvfp4", 10, 1, None)]:
        size, value = rows[name]
        picture.circle(x(size), y(value), 4, "other")
        picture.text(x(size) + across, y(value) + down, name.upper(), "other", anchor=anchor)
    return str(picture)


def digits(value):
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def chat():
    said = ", then ".join(f"“{line}”" for line in record_chat.TYPED)
    return terminal.picture(record_chat.RECORD.read_text(), record_chat.COLUMNS, "A terminal with candle-quant chat",
                            f"The bundled model is started with: {record_chat.COMMAND}. Typed: {said}. It answers with short stories.")


PICTURES = {"speed.svg": speed, "perplexity.svg": perplexity, "chat.svg": chat}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ROOT / "docs" / name).write_text(draw())
        print(f"docs/{name}")
