"""Results of scripts/gpu.sh: a summary, and what is kept under benches/results.

    python3 benches/report.py summary DIR    the figures against the goals, and what the probes answer
    python3 benches/report.py record DIR     all records as JSON and CSV, a report and charts, into
                                             benches/results/<date>-<gpu>; --into FOLDER chooses another
"""
import argparse
import csv
import datetime
import json
import re
import shutil
import sys
from pathlib import Path

import charts
import steps

RESULTS = Path(__file__).resolve().parent / "results"
OURS = "candle-quant"
COLUMNS = [
    "kind", "library", "name", "dtype", "n", "k", "m", "experts", "top_k", "us", "p10", "p90", "bytes", "gb_per_s", "share_of_read", "error",
    "error_over_rounding", "launches", "copies", "note",
]
KEPT = [steps.NAME, "clocks.csv", "log.txt", "tests.txt"]

# DESIGN: one launch in a graph takes no longer than this and the bytes at that share of the read bandwidth.
LAUNCH_US, SHARE = 2.0, 0.92
LEAST_SHARE_FROM_BYTES = 80e6
LEAST_SHARE = {"affine 4-bit g64": 0.90, "mxfp4": 0.90, "nvfp4": 0.90}
LEAST_SHARE_OTHERS = 0.85
OVER_DENSE = {(4096, 4096): 2.3, (8192, 8192): 2.8, (16384, 16384): 3.2}
ROWS_OVER_ONE = {8: 1.15, 16: 1.3}
MANY_ROWS, MANY_ROWS_SHARE = 512, 0.9
# Microseconds of so many rows, on an H200, of a weight of this shape.
TILES, TILES_US = (14336, 4096), {16: 15.0, 64: 26.0, 256: 90.0}
# Of attention of a prompt's last tokens behind so many.
LEAST_TFLOPS, TFLOPS_FROM = 250.0, 8192
# Experts, by sizes inside and outside one, and how many there are.
MIXTRAL, MIXTRAL_US = (14336, 4096, 8), 60.0
GPT_OSS, GPT_OSS_OVER_FLOOR = (2880, 2880, 32), 2.0
MANY_TOKENS_SHARE = 0.6
MOST_ERROR_OVER_ROUNDING = 1.05
# Decode steps, by layout and context, on an H200: the least tokens/s, and what was computed for all kernels of the design, of which
# neighbours overlap in the graph or do not.
LLAMA_3_8B, QWEN3_4B = "Llama-3-8B affine 4-bit g64", "Qwen3-4B affine 4-bit g64"
QWEN3_30B, GPT_OSS_20B = "Qwen3-30B-A3B affine 4-bit g64", "gpt-oss-20b affine 4-bit g64"
GPT_OSS_PUBLISHED = "gpt-oss-20b bf16"  # but for its experts
LEAST_TOKENS_PER_S = {(LLAMA_3_8B, 128): 600, (LLAMA_3_8B, 4096): 560, (LLAMA_3_8B, 32768): 360, (QWEN3_4B, 128): 850,
                      (QWEN3_30B, 128): 700, (GPT_OSS_20B, 128): 1000, (GPT_OSS_PUBLISHED, 128): 700}
COMPUTED_TOKENS_PER_S = {(LLAMA_3_8B, 128): "812 or 669", (LLAMA_3_8B, 4096): "760 or 615", (LLAMA_3_8B, 32768): "437",
                         (QWEN3_4B, 128): "1126 or 873", (QWEN3_4B, 4096): "1017", (QWEN3_4B, 32768): "482"}


class Results:
    """The records of one run."""

    def __init__(self, folder):
        self.records = []
        self.steps = steps.read(Path(folder))
        for path in sorted(Path(folder).glob("*.jsonl")):
            self.records += steps.parse_records(path.read_text(errors="replace"))[0]
        reads = [record["gb_per_s"] for record in self.of("floor", name="read")]
        self.read_gb_per_s = max(reads, default=None)
        for record in self.products():
            if self.read_gb_per_s and "share_of_read" not in record:
                record["share_of_read"] = record["gb_per_s"] / self.read_gb_per_s

    def of(self, kind, **fields):
        return [record for record in self.records
                if record["kind"] == kind and all(record.get(name) == value for name, value in fields.items())]

    def products(self, **fields):
        return self.of("product", **fields)

    def probes(self, name):
        return self.of("probe", name=name)

    def dense_of_equal_flops(self, experts):
        """The record of cuBLAS on as many multiplications as those experts take."""
        same = {field: experts[field] for field in ("dtype", "n", "k", "m", "experts", "top_k")}
        return next(iter(self.of("experts", library="cuBLAS", **same)), None)

    @property
    def gpu(self):
        devices = self.of("device")
        return devices[0]["name"] if devices else "unknown GPU"

    def floor_us(self, size):
        """The least time in which so many bytes were read, between the sizes that were."""
        points = sorted((record["bytes"], record["us"]) for record in self.of("floor", name="read"))
        if not points:
            return None
        for (left, left_us), (right, right_us) in zip(points, points[1:]):
            if left <= size <= right:
                return left_us + (right_us - left_us) * (size - left) / (right - left)
        return points[0][1] if size < points[0][0] else size / self.read_gb_per_s / 1e3


