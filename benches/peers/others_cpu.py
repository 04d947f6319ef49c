"""mlx-lm or mistral.rs on the CPU, for decode_cpu.py: rounds that it asks for, a line of JSON each.

    pip install "mlx[cpu]==0.32.4" mlx-lm==0.32.2        # python3 others_cpu.py mlx-lm FOLDER
    pip install mistralrs==0.9.5 gguf==0.19.0            # python3 others_cpu.py mistral.rs FILE.gguf

Each line of the input, {"kind": "decode", "case": "16", "steps": 16}, is answered by {"value": tokens per second}, or {"error": why}.
mlx-lm runs the very folder of this crate's bench. mistral.rs wants a tokenizer, which the bench's GGUF files have none of: a copy of
the file gets one whose tokens are bytes, beside it.
"""
import json
import os
import sys
import time
from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class MlxLm:
    """Tokens are computed in chunks of its own default; each step waits for its token."""

    CHUNK = 2048

    def __init__(self, path):
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.utils import load_model

        mx.set_default_device(mx.cpu)
        self.mx, self.make_cache = mx, make_prompt_cache
        self.model, _ = load_model(Path(path))

    def read(self, count):
        """A cache of so many tokens, and the token behind them."""
        mx, cache = self.mx, self.make_cache(self.model)
        ids = mx.array([[1000 + 7 * i % 5000 for i in range(count)]])
        for start in range(0, count, self.CHUNK):
            logits = self.model(ids[:, start : start + self.CHUNK], cache=cache)[:, -1]
            mx.eval(logits, [layer.state for layer in cache])
        return cache, mx.argmax(logits, -1)

    def round(self, kind, count, steps):
        if kind == "prefill":
            start = time.perf_counter()
            self.read(count)
            return count / (time.perf_counter() - start)
        cache, token = self.read(count)
        self.mx.eval(token)
        start = time.perf_counter()
        for _ in range(steps):
            token = self.mx.argmax(self.model(token[:, None], cache=cache)[:, -1], -1)
            self.mx.eval(token)
        return steps / (time.perf_counter() - start)


class MistralRs:
    """By what it says itself of a request: prompt and answer are timed apart."""

    def __init__(self, path):
        from mistralrs import Runner, Which

        path = with_tokenizer(Path(path))
        which = Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
        self.runner = Runner(which=which, max_seqs=1, no_paged_attn=True, prefix_cache_n=0)

    def round(self, kind, count, steps):
        from mistralrs import CompletionRequest

        prompt = "".join(LETTERS[7 * i % len(LETTERS)] for i in range(count))
        request = CompletionRequest(model="default", prompt=prompt, max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
        usage = self.runner.send_completion_request(request).usage
        if usage.prompt_tokens != count:
            raise ValueError(f"a prompt of {usage.prompt_tokens} tokens, not {count}")
        return usage.avg_prompt_tok_per_sec if kind == "prefill" else usage.avg_compl_tok_per_sec


def with_tokenizer(path):
    """A copy of a GGUF file with a tokenizer: a token for each byte, one of two, and others that no text has."""
    copy = path.with_name(f"{path.stem}-bytes.gguf")
    if copy.exists():
        return copy
    import gguf

    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(copy, arch)
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "tokenizer.")) and name != "general.architecture":
            value_type = field.types[0]
            writer.add_key_value(name, field.contents(), value_type, field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None)
    (embedding,) = (tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    tokens = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    tokens += ["Ġa", *(f"<|{index}|>" for index in range(257, int(embedding.shape[-1])))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["Ġ a"])
    writer.add_token_types([1] * len(tokens))
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(False)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return copy


def main():
    kinds = {"mlx-lm": MlxLm, "mistral.rs": MistralRs}
    # What libraries print, in whatever language, does not go between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    peer = kinds[sys.argv[1]](sys.argv[2])
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"value": peer.round(asked["kind"], int(asked["case"]), asked["steps"])}
        except Exception as error:  # noqa: BLE001 - whatever a library raises is told
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
