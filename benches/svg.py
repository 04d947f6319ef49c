"""Pictures as SVG without any library, legible on light and on dark pages."""
from xml.sax.saxutils import escape

# A colour by light and by dark. The page itself has one, as who shows a picture may not say which mode it is in.
COLOURS = {
    "page": ("#ffffff", "#0d1117"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "grid": ("#e4e8ec", "#262c36"),
    "ours": ("#0969da", "#4493f8"),
    "other": ("#bc4c00", "#f0883e"),
    "theirs": ("#a3abb5", "#656c76"),
}
SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


class Picture:
    """Shapes and texts, in order. A colour is a name of `COLOURS` or of `colours`."""

    def __init__(self, width, height, title, description="", colours=None, font=SANS, font_size=12):
        self.width, self.height = width, height
        self.colours = COLOURS | (colours or {})
        described = f"<desc>{escape(description)}</desc>\n" if description else ""
        self.head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
                     f'role="img" font-family="{font}" font-size="{font_size}">\n<title>{escape(title)}</title>\n{described}')
        self.parts = []
        self.rect(0, 0, width, height, "page", radius=8)

    def element(self, name, attributes, fill=None, stroke=None, content=None):
        """An element in these colours. `None` leaves an attribute out."""
        classes = [colour for colour in (fill and f"fill-{fill}", stroke and f"stroke-{stroke}") if colour]
        given = {"class": " ".join(classes) or None, **attributes}
        written = "".join(f' {key.replace("xml_", "xml:").replace("_", "-")}="{number(value)}"' for key, value in given.items() if value is not None)
        self.parts.append(f"<{name}{written}/>" if content is None else f"<{name}{written}>{content}</{name}>")

    def rect(self, x, y, width, height, fill, radius=None, **more):
        self.element("rect", {"x": x, "y": y, "width": width, "height": height, "rx": radius, **more}, fill)

    def path(self, d, stroke, width=1, dash=None, **more):
        self.element("path", {"d": d, "stroke_width": None if width == 1 else width, "stroke_dasharray": dash, "fill": "none", **more},
                     stroke=stroke)

    def circle(self, x, y, radius, fill):
        self.element("circle", {"cx": x, "cy": y, "r": radius}, fill)

    def text(self, x, y, text, colour="ink", size=None, anchor=None, bold=False, **more):
        self.element("text", {"x": x, "y": y, "font_size": size, "text_anchor": anchor, "font_weight": 600 if bold else None, **more},
                     colour, content=escape(text))

    def __str__(self):
        rules = lambda mode: "".join(f".fill-{name}{{fill:{pair[mode]}}}.stroke-{name}{{stroke:{pair[mode]}}}\n"
                                     for name, pair in self.colours.items() if self.uses(name))
        style = f"<style>\n{rules(0)}@media (prefers-color-scheme: dark) {{\n{rules(1)}}}\n</style>\n"
        return self.head + style + "\n".join(self.parts) + "\n</svg>\n"

    def uses(self, colour):
        return any(f"fill-{colour}" in part or f"stroke-{colour}" in part for part in self.parts)


def number(value):
    """A coordinate with no more digits than are seen; a text as it is."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else escape(str(value), {'"': "&quot;"})
