"""What the name of a GEMV kernel says."""
import re
from dataclasses import dataclass

MICROSCALING = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}  # bits, group
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
        match = re.fullmatch(r"gemv_(a(\d)_g(\d+)|mxfp4|nvfp4|mxfp8)_(m(\d+)|experts)(_narrow)?", name)
        if not match:
            return None
        format, bits, group, _, rows_of_x, narrow = match.groups()
        bits, group = MICROSCALING.get(format) or (int(bits), int(group))
        return cls(format, bits, group, int(rows_of_x or 1), narrow is not None)  # experts have one row each

    @property
    def least_load_bytes(self):
        """How much a lane must load at a time. With more rows of x its four lanes must stay closer together, and
        what it loads is no less than its budget."""
        return WIDEST_LOAD if self.rows_of_x == 1 and not self.narrow else 4

    @property
    def bytes_per_weight(self):
        scales = 4 if self.format.startswith("a") else 1  # 16-bit scale and bias, or one byte
        return self.bits / 8 + scales / self.group
