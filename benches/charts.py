"""Charts of a run on a GPU."""
import math

import svg

LINKS = "![share of the read bandwidth](share-of-read.svg)\n\n![time over the floor](time-over-floor.svg)\n"

WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 60, 200, 40, 50
COLOURS = {
    "blue": ("#0072b2", "#4aa8e0"),
    "red": ("#d55e00", "#f0803c"),
    "green": ("#009e73", "#2bc49a"),
    "pink": ("#cc79a7", "#e3a0c6"),
    "orange": ("#e69f00", "#f0b93a"),
    "sky": ("#56b4e9", "#8dd0f7"),
    "brown": ("#8c564b", "#b98276"),
    "grey": ("#7f7f7f", "#9a9a9a"),
    "black": ("#000000", "#ffffff"),
    "olive": ("#bcbd22", "#d4d54a"),
    "purple": ("#9467bd", "#b48fdc"),
    "goal": ("goal", "#bbbbbb"),
}
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
        self.picture = svg.Picture(WIDTH, HEIGHT, title, colours=COLOURS)
        self.picture.text(LEFT, 24, title, size=15)
        self.picture.text(LEFT + self.width / 2, HEIGHT - 10, "megabytes of weights, scales and activations", anchor="middle")
        self.picture.text(0, 0, y_name, anchor="middle", transform=f"translate(14 {TOP + self.height / 2}) rotate(-90)")
        for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000):
            self.picture.path(f"M{self.x(tick):.1f} {TOP}V{TOP + self.height}", "grid")
            self.picture.text(self.x(tick), TOP + self.height + 18, str(tick), anchor="middle")
        for tick in y_ticks:
            self.picture.path(f"M{LEFT} {self.y(tick):.1f}H{LEFT + self.width}", "grid")
            self.picture.text(LEFT - 6, self.y(tick) + 4, y_text(tick), anchor="end")
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
        dash = "6 4" if dashed else None
        self.picture.path(path, colour, dash=dash, stroke_opacity=None if dashed else "0.35")
        if not dashed:
            for x, y in points:
                self.picture.circle(self.x(x), self.y(y), 3, colour)
        y = TOP + 10 + 20 * self.entries
        self.entries += 1
        left = WIDTH - RIGHT + 16
        self.picture.path(f"M{left} {y}h22", colour, 2, dash)
        self.picture.text(left + 28, y + 4, name)

    def __str__(self):
        return str(self.picture)


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
        chart.series("goal", [(size, size * 1e3 / goal_us(size) / results.read_gb_per_s) for size in sizes], "goal", dashed=True)
    (folder / "share-of-read.svg").write_text(str(chart))

    def over_floor(row):
        floor = results.floor_us(row["bytes"])
        return row["us"] / floor if floor else None

    chart = Chart(f"{results.gpu}: time over that of reading the same bytes, one row of x, cold weights", "time / time of reading", (0.8, 3),
                  [1, 1.5, 2, 2.5, 3], lambda tick: f"{tick:g}")
    for label, colour, points in series_of(results, over_floor):
        chart.series(label, points, colour)
    if results.read_gb_per_s:
        chart.series("goal", [(size, goal_us(size) / results.floor_us(size * 1e6)) for size in sizes], "goal", dashed=True)
    (folder / "time-over-floor.svg").write_text(str(chart))
