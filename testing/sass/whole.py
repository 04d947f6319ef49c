"""The instructions of a whole GEMV with one row of x, for a launch that the crate plans.

Counts of the machine code, times trips: of the hot loop so many that all of k is multiplied, for every block of rows whose
turn it is, of the loop that stages x so many that all of x is. Other loops run once: they are for what is rare or short. Of several ways the longest
counts, so bf16, a bias, a residual and SwiGLU are in; for warps that store nothing the shortest one from the hot loop on.
"""
from dataclasses import dataclass

from flow import Flow
from h200 import ISSUE, MULTIPROCESSORS, seconds_to_issue, seconds_to_read
from order import before_the_wait

WARP = 32
BYTES_OF_X = 2
BLOCKS_OF_MULTIPROCESSOR = 2  # that take turns


class NotCounted(Exception):
    """Why the instructions of a kernel or launch cannot be counted."""


@dataclass(frozen=True)
class Regions:
    """Instructions that one warp executes."""

    before_wait: int
    staging: int  # without its loop
    staging_trip: int
    x_of_trip: int  # elements of x that a thread stages
    hot_trip: int
    k_of_trip: int  # of a warp
    stores: int  # from the hot loop on
    leaves: int  # the same for a warp that stores nothing

    @classmethod
    def of(cls, kernel, gemv):
        flow, loop = Flow(kernel), kernel.hot_loop()
        if not loop or gemv.rows_of_x != 1:
            raise NotCounted("no hot loop of one row of x")
        first, last = flow.number[loop.first], flow.number[loop.last]
        waits = before_the_wait(flow)
        start = flow.way(max, 0, last)
        if not waits or not start:
            raise NotCounted("no way through the wait and the hot loop")
        staging = [bounds for bounds in flow.loops()
                   if max(waits) < bounds[0] and bounds[1] < first and cls._x_loads(flow, bounds)]
        if len(staging) != 1:
            raise NotCounted(f"{len(staging)} loops that load x between the wait and the hot loop")
        trip = [n for n in start if staging[0][0] <= n <= staging[0][1]]
        return cls(
            before_wait=sum(n <= max(waits) for n in start),
            staging=sum(max(waits) < n < first for n in start) - len(trip),
            staging_trip=len(trip),
            x_of_trip=cls._x_loads(flow, staging[0]) // BYTES_OF_X,
            hot_trip=sum(n >= first for n in start),
            # A lane's loads are of two rows, and four lanes share them.
            k_of_trip=sum(load.load_bytes for load in loop.weight_loads) * 8 // gemv.bits // 2 * 4,
            stores=len(cls._end(flow, last + 1, max)),
            leaves=len(cls._end(flow, last + 1, min)),
        )

    @staticmethod
    def _x_loads(flow, bounds):
        loads = [i for i in flow.code[bounds[0]:bounds[1] + 1] if i.name == "LDG" and not i.loads_weights]
        return sum(load.load_bytes for load in loads)

    @staticmethod
    def _end(flow, first, pick):
        """The way from `first` to an exit where k is not split: it turns at the first branch away from the count of
        parts that have arrived."""
        split = flow.reaching(flow.numbers("ATOM", "ATOMG"))
        turns = [(n, to) for n in sorted(flow.reached_from(first) & split) for to in flow.successors[n] if to not in split]
        way, rest = (flow.way(max, first, turns[0][0]), turns[0][1]) if turns else ([], first)
        end = flow.way(pick, rest)
        if way is None or end is None:
            raise NotCounted("no way from the hot loop to an exit")
        return way + end


@dataclass(frozen=True)
class Whole:
    """A launch."""

    per_weight: float  # lane-instructions
    limit: float  # as many as an H200 can issue at its bandwidth
    busiest: float  # share of the slots of the multiprocessor with the most blocks


def whole(regions, gemv, launch):
    if launch["splits"] != 1:
        raise NotCounted(f"k has {launch['splits']} parts, whose sums are not counted")
    warps, rows, k, n = launch["threads"] // WARP, launch["rows_per_block"], launch["k"], launch["n"]
    staging_trips = launch["k_per_split"] / (regions.x_of_trip * launch["threads"])
    hot_trips = launch["k_per_split"] / (launch["k_warps"] * regions.k_of_trip)
    present = min(launch["blocks"], BLOCKS_OF_MULTIPROCESSOR * MULTIPROCESSORS)
    turns = launch["blocks"] / present
    of_warp = (regions.before_wait + regions.staging + staging_trips * regions.staging_trip
               + turns * hot_trips * regions.hot_trip)
    storing = min(warps, -(-rows * turns // WARP))
    of_block = warps * of_warp + storing * regions.stores + (warps - storing) * regions.leaves
    per_weight = of_block * WARP / (rows * turns * k)
    read = seconds_to_read(n * k * gemv.bytes_per_weight)
    busiest = seconds_to_issue(of_block * WARP * -(-present // MULTIPROCESSORS), ISSUE) / read
    limit = per_weight * read / (seconds_to_issue(per_weight * n * k, ISSUE) / MULTIPROCESSORS)
    return Whole(per_weight, limit, busiest)