def goals(results):
    """(goal, how many figures there are, those that miss it) of what the run can decide."""
    checks = []

    def check(name, figures):
        figures = list(figures)
        checks.append((name, len(figures), [text for met, text in figures if not met]))

    ours = results.products(library=OURS)
    read = results.read_gb_per_s
    name = lambda r: f"{r['name']} {r['dtype']} {r['n']}x{r['k']} M={r['m']}"
    if read:
        model = lambda r: LAUNCH_US + r["bytes"] / (SHARE * read * 1e3)
        check(f"M = 1: at most {LAUNCH_US:g} us + bytes / ({SHARE:g} of read)",
              ((r["us"] <= model(r), f"{name(r)}: {r['us']:.2f} us, model {model(r):.2f}") for r in ours if r["m"] == 1))
        least = lambda r: LEAST_SHARE.get(r["name"], LEAST_SHARE_OTHERS)
        check("M = 1, 80 MB and more: 90 % of read for 4 bits, 85 % for others",
              ((r["share_of_read"] >= least(r), f"{name(r)}: {r['share_of_read']:.0%}")
               for r in ours if r["m"] == 1 and r["bytes"] >= LEAST_SHARE_FROM_BYTES))
    by_case = {(r["name"], r["dtype"], r["n"], r["k"], r["m"]): r for r in ours}
    for rows, most in ROWS_OVER_ONE.items():
        pairs = [(r, by_case.get((r["name"], r["dtype"], r["n"], r["k"], 1))) for r in ours if r["m"] == rows]
        check(f"M = {rows}: at most {most:g} times the time of M = 1",
              ((r["us"] <= most * one["us"], f"{name(r)}: {r['us'] / one['us']:.2f}") for r, one in pairs if one))
    dense = {(r["dtype"], r["n"], r["k"], r["m"]): r for r in results.products(library="cuBLAS")}
    faster = [(r, dense.get((r["dtype"], r["n"], r["k"], 1))) for r in ours
              if r["m"] == 1 and (r["n"], r["k"]) in OVER_DENSE and r["name"] in LEAST_SHARE]
    check("M = 1, 4 bits, over cuBLAS: 2.3 at 4096^2, 2.8 at 8192^2, 3.2 at 16384^2",
          ((d["us"] / r["us"] >= OVER_DENSE[r["n"], r["k"]], f"{name(r)}: {d['us'] / r['us']:.2f}") for r, d in faster if d))
    many = [(r, dense.get((r["dtype"], r["n"], r["k"], r["m"]))) for r in ours if r["m"] >= MANY_ROWS]
    check(f"M >= {MANY_ROWS}: at least {MANY_ROWS_SHARE:g} of the speed of cuBLAS",
          ((d["us"] / r["us"] >= MANY_ROWS_SHARE, f"{name(r)}: {d['us'] / r['us']:.2f}") for r, d in many if d))
    tiles = [r for r in ours if r["name"] == "affine 4-bit g64" and (r["n"], r["k"]) == TILES and r["m"] in TILES_US]
    check("14336x4096, 4 bits, on an H200: at most 15, 26, 90 us at M = 16, 64, 256",
          ((r["us"] <= TILES_US[r["m"]], f"{name(r)}: {r['us']:.1f} us") for r in tiles))
    check(f"attention of prompts behind {TFLOPS_FROM} tokens and more, on an H200: at least {LEAST_TFLOPS:g} TFLOP/s",
          ((r["tflops"] >= LEAST_TFLOPS, f"{r['m']} of {r['context']} tokens: {r['tflops']:.0f}")
           for r in results.of("prefill attention") if r["context"] >= TFLOPS_FROM))
    check(f"error at most {MOST_ERROR_OVER_ROUNDING:g} times that of rounding",
          ((r["error_over_rounding"] <= MOST_ERROR_OVER_ROUNDING, f"{name(r)}: {r['error_over_rounding']:.3f}") for r in ours))
    experts = results.of("experts", library=OURS)
    label = lambda r: f"{r['name']} {r['dtype']} {block(r)}, {r['m']} tokens"
    sizes = lambda r: (r["n"], r["k"], r["experts"])
    check(f"experts of Mixtral, one token, 4 bits: at most {MIXTRAL_US:g} us",
          ((r["us"] <= MIXTRAL_US, f"{label(r)}: {r['us']:.2f} us")
           for r in experts if r["m"] == 1 and sizes(r) == MIXTRAL and r["name"] in LEAST_SHARE))
    floors = [(r, results.floor_us(r["bytes"])) for r in experts if r["m"] == 1 and sizes(r) == GPT_OSS and r["name"] == "mxfp4"]
    check(f"experts of gpt-oss, one token, mxfp4: at most {GPT_OSS_OVER_FLOOR:g} times reading the bytes",
          ((r["us"] <= GPT_OSS_OVER_FLOOR * floor, f"{label(r)}: {r['us'] / floor:.2f}") for r, floor in floors if floor))
    many = [(r, results.dense_of_equal_flops(r)) for r in experts if r["m"] >= MANY_ROWS]
    check(f"experts of {MANY_ROWS} tokens and more: at least {MANY_TOKENS_SHARE:g} of the speed of cuBLAS",
          ((d["us"] / r["us"] >= MANY_TOKENS_SHARE, f"{label(r)}: {d['us'] / r['us']:.2f}") for r, d in many if d))
    bars = [(r, LEAST_TOKENS_PER_S.get((r["name"], r["context"]))) for r in results.of("decode step", mode="graph")]
    check("decode steps, on an H200: Llama-3-8B, 4 bits, 600, 560, 360 tokens/s behind 128, 4096, 32768 tokens; Qwen3-4B 850, "
          "Qwen3-30B-A3B 700, gpt-oss-20b 1000, as published 700 behind 128",
          ((r["tokens_per_s"] >= bar, f"{r['name']} behind {r['context']}: {r['tokens_per_s']:.1f}") for r, bar in bars if bar))
    return checks


