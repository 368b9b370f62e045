#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stream a FULL-SIZE random-weight FLUX.2-klein-4B checkpoint (bf16, ~16 GB) to disk.

usage: make_full_checkpoint.py OUT_DIR TOKENIZER_DIR [--seed 0]
Names, shapes, file names and shard split follow the published layout. Values come from one seeded
pool of 2^24 normals, re-scaled per tensor (std = 1/sqrt(fan_in)), so RAM stays under ~1 GiB.
"""
import argparse, json, math, os, shutil, struct, zlib
import numpy as np, torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from transformers import Qwen3Config, Qwen3ForCausalLM

TR = dict(patch_size=1, in_channels=128, out_channels=None, num_layers=5, num_single_layers=20, attention_head_dim=128,
          num_attention_heads=24, joint_attention_dim=7680, timestep_guidance_channels=256, mlp_ratio=3.0,
          axes_dims_rope=[32, 32, 32, 32], rope_theta=2000, eps=1e-6, guidance_embeds=False)
TE = dict(vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
          num_key_value_heads=8, head_dim=128, hidden_act="silu", max_position_embeddings=40960, rms_norm_eps=1e-6,
          tie_word_embeddings=True, attention_bias=False, use_sliding_window=False, sliding_window=None,
          max_window_layers=36, bos_token_id=151643, eos_token_id=151645)


def scale_of(name, shape):
    if name.endswith(("running_mean",)): return 0.05, 0.0
    if name.endswith(("running_var",)): return 0.0, 1.0
    if len(shape) >= 2:
        fan = int(np.prod(shape[1:]))
        s = 0.02 if "embed_tokens" in name else 1.0 / math.sqrt(fan)
        if "modulation" in name or "norm_out.linear" in name: s *= 0.25
        return s, 0.0
    if "norm" in name and name.endswith("weight"): return 0.02, 1.0
    return 0.02, 0.0


def write(path, items, pool, meta=None):
    """items: [(name, shape, torch dtype)]"""
    hdr, off = {"__metadata__": meta or {"format": "pt"}}, 0
    for n, sh, dt in items:
        nb = int(np.prod(sh, dtype=np.int64)) * (8 if dt == torch.int64 else 2)
        hdr[n] = {"dtype": "I64" if dt == torch.int64 else "BF16", "shape": list(sh), "data_offsets": [off, off + nb]}
        off += nb
    h = json.dumps(hdr, separators=(",", ":")).encode(); h += b" " * (-len(h) % 8)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(h))); f.write(h)
        for n, sh, dt in items:
            cnt = int(np.prod(sh, dtype=np.int64))
            if dt == torch.int64:
                f.write(np.zeros(cnt, "<i8").tobytes()); continue
            s, m = scale_of(n, sh); o = zlib.crc32(n.encode()) % (pool.numel() // 2)
            while cnt:
                k = min(cnt, pool.numel() - o)
                f.write((pool[o:o + k] * s + m).to(torch.bfloat16).view(torch.int16).numpy().tobytes())
                cnt -= k; o = 0 if o else (o + 7919) % 65536
    print(os.path.relpath(path), off / 1e9, "GB", len(items), "tensors", flush=True)
    return off


def main():
    ap = argparse.ArgumentParser(); ap.add_argument("out"); ap.add_argument("tok"); ap.add_argument("--seed", type=int, default=0)
    a = ap.parse_args(); o = a.out; os.makedirs(o, exist_ok=True)
    pool = torch.randn(1 << 24, generator=torch.Generator().manual_seed(a.seed)).clamp_(-3, 3)
    shapes = lambda m: [(k, tuple(v.shape), torch.int64 if v.dtype == torch.int64 else torch.bfloat16)
                        for k, v in m.state_dict().items()]
    with torch.device("meta"):
        tr = Flux2Transformer2DModel(**TR); vae = AutoencoderKLFlux2(); te = Qwen3ForCausalLM(Qwen3Config(**TE, rope_theta=1e6))
    write(f"{o}/vae/diffusion_pytorch_model.safetensors", sorted(shapes(vae)), pool); vae.save_config(f"{o}/vae")
    write(f"{o}/transformer/diffusion_pytorch_model.safetensors", sorted(shapes(tr)), pool); tr.save_config(f"{o}/transformer")
    items = [i for i in shapes(te) if i[0] != "lm_head.weight"]       # tied
    sh1, sh2, n, half = [], [], 0, 4_967_215_360                       # split like a 5 GB shard limit
    for it in items:
        n += 2 * int(np.prod(it[1], dtype=np.int64)); (sh1 if n <= half else sh2).append(it)
    tot = sum(write(f"{o}/text_encoder/model-0000{i+1}-of-00002.safetensors", s, pool) for i, s in enumerate((sh1, sh2)))
    json.dump({"metadata": {"total_size": tot}, "weight_map": {it[0]: f"model-0000{i+1}-of-00002.safetensors"
               for i, s in enumerate((sh1, sh2)) for it in s}}, open(f"{o}/text_encoder/model.safetensors.index.json", "w"), indent=1)
    c = dict(TE, architectures=["Qwen3ForCausalLM"], model_type="qwen3", rope_theta=1000000, rope_scaling=None,
             torch_dtype="bfloat16", attention_dropout=0.0, initializer_range=0.02, use_cache=True)
    json.dump(c, open(f"{o}/text_encoder/config.json", "w"), indent=1)
    os.makedirs(f"{o}/scheduler", exist_ok=True)
    json.dump({"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0,
               "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256,
               "max_image_seq_len": 4096, "time_shift_type": "exponential"}, open(f"{o}/scheduler/scheduler_config.json", "w"))
    shutil.copytree(a.tok, f"{o}/tokenizer", dirs_exist_ok=True)
    json.dump({"_class_name": "Flux2KleinPipeline", "_diffusers_version": "0.37.1", "is_distilled": True,
               "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"], "text_encoder": ["transformers", "Qwen3ForCausalLM"],
               "tokenizer": ["transformers", "Qwen2TokenizerFast"], "transformer": ["diffusers", "Flux2Transformer2DModel"],
               "vae": ["diffusers", "AutoencoderKLFlux2"]}, open(f"{o}/model_index.json", "w"), indent=2)


if __name__ == "__main__":
    main()
