#!/usr/bin/env python3
"""mlx-lm's quantizers that learn from a text, on a CPU, with a text of ours in place of the one that they fetch.

  pip install mlx[cpu]==0.32.4 mlx-lm==0.32.2
  python mlx_lm_quant.py TEXT {awq,dwq,gptq,dynamic_quant} [options of mlx_lm.quant.THAT]

Texts in TEXT are separated by blank lines. awq, gptq and dynamic_quant get them one after another, cut into their samples,
each behind the token that begins and ends one; dwq gets each as a sample.
"""
import importlib
import sys

import mlx.core as mx

text, method = sys.argv[1], sys.argv[2]
module = importlib.import_module(f"mlx_lm.quant.{method}")
texts = [part.strip() for part in open(text).read().split("\n\n") if part.strip()]
mx.set_default_device(mx.cpu)


def stream(tokenizer, num_samples, sequence_length):
    end = tokenizer.eos_token_id
    tokens = [end]
    for part in texts:
        tokens += [*tokenizer.encode(part, add_special_tokens=False), end]
    count = len(tokens) // sequence_length
    samples = mx.array(tokens[: count * sequence_length]).reshape(-1, sequence_length)
    chosen = mx.random.permutation(count)
    return samples[chosen[:num_samples] if num_samples > 0 else chosen]


def samples(tokenizer, data_path, num_samples, max_seq_length, num_valid_samples=32):
    end = tokenizer.eos_token_id
    all_of_them = [([end, *tokenizer.encode(part, add_special_tokens=False), end][:max_seq_length], 0) for part in texts]
    return all_of_them[num_valid_samples:][:num_samples], all_of_them[:num_valid_samples]


module.load_data = samples if method == "dwq" else stream
sys.argv = [f"mlx_lm.quant.{method}", *sys.argv[3:]]
module.main()
