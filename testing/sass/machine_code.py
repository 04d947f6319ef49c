"""Kernels as machine code (SASS): their instructions, their registers, and the loop that the time goes into."""
import re
from collections import Counter
from dataclasses import dataclass, field

# Loads of weights say so: `load_words` of device.cuh asks for 128-byte lines of the second-level cache,
# and nothing else does.
WEIGHT_LOAD_HINT = "LTC128B"

# Instructions of the pipe for integers, logic and conversions, which issues half as many as the others together.
ALU = {
    "LOP3", "LOP", "SHF", "PRMT", "SEL", "FSEL", "LEA", "IADD3", "VIADD", "MOV", "CS2R", "ISETP", "FSETP", "PLOP3",
    "IABS", "IMNMX", "VIMNMX", "FMNMX", "F2FP", "BMSK", "FLO", "VOTE",
}


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str  # with its predicate

    @property
    def opcode(self):
        """With modifiers: LDG.E.128.CONSTANT."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]

    @property
    def name(self):
        return self.opcode.split(".")[0]

    @property
    def conditional(self):
        """By its predicate, or that of a branch."""
        return re.match(r"@|(BRA|EXIT)\S* !?U?P\w+,", self.text) is not None

    @property
    def branch_target(self):
        target = re.search(r"0x([0-9a-f]+)", self.text) if self.name == "BRA" else None
        return int(target.group(1), 16) if target else None

    @property
    def registers(self):
        """The registers that it names, in order, None for RZ: R12, desc[UR8][R2.64] are 12 and 2."""
        named = re.findall(r"\bR(\d+|Z)\b", self.text)
        return [None if number == "Z" else int(number) for number in named]

    @property
    def writes(self):
        """The first register that it writes, None if none."""
        if not self.registers or re.match(r"ST|RED|BRA|LDGSTS|R2|.*SETP", self.name):
            return None
        return self.registers[0]

    @property
    def load_bytes(self):
        """Bytes that one lane loads, or copies to shared memory."""
        modifiers = self.opcode.split(".")
        for modifier, size in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)):
            if modifier in modifiers:
                return size
        return 4

    @property
    def loads_weights(self):
        """To registers, or to shared memory, as a ring of the GEMV does."""
        return self.name == "LDGSTS" or (self.name == "LDG" and WEIGHT_LOAD_HINT in self.opcode.split("."))


@dataclass
class Kernel:
    name: str
    instructions: list
    registers: int = 0
    stack: int = 0  # bytes for each thread, in local memory
    local: int = 0
    shared: int = 0  # static bytes of a block, and if it uses shared memory what the system keeps

    def count(self, *names):
        return sum(instruction.name in names for instruction in self.instructions)

    def loops(self):
        """(first address, last address) of every backward branch."""
        for instruction in self.instructions:
            target = instruction.branch_target
            # A branch to itself is the padding behind the last instruction.
            if target is not None and target < instruction.address:
                yield target, instruction.address

    def hot_loop(self):
        """The smallest loop that loads weights and multiplies them; None if there is none."""
        candidates = [Loop(self, *bounds) for bounds in self.loops()]
        candidates = [loop for loop in candidates if loop.weight_loads and loop.count("HMMA")]
        return min(candidates, key=lambda loop: len(loop.body), default=None)

    def loops_of_fma(self):
        """The loops that load weights and multiply them on CUDA cores, none inside another, by how many rows of x they take:
        the most multiplications last."""
        candidates = [Loop(self, *bounds) for bounds in self.loops()]
        candidates = [loop for loop in candidates if loop.weight_loads and loop.count("FFMA") and not loop.inner_loops]
        return sorted(candidates, key=lambda loop: loop.count("FFMA"))

    def loop_of_tiles(self):
        """The smallest loop that copies keys and values and multiplies them; None if there is none."""
        candidates = [Loop(self, *bounds) for bounds in self.loops()]
        candidates = [loop for loop in candidates if loop.count("LDGSTS") and loop.count("HMMA")]
        return min(candidates, key=lambda loop: len(loop.body), default=None)


@dataclass
class Loop:
    kernel: Kernel
    first: int
    last: int
    body: list = field(init=False)

    WORK = {"HMMA", "FFMA", "FMUL", "FADD", "LDG", "LDGSTS", "LDS"}

    def __post_init__(self):
        self.body = [i for i in self.kernel.instructions if self.first <= i.address <= self.last]

    def count(self, *names):
        return sum(instruction.name in names for instruction in self.body)

    @property
    def weight_loads(self):
        return [instruction for instruction in self.body if instruction.loads_weights]

    @property
    def usual(self):
        """What nearly every trip takes: all but what a branch leaves out that has no loads and calculates nothing with floats, such as where
        the next block of rows is."""
        left_out = set()
        for branch in self.body:
            target = branch.branch_target
            if branch.conditional and target is not None and branch.address < target <= self.last:
                region = [i for i in self.body if branch.address < i.address < target]
                if not any(i.name in self.WORK for i in region):
                    left_out |= {i.address for i in region}
        return [i for i in self.body if i.address not in left_out]

    @property
    def hmma_chain(self):
        """The most HMMA in a row of which each waits for the sums of the one before."""
        length, longest = {}, 0  # by the first register of the sums
        for instruction in self.body:
            if instruction.name == "HMMA":
                to, *_, sums = instruction.registers
                length[to] = length.get(sums, 0) + 1
                longest = max(longest, length[to])
            elif instruction.writes is not None:
                length.pop(instruction.writes // 4 * 4, None)
        return longest

    def histogram(self):
        """How often each opcode occurs, most frequent first."""
        return Counter(instruction.name for instruction in self.body).most_common()

    @property
    def inner_loops(self):
        """Loops inside this one that load weights or multiply them: their instructions run more than once in a trip."""
        inside = [Loop(self.kernel, *bounds) for bounds in self.kernel.loops()
                  if bounds != (self.first, self.last) and self.first <= bounds[0] and bounds[1] <= self.last]
        return [loop for loop in inside if loop.weight_loads or loop.count("HMMA")]


def parse(disassembly, resource_usage):
    """The kernels in what `cuobjdump --dump-sass` and `--dump-resource-usage` print, by name."""
    kernels, current = {}, None
    for line in disassembly.splitlines():
        if function := re.match(r"\s*Function : (\S+)", line):
            current = kernels.setdefault(function.group(1), Kernel(function.group(1), []))
        elif current and (code := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line)):
            current.instructions.append(Instruction(int(code.group(1), 16), code.group(2)))
    usage = re.findall(r"Function (\S+?):\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", resource_usage)
    for name, *figures in usage:
        if name in kernels:
            kernel = kernels[name]
            kernel.registers, kernel.stack, kernel.shared, kernel.local = map(int, figures)
    return kernels