def block(record):
    """Which experts a record is of."""
    return f"{record['n']}x{record['k']}, {record['top_k']} of {record['experts']}"


def answers(results):
    """What the probes say about the open questions of docs/gpu-facts.md: {number: text}."""
    found = {}
    large = [r for r in results.products(library=OURS, m=1, n=57344, k=8192) if r["name"] in LEAST_SHARE]
    if large:
        found[1] = "; ".join(f"{r['name']} {r['dtype']} {r['us']:.1f} us, {r['share_of_read']:.0%} of read" for r in large
                             if "share_of_read" in r)
    rates = {(r["instruction"], r["threads"]): r["per_clock"] for r in results.probes("issue rate")}
    if rates:
        found[2] = ", ".join(f"{name} {rate:g}" for (name, threads), rate in rates.items()) + " per clock"
    chunks = results.probes("chunks")
    if chunks:
        found[3] = "; ".join(f"{r['chunk_bytes']} bytes, {r['megabytes']:.0f} MB: {r['gb_per_s_no_allocate']:.0f} GB/s not kept, "
                             f"{r['gb_per_s_kept']:.0f} kept" for r in chunks)
    tuned = results.probes("gemv")
    if tuned:
        best = {}
        for r in tuned:
            case = (r["format"], r["m"], r["n"], r["k"], r["ring_words"], r["resident_blocks"])
            best[case] = min(best.get(case, r["us_dependent"]), r["us_dependent"])
        cases = {case[:4] for case in best}
        found[4] = "; ".join(
            f"{format} M={m} {n}x{k}: " + ", ".join(f"{words} words, {blocks or 'all'} blocks {us:.2f} us"
                                                    for (*case, words, blocks), us in sorted(best.items()) if tuple(case) == (format, m, n, k))
            for format, m, n, k in sorted(cases) if (n, k) in ((4096, 4096), (57344, 8192)))
    subnormal = [r for r in results.of("wrapper") if "subnormal" in r["name"]]
    if subnormal:
        found[5] = "; ".join(f"{r['name']}: {'exact' if r['wrong'] == 0 else str(r['wrong']) + ' wrong'}" for r in subnormal)
    dependent = results.probes("dependent launch")
    if dependent:
        found[6] = "; ".join(f"{r['megabytes']:.1f} MB: {r['us_plain']:.2f} us plain, {r['us_wait_first']:.2f} wait first, "
                             f"{r['us_load_first']:.2f} load first" for r in dependent)
    empty = results.probes("empty launch")
    if empty:
        found[7] = "; ".join(f"{r['blocks']} blocks: {r['us_in_graph']:.2f} us, dependent {r['us_in_graph_dependent']:.2f}" for r in empty)
    splits = [r for r in results.probes("split of k") if r["splits"] > 1]
    if splits:
        found[8] = "; ".join(f"N={r['n']} in {r['splits']}: memory {r['us_memory']:.2f} us, cluster {r['us_cluster']:.2f}" for r in splits)
    reads = [r for r in results.probes("read") if r["hint"] == "no_allocate"]
    if reads:
        by_flight = {}
        for r in reads:
            flight = r["kilobytes_in_flight"]
            by_flight[flight] = max(by_flight.get(flight, 0), r["gb_per_s"])
        found[9] = ", ".join(f"{flight} KB in flight {speed} GB/s" for flight, speed in sorted(by_flight.items()))
    clock = results.probes("clock under load")
    if clock:
        found[10] = f"{clock[0]['ghz']:.3f} GHz ({clock[0]['least']:.3f} to {clock[0]['most']:.3f})"
    decoded = results.of("decode step")
    if decoded:
        found[11] = "; ".join(f"{r['name']} behind {r['context']} tokens, {r['mode']}: {r['us']:.1f} us" for r in decoded)
    return found


