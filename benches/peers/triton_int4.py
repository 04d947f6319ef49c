"""y = x w^T for affine 4-bit weights in the checkpoint's layout, as one writes it in Triton."""
import torch
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"ROWS": rows, "WORDS": words}, num_warps=warps, num_stages=stages)
    for rows, words, warps, stages in [(16, 32, 4, 3), (16, 64, 4, 3), (32, 32, 4, 4), (32, 64, 8, 3), (64, 32, 4, 4)]
]


@triton.autotune(CONFIGS, key=["n", "k", "M"])
@triton.jit
def kernel(x, packed, scales, biases, y, m, n, k, M: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """ROWS rows of w; WORDS words (8 weights each) of each row at a time; M rows of x, padded for tl.dot."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_of_x = tl.arange(0, M)
    word = tl.arange(0, WORDS)
    sums = tl.zeros((M, ROWS), dtype=tl.float32)
    for first in range(0, k // 8, WORDS):
        at = first + word
        inside = at < k // 8
        mask = (row[:, None] < n) & inside[None, :]
        codes = tl.load(packed + row[:, None] * (k // 8) + at[None, :], mask=mask, other=0)
        group = row[:, None] * (k // GROUP) + at[None, :] // (GROUP // 8)
        scale = tl.load(scales + group, mask=mask, other=0).to(tl.float32)
        bias = tl.load(biases + group, mask=mask, other=0).to(tl.float32)
        for i in tl.static_range(8):
            weight = ((codes >> (4 * i)) & 15).to(tl.float32) * scale + bias
            part = tl.load(x + row_of_x[:, None] * k + at[None, :] * 8 + i,
                           mask=(row_of_x[:, None] < m) & inside[None, :], other=0)
            sums = tl.dot(part, tl.trans(weight.to(part.dtype)), sums)
    tl.store(y + row_of_x[:, None] * n + row[None, :], sums.to(y.dtype.element_ty),
             mask=(row_of_x[:, None] < m) & (row[None, :] < n))


def multiply(x, packed, scales, biases, group):
    m, k = x.shape
    n = packed.shape[0]
    y = torch.empty((m, n), device=x.device, dtype=x.dtype)
    grid = lambda meta: (triton.cdiv(n, meta["ROWS"]),)
    kernel[grid](x, packed, scales, biases, y, m, n, k, M=max(16, triton.next_power_of_2(m)), GROUP=group)
    return y
