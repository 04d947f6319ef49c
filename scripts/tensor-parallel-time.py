#!/usr/bin/env python3
"""Computes the table of docs/tensor-parallel.md: time per token of a decode over several ranks.

    time = bytes / ranks / memory bandwidth + sums * time of a sum + gathers * time of a gather

Nothing here is measured by this project. Where numbers come from:
  models   config.json of Llama 3.1 8B, 70B and 405B: parameters, hidden size, layers, vocabulary
  weights  4-bit in groups of 64, with a 16-bit scale and bias each: 4.5 bits
  GPU      H100 SXM (data sheet): 3.35 TB/s, 80 GB; EFFICIENCY of the bandwidth is an assumption
  links    data sheets, one direction for each GPU: NVLink 4, PCIe 4.0 x16, InfiniBand NDR
  NCCL     its own model of the LL protocol, which it takes for messages as small as these: src/graph/tuning.cc,
           baseLat and hwLat in microseconds, a quarter of the bandwidth for rings, 0.9 / 3.8 of it for trees
"""

from math import log2

MODELS = {  # parameters, hidden size, layers
    "8B": (8.03e9, 4096, 32),
    "70B": (70.6e9, 8192, 80),
    "405B": (405.9e9, 16384, 126),
}
VOCABULARY = 128256
BYTES_OF_A_WEIGHT = 4.5 / 8
BYTES_OF_AN_ACTIVATION = 2
MEMORY = 80e9
BANDWIDTH = 3.35e12
EFFICIENCY = 0.8

# bytes/s, seconds of a step of a ring and of a tree, whether each rank is on a machine of its own
LINKS = {
    "NVLink 4": (450e9, 0.47e-6, 0.52e-6, False),
    "PCIe 4.0 x16": (32e9, 1.0e-6, 1.0e-6, False),
    "InfiniBand NDR": (50e9, 2.7e-6, 5.0e-6, True),
}
RING_BASE, TREE_BASE = 3.6e-6, 4.4e-6


def time_of_sum(size, ranks, link):
    bandwidth, ring_step, tree_step, machines = link
    steps = 2 * (ranks - 1)
    ring = RING_BASE + steps * ring_step + size * steps / ranks / (bandwidth / 4)
    depth = log2(ranks) if machines else ranks - 1
    tree = TREE_BASE + 2 * depth * tree_step + 2 * size / (bandwidth * 0.9 / 3.8)
    return min(ring, tree)


def time_of_gather(size, ranks, link):
    """`size` bytes in all."""
    bandwidth, step, _, _ = link
    return RING_BASE + (ranks - 1) * step + size * (ranks - 1) / ranks / (bandwidth / 4)


def time_of_token(model, ranks, link):
    """Seconds for weights and for communication; none if the weights do not fit."""
    parameters, hidden, layers = model
    own = parameters * BYTES_OF_A_WEIGHT / ranks
    if own > MEMORY * 0.9:
        return None
    weights = own / (BANDWIDTH * EFFICIENCY)
    if ranks == 1:
        return weights, 0.0
    # After attention, after the MLP, and of the embedding; the logits, and the sizes of their parts.
    sums = (2 * layers + 1) * time_of_sum(hidden * BYTES_OF_AN_ACTIVATION, ranks, link)
    gathers = time_of_gather(VOCABULARY * BYTES_OF_AN_ACTIVATION, ranks, link) + time_of_gather(16 * ranks, ranks, link)
    return weights, sums + gathers


def main():
    print("| model | ranks | weights | " + " | ".join(LINKS) + " |")
    print("|---|---|---|" + "---|" * len(LINKS))
    for name, model in MODELS.items():
        for ranks in (1, 2, 4, 8):
            times = [time_of_token(model, ranks, link) for link in LINKS.values()]
            if times[0] is None:
                continue
            sums = [f"{1e3 * (weights + sent):.2f} ({1e3 * sent:.2f})" for weights, sent in times]
            if ranks == 1:
                sums = [f"{1e3 * times[0][0]:.2f}"] + ["" for _ in times[1:]]
            print(f"| {name} | {ranks} | {1e3 * times[0][0]:.2f} | " + " | ".join(sums) + " |")


main()