def table_of_one_row(results):
    """Microseconds and share of read at M = 1, a line for each shape."""
    rows = results.products(m=1)
    shapes = sorted({(r["n"], r["k"]) for r in rows}, key=lambda shape: shape[0] * shape[1])
    dtypes = sorted({r["dtype"] for r in rows})
    lines = []
    for dtype in dtypes:
        names = list(dict.fromkeys((r["library"], r["name"]) for r in rows if r["dtype"] == dtype))
        cells = {(r["library"], r["name"], r["n"], r["k"]): r for r in rows if r["dtype"] == dtype}
        lines += [f"\nM = 1, {dtype}: microseconds (share of the read bandwidth)\n",
                  "| N x K | " + " | ".join(f"{library} {name}" for library, name in names) + " |",
                  "|---" * (len(names) + 1) + "|"]
        for n, k in shapes:
            texts = []
            for library, name in names:
                r = cells.get((library, name, n, k))
                share = f" ({r['share_of_read']:.0%})" if r and "share_of_read" in r else ""
                texts.append(f"{r['us']:.2f}{share}" if r else "")
            lines.append(f"| {n}x{k} | " + " | ".join(texts) + " |")
    return lines


def table_of_experts(results):
    """Microseconds of all three projections, a line for each block and number of tokens."""
    rows = results.of("experts")
    names = list(dict.fromkeys((r["library"], r["name"]) for r in rows))
    if not rows:
        return []
    lines = ["\nExperts: microseconds (share of the read bandwidth; of many tokens, of the speed of cuBLAS)\n",
             "| inside x outside, top k | tokens | " + " | ".join(f"{library} {name}" for library, name in names) + " |",
             "|---" * (len(names) + 2) + "|"]
    for experts, m in dict.fromkeys((block(r), r["m"]) for r in rows):
        texts = []
        for library, name in names:
            r = next((r for r in rows if (r["library"], r["name"], block(r), r["m"]) == (library, name, experts, m)), None)
            dense = r and library == OURS and results.dense_of_equal_flops(r)
            share = dense["us"] / r["us"] if dense else r and library == OURS and r.get("share_of_read")
            texts.append(f"{r['us']:.2f}" + (f" ({share:.0%})" if share else "") if r else "")
        lines.append(f"| {experts} | {m} | " + " | ".join(texts) + " |")
    return lines


