"""Writes tests/fixtures/chat: published chat templates, conversations, and what transformers makes of them.

    pip install transformers==5.24.0 jinja2==3.1.6
    pip download --no-deps trl==1.16.0 xinference==4.1.0
    python chat_templates.py trl-1.16.0-*.whl xinference-4.1.0-*.whl ../fixtures/chat

Both packages (Apache-2.0) carry templates of models as these were published. Those of models whose licences restrict what
may be done with them are left out.
"""

import json
import sys
import zipfile
from datetime import datetime
from pathlib import Path

import jinja2
from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

# Name, file in the package, bos_token, eos_token.
TRL = [
    ("deepseek_r1_distill", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    ("deepseekv3", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    ("gemma4", "<bos>", "<eos>"),
    ("glm4moe", None, "<|endoftext|>"),
    ("gptoss", "<|startoftext|>", "<|return|>"),
    ("phi3", "<s>", "<|endoftext|>"),
    ("phi3_5", "<s>", "<|endoftext|>"),
    ("qwen2_5", None, "<|im_end|>"),
    ("qwen3", None, "<|im_end|>"),
    ("qwen3_8", None, "<|im_end|>"),
    ("qwen3_training", None, "<|im_end|>"),  # has `generation` blocks
    ("smolvlm", "<|im_start|>", "<end_of_utterance>"),
]
XINFERENCE = [
    ("mistral-instruct-v0.2", "<s>", "</s>"),
    ("mistral-instruct-v0.3", "<s>", "</s>"),
    ("mistral-nemo-instruct", "<s>", "</s>"),
    ("MiniMax-M2", None, "[e~["),
    ("glm4-0414", None, "<|endoftext|>"),
    ("seed-oss", "<seed:bos>", "<seed:eos>"),
    ("minicpm5-1b", "<s>", "</s>"),
]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "What the weather is: \"now\" & <later>, at 20 °C.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "The unit"},
                "days": {"type": "integer", "description": "How many", "minimum": 1, "default": 1.5e-7},
            },
            "required": ["city"],
        },
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function",
         "function": {"name": "get_weather", "arguments": {"unit": "celsius", "city": "Zürich", "days": 2}}}
    ],
}
ANSWER = {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "{\"celsius\": 21.5}"}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **rest):
    return {"role": "assistant", "content": text, **rest}


SYSTEM = {"role": "system", "content": "You answer in one sentence.\n"}
TURNS = [
    user("Hello, who are you?"),
    assistant("I'm \"nobody\" & <nothing>.\n"),
    user("  Write {{ x }} {% if %}\n\tand 中文 🦀 'quoted'  "),
    assistant("  Done.  "),
    user("Thanks"),
]
PROMPT = {"add_generation_prompt": True}
DATE = {"date_string": "26 Jul 2024"}
CONVERSATIONS = [
    ("a question", [user("Hello")], PROMPT | DATE),
    ("a question, and no answer to come", [user("Hello")], DATE),
    ("with a system prompt", [SYSTEM, user("Hello")], PROMPT | DATE),
    ("several turns", [SYSTEM, *TURNS], PROMPT | DATE),
    ("several turns without a system prompt", TURNS, PROMPT | DATE),
    ("an answer at the end", [SYSTEM, *TURNS, assistant("Not at all.")], DATE),
    ("thoughts in the text", [user("2 + 2?"), assistant("<think>\nEasy.\n</think>\n\n4"), user("3 + 3?")], PROMPT | DATE),
    ("thoughts of their own",
     [user("2 + 2?"), assistant("4", reasoning_content="Easy."), user("3 + 3?"), assistant("6", reasoning_content="As easy.\n")],
     DATE),
    ("no thinking", [SYSTEM, user("2 + 2?")], PROMPT | DATE | {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}),
    ("thinking", [user("2 + 2?")], PROMPT | DATE | {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    ("tools", [SYSTEM, user("How warm is it?")], PROMPT | DATE | {"tools": [WEATHER]}),
    ("a call of a tool", [SYSTEM, user("How warm is it?"), CALL, ANSWER], PROMPT | DATE | {"tools": [WEATHER]}),
    ("two questions", [user("Hello"), user("Are you there?")], PROMPT | DATE),
    ("a null", [{"role": "user", "content": "Hello", "name": None}], PROMPT | DATE),
    ("parts", [user([{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}])], PROMPT | DATE),
]


def render(template, messages, variables):
    messages = _normalize_chat_messages(messages)
    return render_jinja_template(conversations=[messages], chat_template=template, **variables)[0][0]


def main():
    trl, xinference, out = sys.argv[1:]
    templates = []
    with zipfile.ZipFile(trl) as package:
        for name, bos, eos in TRL:
            templates.append((name, package.read(f"trl/chat_templates/{name}.jinja").decode(), bos, eos))
    with zipfile.ZipFile(xinference) as package:
        found = {}
        for entry in package.namelist():
            if entry.startswith("xinference/model/llm/models/") and entry.endswith(".json"):
                content = json.loads(package.read(entry))
                for model in content if isinstance(content, list) else [content]:
                    found[model["model_name"]] = model.get("chat_template")
        templates += [(name, found[name], bos, eos) for name, bos, eos in XINFERENCE]

    lines = []
    for name, messages, variables in CONVERSATIONS:
        lines.append({"conversation": name, "messages": messages, "variables": variables})
    for name, template, bos, eos in templates:
        tokens = {key: token for key, token in (("bos_token", bos), ("eos_token", eos)) if token}
        rendered = []
        for _, messages, variables in CONVERSATIONS:
            today = datetime.now().strftime("%Y-%m-%d")
            try:
                text = render(template, messages, tokens | variables)
                rendered.append({"text": text.replace(today, "@TODAY@")})
            except jinja2.exceptions.TemplateError as error:
                # What the template raises itself; its other failures are Python's and not to be repeated.
                raised = type(error) is jinja2.exceptions.TemplateError
                rendered.append({"error": str(error)} if raised else None)
            except (TypeError, AttributeError, KeyError):
                rendered.append(None)
        lines.append({"template": name, "source": template, "special_tokens": tokens, "rendered": rendered})
    path = Path(out) / "templates.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    print(path.stat().st_size, "bytes")
    for line in lines[len(CONVERSATIONS):]:
        kinds = ["-" if r is None else next(iter(r)) for r in line["rendered"]]
        print(f"{line['template']:24}", len(line["source"]), " ".join(kinds))


main()
