"""Writes tests/fixtures/rope/rope.json: rows of rotary tables as the transformers library makes them.

Run by hand where torch and transformers are installed; the result is kept in the tree.
"""
import json
import pathlib
import sys

try:
    import torch
    import transformers
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
except ImportError as e:
    print(f"make_rope: skipped, {e}")
    sys.exit(0)

BASE = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=256, hidden_size=64, intermediate_size=128,
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False, torch_dtype="bfloat16",
)
SHORT = [1.0 + 0.05 * i for i in range(8)]
LONG = [1.0 + 1.5 * i for i in range(8)]
CASES = {
    "default": (dict(rope_type="default", rope_theta=10000.0), {}),
    "theta 5e5": (dict(rope_type="default", rope_theta=500000.0), {}),
    "linear": (dict(rope_type="linear", rope_theta=10000.0, factor=4.0), {}),
    "dynamic": (dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0), {}),
    "llama3": (
        dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=32), {}),
    "yarn": (dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16), {}),
    "yarn, betas": (
        dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16, beta_fast=16.0,
             beta_slow=2.0), {}),
    "yarn, attention factor": (
        dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16,
             attention_factor=0.7), {}),
    "yarn, mscale": (
        dict(rope_type="yarn", rope_theta=10000.0, factor=40.0, original_max_position_embeddings=16, mscale=0.8,
             mscale_all_dim=0.5), {}),
    "yarn, not truncated": (
        dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, original_max_position_embeddings=16,
             truncate=False, beta_fast=32.0, beta_slow=1.0), {}),
    "longrope": (
        dict(rope_type="longrope", rope_theta=10000.0, short_factor=SHORT, long_factor=LONG,
             original_max_position_embeddings=32, factor=2.0), {}),
    "longrope, attention factor": (
        dict(rope_type="longrope", rope_theta=10000.0, short_factor=SHORT, long_factor=LONG,
             original_max_position_embeddings=32, attention_factor=1.3), {}),
}
out = {"made_by": f"transformers {transformers.__version__}, torch {torch.__version__}", "cases": []}
for name, (rope, more) in CASES.items():
    config = dict(BASE, rope_parameters=rope, **more)
    model = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")}))
    rows = []
    for length in (8, 40, 64, 100, 250):
        pos = sorted({0, 1, 5, length // 2, length - 1} & set(range(length)))
        ids = torch.arange(length)[None]
        cos, sin = model(torch.zeros(1, length, 16), ids)
        for p in pos:
            rows.append(dict(length=length, pos=p, cos=cos[0, p, :8].tolist(), sin=sin[0, p, :8].tolist()))
    out["cases"].append(dict(name=name, config=config, rows=rows))
path = pathlib.Path(__file__).resolve().parents[1] / "fixtures" / "rope" / "rope.json"
path.parent.mkdir(exist_ok=True)
path.write_text(json.dumps(out, indent=None, separators=(",", ":")) + "\n")
print(f"make_rope: {len(out['cases'])} cases, {path.stat().st_size} bytes")
