#!/usr/bin/env python3
"""Makes tests/fixtures/gguf: a two-layer llama in GGUF whose tensors hold random blocks of every type
that tare reads, and what the Python package gguf (the reference) decodes them to.

    tiny.gguf      the model; written by gguf.GGUFWriter
    expected.txt   a line for each tensor: HF name, rows, columns, SHA-256 of its fp32 values in HF row
                   order (names by gguf's own name map; llama's q and k rows put back)

make_gguf_fixture.py writes both; test_gguf.py checks that the committed files are what it makes."""
import hashlib
import os
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

HERE = os.path.dirname(os.path.abspath(__file__))
DIR = os.path.join(HERE, "..", "fixtures", "gguf")
HIDDEN, HEADS, KV, HEAD, FFN, VOCAB = 256, 2, 1, 16, 32, 40
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<end>{% endfor %}"
TOKENS = ["<eos>", "<bos>", "<user>"] + [chr(97 + i) for i in range(26)] + [
    "\u0120", "he", "ll", "llo", "hello", "\u0120w", "or", "\u0120wor", "1", "2"]
TOKENS.insert(7, "<eot>")
MERGES = ["h e", "l l", "ll o", "he llo", "\u0120 w", "o r", "\u0120w or"]

# (HF name, rows, columns, type); block 0 and 1 together use every type.
LINEARS = {
    0: [("self_attn.q_proj", HEADS * HEAD, HIDDEN, T.Q4_K), ("self_attn.k_proj", KV * HEAD, HIDDEN, T.Q6_K),
        ("self_attn.v_proj", KV * HEAD, HIDDEN, T.F16), ("self_attn.o_proj", HIDDEN, HEADS * HEAD, T.Q4_0),
        ("mlp.gate_proj", FFN, HIDDEN, T.Q2_K), ("mlp.up_proj", FFN, HIDDEN, T.Q3_K),
        ("mlp.down_proj", HIDDEN, FFN, T.Q5_1)],
    1: [("self_attn.q_proj", HEADS * HEAD, HIDDEN, T.Q5_K), ("self_attn.k_proj", KV * HEAD, HIDDEN, T.BF16),
        ("self_attn.v_proj", KV * HEAD, HIDDEN, T.F32), ("self_attn.o_proj", HIDDEN, HEADS * HEAD, T.Q5_0),
        ("mlp.gate_proj", FFN, HIDDEN, T.Q4_1), ("mlp.up_proj", FFN, HIDDEN, T.Q8_0),
        ("mlp.down_proj", HIDDEN, FFN, T.Q4_0)],
}
# Byte offsets of the f16 factors in a block.
FACTORS = {T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q2_K: [80, 82], T.Q3_K: [108],
           T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208]}


def blocks(rng, rows, cols, t):
    """Random bytes; factors are finite, of both signs, some zero and some subnormal."""
    if t == T.F32:
        return rng.standard_normal((rows, cols)).astype(np.float32)
    if t == T.F16:
        return rng.standard_normal((rows, cols)).astype(np.float16)
    block, size = gguf.GGML_QUANT_SIZES[t]
    raw = rng.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    if t == T.BF16:
        x = rng.standard_normal((rows, cols)).astype(np.float32)
        return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(rows, cols * 2)
    for at in FACTORS[t]:
        d = (rng.standard_normal((rows, cols // block)) * 10.0 ** rng.integers(-7, 3, (rows, cols // block))).astype(np.float16)
        d[rng.random(d.shape) < 0.02] = 0
        raw[..., at : at + 2] = d.view(np.uint8).reshape(*d.shape, 2)
    return raw.reshape(rows, -1)


def permute(w, heads):
    """As converters write q and k of llama."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def unpermute(w, heads):
    back = w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
    assert np.array_equal(permute(back, heads), w)
    return back


def tensors(rng):
    yield "model.embed_tokens", VOCAB, HIDDEN, T.Q8_0
    for layer, linears in LINEARS.items():
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield "model.layers.%d.%s" % (layer, norm), 0, HIDDEN, T.F32
        for name, rows, cols, t in linears:
            yield "model.layers.%d.%s" % (layer, name), rows, cols, t
    yield "model.norm", 0, HIDDEN, T.F32


def build(path):
    rng = np.random.default_rng(20)
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(2)
    w.add_context_length(128)
    w.add_embedding_length(HIDDEN)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV)
    w.add_key_length(HEAD)
    w.add_value_length(HEAD)
    w.add_rope_freq_base(10000.0)
    w.add_rope_dimension_count(HEAD)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(VOCAB)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(TOKENS)
    w.add_token_types([3 if t.startswith("<") else 1 for t in TOKENS])
    w.add_token_merges(MERGES)
    w.add_bos_token_id(1)
    w.add_eos_token_id(0)
    w.add_eot_token_id(7)
    w.add_add_bos_token(True)
    w.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    lines = []
    for name, rows, cols, t in tensors(rng):
        data = blocks(rng, max(rows, 1), cols, t)
        stored = gguf.dequantize(data, t).reshape(max(rows, 1), cols)
        if rows == 0:
            data = data.reshape(-1)
        w.add_tensor(names.get_name(name) + ".weight", data, raw_dtype=None if t in (T.F32, T.F16) else t)
        if ".q_proj" in name:
            stored = unpermute(stored, HEADS)
        if ".k_proj" in name:
            stored = unpermute(stored, KV)
        digest = hashlib.sha256(np.ascontiguousarray(stored, dtype="<f4").tobytes()).hexdigest()
        lines.append("%s.weight %d %d %s" % (name, max(rows, 1), cols, digest))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return "\n".join(lines) + "\n"


def main():
    os.makedirs(DIR, exist_ok=True)
    text = build(os.path.join(DIR, "tiny.gguf"))
    with open(os.path.join(DIR, "expected.txt"), "w") as f:
        f.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
