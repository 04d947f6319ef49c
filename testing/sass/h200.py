"""What an H200 gives a kernel."""

BANDWIDTH, MULTIPROCESSORS, CLOCK = 4.3e12, 132, 1.98e9  # bytes a second that it reads; hertz

# Lane-instructions that a multiprocessor issues per clock, in all and to the pipe for integers and logic.
ISSUE, ISSUE_ALU = 128, 64

# What a multiprocessor has for its blocks, and in which units a lane gets registers.
REGISTERS, REGISTER_UNIT, SHARED_BYTES = 65536, 8, 228 << 10
# Of shared memory, for each block; cuobjdump counts it with what a kernel has itself, if that uses any or a barrier
# (compute capability 9.0 and up).
RESERVED_SHARED_BYTES = 1 << 10

THREADS = 256  # of a block, unless launches.json says otherwise


def seconds_to_read(bytes_):
    return bytes_ / BANDWIDTH


def seconds_to_issue(instructions, per_clock):
    """For one multiprocessor."""
    return instructions / (per_clock * CLOCK)


def blocks_by_registers(registers, threads=THREADS):
    return REGISTERS // (threads * -(-registers // REGISTER_UNIT) * REGISTER_UNIT)


def blocks_by_shared_memory(bytes_):
    return SHARED_BYTES // (bytes_ + RESERVED_SHARED_BYTES)
