"""mlx's CPU `quantized_matmul` on the shapes of benches/matmul.rs: median milliseconds.

    pip install "mlx[cpu]==0.32.4"
    python benches/peers/mlx_cpu.py [--columns 1]
"""
import argparse
import statistics
import time

import mlx.core as mx

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--columns", type=int, default=1, help="rows of x (M)")
parser.add_argument("--repeats", type=int, default=7)
arguments = parser.parse_args()

mx.set_default_device(mx.cpu)
FORMATS = [("affine", 4, 64), ("affine", 8, 64), ("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)]
print("| N x K | M | dtype | format | ms |\n|---|---|---|---|---|")
for n, k in [(4096, 4096), (11008, 4096)]:
    weight = mx.random.normal((n, k)) * 0.02
    for dtype in (mx.float32, mx.bfloat16):
        x = mx.random.normal((arguments.columns, k)).astype(dtype)
        for mode, bits, group_size in FORMATS:
            parts = mx.quantize(weight.astype(dtype), group_size, bits, mode=mode)
            options = dict(transpose=True, group_size=group_size, bits=bits, mode=mode)
            mx.eval(x, *parts)
            mx.eval(mx.quantized_matmul(x, *parts, **options))
            times = []
            for _ in range(arguments.repeats):
                start = time.perf_counter()
                mx.eval(mx.quantized_matmul(x, *parts, **options))
                times.append((time.perf_counter() - start) * 1e3)
            name = f"affine {bits}-bit g{group_size}" if mode == "affine" else mode
            dtype_name = str(dtype).removeprefix("mlx.core.")
            print(f"| {n}x{k} | {arguments.columns} | {dtype_name} | {name} | {statistics.median(times):.1f} |", flush=True)
