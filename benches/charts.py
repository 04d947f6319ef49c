"""Charts of a run, as SVG without any library."""
import math
from xml.sax.saxutils import escape

LINKS = "![share of the read bandwidth](share-of-read.svg)\n\n![time over the floor](time-over-floor.svg)\n"

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 60, 200, 40, 50
COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f", "#000000", "#bcbd22", "#9467bd"]
MEGABYTES = (1, 2000)
SHOWN = [  # name of a series, library, name
    ("affine 4-bit g64", "candle-quant", "affine 4-bit g64"),
    ("mxfp4", "candle-quant", "mxfp4"),
    ("nvfp4", "candle-quant", "nvfp4"),
    ("affine 8-bit g64", "candle-quant", "affine 8-bit g64"),
    ("mxfp8", "candle-quant", "mxfp8"),
    ("affine 2-bit g64", "candle-quant", "affine 2-bit g64"),
    ("affine 3-bit g64", "candle-quant", "affine 3-bit g64"),
    ("affine 5-bit g64", "candle-quant", "affine 5-bit g64"),
    ("affine 6-bit g64", "candle-quant", "affine 6-bit g64"),
    ("cuBLAS", "cuBLAS", "dense"),
    ("candle Q4_K", "candle", "Q4K"),
]


class Chart:
    """Points over megabytes, which are on a logarithmic scale."""

    def __init__(self, title, y_name, y_range, y_ticks, y_text):
        self.low, self.high = y_range
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
            f'<text x="{LEFT + self.width / 2}" y="{HEIGHT - 10}" text-anchor="middle">megabytes of weights, scales and activations</text>',
            f'<text transform="translate(14 {TOP + self.height / 2}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>',
        ]
        for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000):
            x = self.x(tick)
            self.parts.append(f'<path d="M{x:.1f} {TOP}V{TOP + self.height}" stroke="#e5e5e5"/>'
                              f'<text x="{x:.1f}" y="{TOP + self.height + 18}" text-anchor="middle">{tick}</text>')
        for tick in y_ticks:
            y = self.y(tick)
            self.parts.append(f'<path d="M{LEFT} {y:.1f}H{LEFT + self.width}" stroke="#e5e5e5"/>'
                              f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(y_text(tick))}</text>')
        self.entries = 0

    width = WIDTH - LEFT - RIGHT
    height = HEIGHT - TOP - BOTTOM

    def x(self, megabytes):
        low, high = map(math.log, MEGABYTES)
        return LEFT + self.width * (math.log(max(megabytes, MEGABYTES[0])) - low) / (high - low)

    def y(self, value):
        inside = min(max(value, self.low), self.high)
        return TOP + self.height * (self.high - inside) / (self.high - self.low)

    def series(self, name, points, colour, dashed=False):
        points = sorted(points)
        path = " ".join(f"{'L' if i else 'M'}{self.x(x):.1f} {self.y(y):.1f}" for i, (x, y) in enumerate(points))
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-opacity="{1 if dashed else 0.35}"{dash}/>')
        if not dashed:
            self.parts += [f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3" fill="{colour}"/>' for x, y in points]
        y = TOP + 10 + 20 * self.entries
        self.entries += 1
        left = WIDTH - RIGHT + 16
        self.parts.append(f'<path d="M{left} {y}h22" stroke="{colour}" stroke-width="2"{dash}/>'
                          f'<text x="{left + 28}" y="{y + 4}">{escape(name)}</text>')

    def text(self):
        return "\n".join([*self.parts, "</svg>", ""])


def series_of(results, value):
    """(name, colour, points) of what is shown, at M = 1, in one dtype each."""
    for (label, library, name), colour in zip(SHOWN, COLOURS):
        rows = results.products(library=library, name=name, m=1)
        dtypes = {row["dtype"] for row in rows}
        dtype = "bf16" if "bf16" in dtypes else next(iter(dtypes), None)
        points = [(row["bytes"] / 1e6, value(row)) for row in rows if row["dtype"] == dtype and value(row) is not None]
        if points:
            yield label, colour, points


def write(results, folder, model):
    """share-of-read.svg and time-over-floor.svg; `model`: microseconds, and share of the read bandwidth, that are the goal."""
    sizes = [MEGABYTES[0] * (MEGABYTES[1] / MEGABYTES[0]) ** (i / 60) for i in range(61)]
    launch_us, share = model
    goal_us = lambda megabytes: launch_us + megabytes * 1e3 / (share * (results.read_gb_per_s or 1))
    chart = Chart(f"{results.gpu}: share of the read bandwidth, one row of x, cold weights", "share of the read bandwidth", (0, 1),
                  [i / 10 for i in range(11)], lambda tick: f"{tick:.0%}")
    for label, colour, points in series_of(results, lambda row: row.get("share_of_read")):
        chart.series(label, points, colour)
    if results.read_gb_per_s:
        chart.series("goal", [(size, size * 1e3 / goal_us(size) / results.read_gb_per_s) for size in sizes], "#444444", dashed=True)
    (folder / "share-of-read.svg").write_text(chart.text())

    def over_floor(row):
        floor = results.floor_us(row["bytes"])
        return row["us"] / floor if floor else None

    chart = Chart(f"{results.gpu}: time over that of reading the same bytes, one row of x, cold weights", "time / time of reading", (0.8, 3),
                  [1, 1.5, 2, 2.5, 3], lambda tick: f"{tick:g}")
    for label, colour, points in series_of(results, over_floor):
        chart.series(label, points, colour)
    if results.read_gb_per_s:
        chart.series("goal", [(size, goal_us(size) / results.floor_us(size * 1e6)) for size in sizes], "#444444", dashed=True)
    (folder / "time-over-floor.svg").write_text(chart.text())
