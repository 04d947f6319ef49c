"""Made-up machine code for tests."""
from machine_code import parse

# Four weight loads of 16 bytes (4-bit: 128 weights of a lane), 16 HMMA, 43 instructions, 44 with the branch back.
LOADS = ["LDG.E.128.NA.LTC128B.CONSTANT R8, desc[UR4][R2.64]"] * 4
BODY = [*LOADS, *["LOP3.LUT R4, R8, 0xf000f, R5, 0xea, !PT"] * 22, "@P0 LDG.E.U16.CONSTANT R3, desc[UR4][R6.64]",
        *["HMMA.16816.F32 R4, R8, R12, R4"] * 16]


def assembled(code, name="gemv_a4_g64_m1", registers=80, local=0, shared=1024):
    """A kernel of these instructions. `label:` before one names it for branches: `BRA label`."""
    addresses, lines = {}, []
    for number, text in enumerate(code):
        label, colon, _ = text.partition(": ")
        if colon:
            addresses[label] = f"{16 * number:#x}"
    for number, text in enumerate(code):
        words = text.partition(": ")[2] or text
        lines.append(f"        /*{16 * number:04x}*/        {' '.join(addresses.get(w, w) for w in words.split())} ;  /* 0x0 */")
    usage = (f" Function {name}:\n  REG:{registers} STACK:0 SHARED:{shared} LOCAL:{local} CONSTANT[0]:580 TEXTURE:0 SURFACE:0"
             " SAMPLER:0")
    return parse("\n".join([f"\t\tFunction : {name}", *lines]), usage)[name]


def kernel(body=BODY, before=("MOV R1, c[0x0][0x28]",), **figures):
    """A kernel whose instructions are `before`, a loop of `body`, an exit, and a branch to itself."""
    return assembled([*before, f"loop: {body[0]}", *body[1:], "@P1 BRA loop", "EXIT", "end: BRA end"], **figures)
