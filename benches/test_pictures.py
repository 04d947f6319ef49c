"""The pictures of the README: that they are what the records make, and how a terminal is drawn."""
import re
import unittest
import xml.etree.ElementTree

import pictures
import record_chat
import terminal

README = (pictures.ROOT / "README.md").read_text()
STYLE = ("ink", False)


def texts(drawn):
    """[(class, x, text)] of a picture."""
    return [(text.get("class"), float(text.get("x")), text.text) for text in xml.etree.ElementTree.fromstring(drawn).findall(".//{*}text")]


class Pictures(unittest.TestCase):
    def test_are_what_the_records_make(self):
        for name, draw in pictures.PICTURES.items():
            with self.subTest(name):
                self.assertEqual((pictures.ROOT / "docs" / name).read_text(), draw(), "run python3 benches/pictures.py, look, and commit")

    def test_are_in_the_readme_in_words_too(self):
        for name in pictures.PICTURES:
            with self.subTest(name):
                alt = re.search(rf"!\[([^\]]*)\]\(docs/{re.escape(name)}\)", README)
                self.assertGreater(len(alt[1] if alt else ""), 80)

    def test_the_speed_in_words_is_that_of_the_picture(self):
        numbers = lambda text: set(re.findall(r"(?<![\w.])\d[\d.]*\d|(?<![\w.])\d(?![\w-])", text))
        alt = re.search(r"!\[([^\]]*)\]\(docs/speed.svg\)", README)[1]
        drawn = set().union(*(numbers(text) for _, _, text in texts(pictures.speed())))
        self.assertGreater(len(numbers(alt)), 15)
        self.assertEqual(numbers(alt) - drawn, set())

    def test_have_every_colour_for_both_modes(self):
        for name, draw in pictures.PICTURES.items():
            drawn = draw()
            light, dark = re.search(r"<style>\n(.*)@media \(prefers-color-scheme: dark\) \{\n(.*)\}\n</style>", drawn, re.DOTALL).groups()
            used = {colour for classes in re.findall(r'class="([^"]*)"', drawn) for colour in classes.split()}
            for mode in (light, dark):
                with self.subTest(name):
                    self.assertEqual(used - set(re.findall(r"\.([a-z0-9-]+)\{", mode)), set())

    def test_stay_inside(self):
        for name, draw in pictures.PICTURES.items():
            drawn = draw()
            width = float(re.search(r'width="(\d+)"', drawn)[1])
            for text in xml.etree.ElementTree.fromstring(drawn).findall(".//{*}text"):
                # A letter is about half as wide as it is high.
                length = float(text.get("textLength") or len(text.text) * 0.55 * float(text.get("font-size") or 12))
                x = float(text.get("x")) - {"end": length, "middle": length / 2}.get(text.get("text-anchor"), 0)
                with self.subTest(name, text=text.text):
                    self.assertTrue(0 <= x and x + length <= width, f"{x} to {x + length} of {width}")

    def test_the_recorded_conversation_is_the_one_that_is_typed(self):
        recorded = re.sub(r"\x1b\[[0-9;]*m", "", record_chat.RECORD.read_text()).splitlines()
        self.assertEqual(recorded[0], f"$ {record_chat.COMMAND}")
        self.assertEqual([line for line in recorded if line.startswith(record_chat.PROMPT)],
                         [*(f"{record_chat.PROMPT} {line}" for line in record_chat.TYPED), record_chat.PROMPT])


class Terminal(unittest.TestCase):
    def test_colours_go_on_into_the_next_line(self):
        found, style = terminal.spans("a\x1b[2mb\x1b[0m\x1b[39m\x1b[49mc\x1b[1;31md", STYLE)
        self.assertEqual(found, [("a", STYLE), ("b", ("muted", False)), ("c", STYLE), ("d", ("red", True))])
        self.assertEqual(style, ("red", True))
        drawn = texts(terminal.picture("\x1b[2mgrey\n\x1b[0mink\n", 10, "", ""))
        self.assertEqual([(colour, text) for colour, _, text in drawn], [("fill-muted", "grey"), ("fill-ink", "ink")])

    def test_wide_characters_take_two_columns(self):
        self.assertEqual([terminal.width(text) for text in ("ab", "日本", "🐭", "e\u0301", "\u200b")], [2, 4, 2, 1, 0])
        (_, first, _), (_, second, _) = texts(terminal.picture("日本\x1b[2m!", 5, "", ""))
        self.assertAlmostEqual(second - first, 4 * terminal.CELL)

    def test_what_a_page_would_misread_is_escaped(self):
        self.assertEqual(texts(terminal.picture("<b> & \"x\"", 20, "", ""))[0][2], "<b> & \"x\"")

    def test_what_it_can_not_draw_is_an_error(self):
        for line in ("\x1b[2J", "\x1b[38;5;9mx", "\x1b]0;title\x07", "x" * 81):
            with self.subTest(line), self.assertRaises(ValueError):
                terminal.picture(line, 80, "", "")


if __name__ == "__main__":
    unittest.main()