def table_of_decode_steps(results):
    """Tokens/s, beside what is wanted and what was computed, a line for each layout and context."""
    rows = results.of("decode step")
    if not rows:
        return []
    lines = ["\nDecode steps, one sequence: tokens/s, least to greatest of the rounds (share of the read bandwidth)\n",
             "| layout | context | wanted | computed | as a graph | us | kernel by kernel | us | launches |", "|---" * 9 + "|"]
    for case in sorted({(r["name"], r["context"]) for r in rows}):
        cells, launches = [], ""
        for mode in ("graph", "eager"):
            r = next((r for r in rows if (r["name"], r["context"], r["mode"]) == (*case, mode)), None)
            share = f" ({r['gb_per_s'] / results.read_gb_per_s:.0%})" if r and results.read_gb_per_s else ""
            cells += [f"{r['tokens_per_s']:.1f}, {r['least']:.1f} to {r['greatest']:.1f}{share}", f"{r['us']:.1f}"] if r else ["", ""]
            launches = r["launches"] if r else launches
        wanted, computed = LEAST_TOKENS_PER_S.get(case, ""), COMPUTED_TOKENS_PER_S.get(case, "")
        lines.append(f"| {case[0]} | {case[1]} | {wanted} | {computed} | " + " | ".join(cells) + f" | {launches} |")
    return [*lines, "\nWanted and computed are of an H200; computed for all kernels of the design, which overlap in the graph or do not."]


def of_the_run(results):
    """Whether the figures are of a run that counts, and what became of its steps."""
    if results.steps is None:
        return [f"**Without {steps.NAME}: nobody knows which steps succeeded.**", ""]
    faults = steps.faults(results.steps)
    passed = sum(step.get("passed", 0) for step in results.steps)
    verdict = ["**This run failed:**", "", *(f"* {fault}" for fault in faults)] if faults else [f"Every required step succeeded; {passed} tests passed."]
    return [*verdict, "", *steps.table(results.steps), ""]


def report(results):
    lines = [f"# {results.gpu}", ""]
    floors = [f"{r['name']} {r['bytes'] / 1e6:.0f} MB: {r['us']:.2f} us" + (f", {r['gb_per_s']:.0f} GB/s" if r["bytes"] else "")
              for r in results.of("floor")]
    if floors:
        lines += ["Floors, cold, in a graph: " + "; ".join(floors) + ".", ""]
    wrong = [r for kind in ("wrapper", "wrapper of sm_75") for r in results.of(kind) if r["wrong"]]
    tested = len(results.of("wrapper")) + len(results.of("wrapper of sm_75"))
    lines += [f"Wrappers: {tested} checks, {len(wrong)} with differences." + "".join(f"\n* {r['kind']} {r['name']}: {r}" for r in wrong), ""]
    lines += ["## Goals", "", "| goal | figures | met | misses |", "|---|---|---|---|"]
    for goal, count, misses in goals(results):
        shown = "; ".join(misses[:8]) + (f"; and {len(misses) - 8} more" if len(misses) > 8 else "")
        lines.append(f"| {goal} | {count} | {count - len(misses) if count else 'not measured'} | {shown} |")
    lines += ["", "## What the probes answer", ""]
    lines += [f"{number}. {text}" for number, text in sorted(answers(results).items())]
    lines += ["", "## Figures", *table_of_one_row(results), *table_of_experts(results), *table_of_decode_steps(results)]
    failures = results.of("failure")
    if failures:
        lines += ["", "## Not measured", ""]
        lines += [f"* {r.get('library', '')} {r.get('name', '')} {r.get('n', '')} {r.get('k', '')}: {r.get('note', '')}" for r in failures[:60]]
    return "\n".join(lines) + "\n"


def record(folder, into):
    results = Results(folder)
    if not results.records:
        sys.exit(f"no records in {folder}: *.jsonl of scripts/gpu.sh run are expected there")
    name = re.sub(r"[^a-z0-9]+", "-", results.gpu.lower().removeprefix("nvidia ")).strip("-")
    into = into or RESULTS / f"{datetime.date.today()}-{name}"
    into.mkdir(parents=True, exist_ok=True)
    with open(into / "results.json", "w") as out:
        out.write("[\n" + ",\n".join(json.dumps(record) for record in results.records) + "\n]\n")
    with open(into / "results.csv", "w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(results.of("floor") + results.products() + results.of("experts"))
    title, rest = report(results).split("\n", 1)
    (into / "README.md").write_text("\n".join([title, "", *of_the_run(results)]) + rest + "\n" + charts.LINKS)
    charts.write(results, into, (LAUNCH_US, SHARE))
    for kept in KEPT:
        if (Path(folder) / kept).exists():
            shutil.copy(Path(folder) / kept, into / kept)
    print(f"recorded in {into}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["summary", "record"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--into", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.folder, arguments.into)
    else:
        print(report(Results(arguments.folder)))


if __name__ == "__main__":
    main()
