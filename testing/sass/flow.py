"""The ways through a kernel's code: branches forward. Loops run as often as the caller says.

What a warp does in rare cases only is left out: that its lanes diverge (BRA.DIV), functions (CALL: division by a
subnormal number).
"""


class Flow:
    """Instructions are numbered from 0 in the order of their addresses."""

    def __init__(self, kernel):
        self.code = kernel.instructions
        self.number = {instruction.address: n for n, instruction in enumerate(self.code)}
        self.successors = [self._successors(n) for n in range(len(self.code))]

    def _successors(self, n):
        instruction = self.code[n]
        following = [n + 1] if n + 1 < len(self.code) else []
        if instruction.name in ("EXIT", "RET"):
            return following if instruction.conditional else []
        target = instruction.branch_target
        if target is None or ".DIV" in instruction.opcode:
            return following
        forward = [self.number[target]] if target > instruction.address else []
        return following + forward if instruction.conditional else forward

    def numbers(self, *names):
        return [n for n, instruction in enumerate(self.code) if instruction.name in names]

    def reached_from(self, first, stops=()):
        """Where a way from `first` leads that goes through none of `stops`."""
        reached, open_ = set(), [first]
        while open_:
            n = open_.pop()
            if n not in reached and n not in stops:
                reached.add(n)
                open_ += self.successors[n]
        return reached

    def reaching(self, targets):
        """From where a way leads to one of `targets`."""
        found = set(targets)
        for n in reversed(range(len(self.code))):
            if any(successor in found for successor in self.successors[n]):
                found.add(n)
        return found

    def way(self, pick, first, last=None):
        """The instructions on the way with the most or the fewest (`pick` is max or min) from `first` to `last`, or
        to an exit; None if there is none."""
        best = {}  # number: (length, the next one)
        for n in reversed(range(first, len(self.code) if last is None else last + 1)):
            ends = n == last if last is not None else self.code[n].name == "EXIT"
            onward = [(best[next_][0], next_) for next_ in self.successors[n] if next_ in best]
            if ends:
                onward.append((0, None))
            if onward:
                length, next_ = pick(onward, key=lambda pair: pair[0])
                best[n] = (length + 1, next_)
        way, n = [], first
        while n in best:
            way.append(n)
            n = best[n][1]
        return way or None

    def loops(self):
        """(first, last) of every loop. A branch back from a rare case to where it came from is none."""
        for n, instruction in enumerate(self.code):
            target = instruction.branch_target
            if target is not None and target < instruction.address and ".DIV" not in instruction.opcode:
                first = self.number[target]
                if n in self.reached_from(first):
                    yield first, n
