"""4-bit products of other libraries on a GPU, on the shapes of benches/kernels: lines of JSON with the same fields.

    python3 benches/peers/gpu_peers.py --out peers.jsonl [--seconds 60]

PyTorch is needed; every other library is measured if it is there, and its absence recorded. The method is that of
benches/kernels: cold weights in rotation, CUDA graphs, medians, errors against f64 on the same weights.
"""
import argparse
import json
import statistics
import time
from pathlib import Path

import torch

GRAPH_US = 3000
REPLAYS = 20
CHECKED_ROWS = 16
MOST_ERROR = 0.05
GROUP = 64


class Weights:
    """Random 4-bit weights with a scale and a bias for each group: w = scale * code + bias."""

    def __init__(self, n, k, dtype):
        self.n, self.k, self.dtype = n, k, dtype
        self.codes = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)
        self.scales = (torch.rand(n, k // GROUP, device="cuda") * 0.01 + 0.005).to(dtype)
        self.biases = (-torch.rand(n, k // GROUP, device="cuda") * 0.08 - 0.04).to(dtype)

    @property
    def bytes(self):
        return self.n * self.k // 2 + 2 * self.scales.numel() * 2

    def rows(self, rows):
        """Some rows, in f64."""
        groups = self.codes[rows].double().view(len(rows), -1, GROUP)
        return (groups * self.scales[rows].double()[..., None] + self.biases[rows].double()[..., None]).view(len(rows), -1)

    def dense(self):
        groups = self.codes.view(self.n, -1, GROUP).float()
        return (groups * self.scales.float()[..., None] + self.biases.float()[..., None]).view(self.n, self.k).to(self.dtype)


class NotHere(Exception):
    """A library is not installed, or does not take these weights."""


# Each of these takes weights and gives a function that multiplies by them, with data of its own at every call.


def torch_dense(weights):
    dense = weights.dense().t()
    return lambda: (lambda copy: lambda x: torch.mm(x, copy))(dense.clone())


def torch_int4(weights):
    """tinygemm: repacked fragments; it takes the zero point as the value of code 8."""
    if weights.dtype != torch.bfloat16:
        raise NotHere("bf16 only")
    if weights.k % 128 or weights.n % 8:
        raise NotHere("K of 128 and N of 8 only")
    pairs = weights.codes[:, ::2] << 4 | weights.codes[:, 1::2]
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    middle = weights.biases.float() + 8 * weights.scales.float()
    scales = torch.stack([weights.scales.float(), middle], dim=-1).transpose(0, 1).contiguous().to(torch.bfloat16)

    def copy():
        own, own_scales = packed.clone(), scales.clone()
        return lambda x: torch.ops.aten._weight_int4pack_mm(x, own, GROUP, own_scales)

    return copy


def gemlite(weights):
    try:
        from gemlite.core import DType, GemLiteLinear
    except ImportError as error:
        raise NotHere(str(error)) from error
    kind = DType.BF16 if weights.dtype == torch.bfloat16 else DType.FP16
    zeros = -weights.biases.float() / weights.scales.float()

    def copy():
        layer = GemLiteLinear(4, GROUP, weights.k, weights.n, input_dtype=kind, output_dtype=kind)
        layer.pack(weights.codes.clone(), weights.scales.clone(), zeros.to(weights.dtype), None)
        return layer

    return copy


def humming(weights):
    try:
        import humming  # noqa: F401
    except ImportError as error:
        raise NotHere(str(error)) from error
    raise NotHere("installed, but this script does not know this version's calls")


def triton_plain(weights):
    """What one writes in Triton for the checkpoint's layout: no repacking, a loop over K, products by tl.dot."""
    try:
        from triton_int4 import multiply
    except ImportError as error:
        raise NotHere(str(error)) from error
    nibbles = weights.codes.view(weights.n, -1, 8).to(torch.int64)
    shifts = 4 * torch.arange(8, device="cuda")
    words = (nibbles << shifts).sum(-1)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

    def copy():
        own = packed.clone(), weights.scales.clone(), weights.biases.clone()
        return lambda x: multiply(x, *own, GROUP)

    return copy


CONTENDERS = {
    ("PyTorch", "dense"): torch_dense,
    ("PyTorch", "int4 g64"): torch_int4,
    ("Triton", "affine 4-bit g64"): triton_plain,
    ("gemlite", "affine 4-bit g64"): gemlite,
    ("humming", "affine 4-bit g64"): humming,
}


def time_in_graph(functions, x, expected_us):
    """(median, p10, p90, launches) in microseconds of one launch."""
    launches = max(len(functions), min(100, int(GRAPH_US / expected_us)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            for function in functions[:2]:
                function(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for i in range(launches):
            functions[i % len(functions)](x)
    samples = []
    with torch.cuda.stream(side):
        for _ in range(3):
            graph.replay()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    samples = sorted(start.elapsed_time(end) * 1e3 / launches for start, end in events)
    return statistics.median(samples), samples[REPLAYS // 10], samples[-1 - REPLAYS // 10], launches


def measure(library, name, make, weights, m, cold_bytes):
    x = (torch.rand(m, weights.k, device="cuda") * 4 - 2).to(weights.dtype)
    copy = make(weights)
    bytes_of_weights = weights.n * weights.k * 2 if name == "dense" else weights.bytes
    copies = max(2, -(-cold_bytes // bytes_of_weights))
    functions = [copy() for _ in range(copies)]
    rows = torch.linspace(0, weights.n - 1, CHECKED_ROWS).long().cuda()
    exact = x.double() @ weights.rows(rows).t()
    difference = functions[0](x)[:, rows].double() - exact
    rounding = exact.to(weights.dtype).double() - exact
    error = (difference.norm() / exact.norm()).item()
    if not error < MOST_ERROR:
        raise ValueError(f"wrong products, error {error}")
    bytes_moved = bytes_of_weights + m * (weights.n + weights.k) * 2
    us, p10, p90, launches = time_in_graph(functions, x, 3 + bytes_moved / 3e6 + m * weights.n * weights.k / 2e8)
    return {
        "kind": "product",
        "library": library,
        "name": name,
        "dtype": str(weights.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f"),
        "n": weights.n,
        "k": weights.k,
        "m": m,
        "us": us,
        "p10": p10,
        "p90": p90,
        "bytes": bytes_moved,
        "gb_per_s": bytes_moved / us / 1e3,
        "error": error,
        "error_over_rounding": (difference.norm() / rounding.norm()).item(),
        "launches": launches,
        "copies": copies,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    definition = json.loads((Path(__file__).parent.parent / "shapes.json").read_text())
    key = [(shape["n"], shape["k"]) for shape in definition["shapes"] if shape.get("key")]
    cold_bytes = 4 * torch.cuda.get_device_properties(0).L2_cache_size
    absent = set()
    with arguments.out.open("w") as out:

        def write(record):
            out.write(json.dumps(record) + "\n")
            out.flush()

        for m in [1, 8, 16, 2, 4, 64]:
            for n, k in key:
                weights = Weights(n, k, torch.bfloat16)
                for (library, name), make in CONTENDERS.items():
                    if time.monotonic() > deadline:
                        write({"kind": "failure", "library": "peers", "name": "the rest", "note": "the time was up"})
                        return
                    if library in absent:
                        continue
                    try:
                        record = measure(library, name, make, weights, m, cold_bytes)
                    except NotHere as error:
                        record = {"kind": "failure", "library": library, "name": name, "n": n, "k": k, "note": str(error)}
                        if "No module" in str(error) or "does not know" in str(error):
                            absent.add(library)
                    except Exception as error:  # one library's failure must not end the others
                        record = {"kind": "failure", "library": library, "name": name, "n": n, "k": k, "m": m, "note": f"{error!r}"[:300]}
                    write(record)
                    print(" ".join(f"{record[field]:.4g}" if isinstance(record.get(field), float) else str(record.get(field, ""))
                                   for field in ("library", "name", "n", "k", "m", "us", "gb_per_s", "error", "note")), flush=True)
                del weights
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
