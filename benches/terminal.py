"""What a terminal shows, as a picture: text with escape sequences for colours, as `tmux capture-pane -ep` writes it."""
import re
import unicodedata

import svg

MONOSPACE = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
FONT_SIZE, CELL, LINE, MARGIN = 13, 7.8, 18, 16
ESCAPE = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])")
# The sixteen colours of a terminal, of which pages have eight here: bright ones are as the others.
ANSI = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"]
COLOURS = {
    "black": ("#1f2328", "#9198a1"),
    "red": ("#cf222e", "#ff7b72"),
    "green": ("#1a7f37", "#3fb950"),
    "yellow": ("#9a6700", "#d29922"),
    "blue": ("#0969da", "#4493f8"),
    "magenta": ("#8250df", "#bc8cff"),
    "cyan": ("#1b7c83", "#39c5cf"),
    "white": ("#59636e", "#e6edf3"),
    "border": ("#d1d9e0", "#3d444d"),
}


def cells(char):
    """How many columns of a terminal a character takes."""
    if unicodedata.combining(char) or unicodedata.category(char) in ("Cf", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def width(text):
    return sum(map(cells, text))


def spans(line, style):
    """[(text, style)] of a line that begins in a style, and the style that it ends in. A style: colour, bold."""
    found, at = [], 0
    for code in ESCAPE.finditer(line):
        found.append((line[at:code.start()], style))
        if code[2] != "m":
            raise ValueError(f"{line!r}: an escape sequence that is none of colours")
        at = code.end()
        style = changed(style, [int(number or 0) for number in code[1].split(";")])
    found.append((line[at:], style))
    if any("\x1b" in text for text, _ in found):
        raise ValueError(f"{line!r}: an escape sequence that is none of colours")
    return [(text, style) for text, style in found if text], style


def changed(style, codes):
    colour, bold = style
    for code in codes:
        if code == 0:
            colour, bold = "ink", False
        elif code == 1:
            bold = True
        elif code == 2:
            colour = "muted"
        elif code == 22:
            colour, bold = "ink" if colour == "muted" else colour, False
        elif code in range(30, 38) or code in range(90, 98):
            colour = ANSI[code % 10]
        elif code == 39:
            colour = "ink" if colour != "muted" else colour
        elif code != 49:
            raise ValueError(f"the code {code} of a colour or font is not known here")
    return colour, bold


def picture(text, columns, title, description):
    """Lines of a terminal so many columns wide."""
    lines = text.rstrip("\n").split("\n")
    shown = svg.Picture(round(2 * MARGIN + columns * CELL), 2 * MARGIN + LINE * len(lines), title, description, COLOURS, MONOSPACE, FONT_SIZE)
    shown.element("rect", {"x": 0.5, "y": 0.5, "width": shown.width - 1, "height": shown.height - 1, "rx": 8, "fill": "none"}, stroke="border")
    style = ("ink", False)
    for row, line in enumerate(lines):
        found, style = spans(line, style)
        column = 0
        for part, (colour, bold) in found:
            wide = width(part)
            # Each part where its columns are, however wide the page's font is.
            if part.strip():
                shown.text(MARGIN + column * CELL, MARGIN + row * LINE + FONT_SIZE, part, colour, bold=bold,
                           textLength=wide * CELL, lengthAdjust="spacingAndGlyphs", style="white-space:pre", xml_space="preserve")
            column += wide
        if column > columns:
            raise ValueError(f"{line!r}: {column} columns, of {columns}")
    return str(shown)
