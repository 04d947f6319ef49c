#!/usr/bin/env python3
"""Reference logits of a checkpoint, computed by mlx-lm in f32.

  pip install 'mlx[cpu]==0.32.4' 'mlx-lm==0.32.2'
  python mlx_logits.py assets/tiny assets/heldout.txt tests/fixtures/tiny_logits.safetensors

Takes the beginning of the text's first paragraph, runs the checkpoint on it with every float parameter
(scales and biases too) upcast to f32, and writes

  tokens      i32 [T]
  logits_f32  f32 [T, V]
"""
import argparse
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm import generate, load

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint", type=Path, help="checkpoint folder")
parser.add_argument("text", type=Path, help="text file, paragraphs separated by blank lines")
parser.add_argument("out", type=Path, help="safetensors file to write")
parser.add_argument("--tokens", type=int, default=40, help="number of tokens (default: 40)")
parser.add_argument("--generate", metavar="PROMPT", help="also print mlx-lm's greedy continuation of this prompt")
args = parser.parse_args()

mx.set_default_device(mx.cpu)
model, tokenizer = load(str(args.checkpoint))
model.update(
    tree_map(lambda v: v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v, model.parameters())
)
paragraph = args.text.read_text().split("\n\n")[0]
tokens = mx.array(tokenizer.encode(paragraph)[: args.tokens], dtype=mx.int32)
logits = model(tokens[None])[0].astype(mx.float32)
if not mx.all(mx.isfinite(logits)):
    raise SystemExit(f"{args.checkpoint}: the logits are not all finite")
mx.save_safetensors(str(args.out), {"tokens": tokens, "logits_f32": logits})
print(f"{args.out}: {tokens.size} tokens, logits {logits.shape}, standard deviation {mx.std(logits).item():.4f}")
print(repr(tokenizer.decode(tokens.tolist())))
if args.generate is not None:
    print(args.generate + generate(model, tokenizer, args.generate, max_tokens=256))
