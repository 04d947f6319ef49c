"""What the name of a GEMV kernel says."""
import re
from dataclasses import dataclass

# Of formats that are no affine ones: bits of a code (of IQ types it selects an integer), weights of a group, bytes of its scale
# and bias, and those of the units that scales and biases of a super-block count.
OTHERS = {
    "mxfp4": (4, 32, 1, 0), "nvfp4": (4, 16, 1, 0), "mxfp8": (8, 32, 1, 0),
    "q2_k": (2, 16, 2, 4), "q3_k": (3, 16, 1, 2), "q4_k": (4, 32, 2, 4), "q5_k": (5, 32, 2, 4), "q6_k": (6, 16, 1, 2),
    "iq1_s": (2, 32, 1, 2), "iq1_m": (3, 16, 1, 2), "iq2_xxs": (3, 32, 1, 2), "iq2_xs": (3, 16, 1, 2),
    "iq3_xxs": (4, 32, 1, 2), "iq3_s": (4, 32, 1, 2), "iq4_xs": (4, 32, 1, 2), "iq4_nl": (4, 32, 2, 0),
}
SUPER_BLOCK = 256
WIDEST_LOAD = 16


@dataclass(frozen=True)
class Gemv:
    format: str  # a4_g64, mxfp4
    bits: int
    group: int
    rows_of_x: int
    narrow: bool

    @classmethod
    def from_name(cls, name):
        """None for any other kernel."""
        match = re.fullmatch(rf"gemv_(a(\d)_g(\d+)|{'|'.join(OTHERS)})_(m(\d+)|experts)(_narrow)?", name)
        if not match:
            return None
        format, bits, group, _, rows_of_x, narrow = match.groups()
        bits, group = OTHERS[format][:2] if format in OTHERS else (int(bits), int(group))
        return cls(format, bits, group, int(rows_of_x or 1), narrow is not None)  # experts have one row each

    @property
    def bytes_of_units(self):
        """Of a super-block, 0 if scales count none."""
        return OTHERS[self.format][3] if self.format in OTHERS else 0

    @property
    def least_load_bytes(self):
        """How much a lane must load at a time. With more rows of x its four lanes must stay closer together, and
        what it loads is no less than its budget. 64 weights of an odd number of bits are a multiple of 8 bytes: of more
        at a time there are no registers beside units of scales."""
        if self.rows_of_x > 1 or self.narrow:
            return 4
        return WIDEST_LOAD // 2 if self.bytes_of_units and self.bits % 2 else WIDEST_LOAD

    @property
    def bytes_per_weight(self):
        # An affine format has a 16-bit scale and bias.
        scales = OTHERS[self.format][2] if self.format in OTHERS else 4
        return self.bits / 8 + scales / self.group + self.bytes_of_units / SUPER_BLOCK
