#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a tiny random-weight FLUX.2-klein checkpoint with the published diffusers layout.

usage: make_tiny_checkpoint.py OUT_DIR [--seed 0]
Same architecture, tensor names, file names and dtype (bf16) as the real one; only the widths
and depths are scaled down. Latent channels (32), the 2x2 patch (128 DiT channels), the 512-token
prompt and the tap layers (9, 18, 27) are kept real, so noise and token goldens carry over.
"""
import argparse, json, math, os, random
import torch
from diffusers import (AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline,
                       Flux2Transformer2DModel)
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers, AddedToken
from transformers import Qwen2TokenizerFast, Qwen3Config, Qwen3ForCausalLM

QWEN_RE = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
# the 26 added tokens of Qwen3, in id order from <|endoftext|>; True = flagged special
ADDED = [("<|endoftext|>", 1), ("<|im_start|>", 1), ("<|im_end|>", 1), ("<|object_ref_start|>", 1),
         ("<|object_ref_end|>", 1), ("<|box_start|>", 1), ("<|box_end|>", 1), ("<|quad_start|>", 1),
         ("<|quad_end|>", 1), ("<|vision_start|>", 1), ("<|vision_end|>", 1), ("<|vision_pad|>", 1),
         ("<|image_pad|>", 1), ("<|video_pad|>", 1), ("<tool_call>", 0), ("</tool_call>", 0),
         ("<|fim_prefix|>", 0), ("<|fim_middle|>", 0), ("<|fim_suffix|>", 0), ("<|fim_pad|>", 0),
         ("<|repo_name|>", 0), ("<|file_sep|>", 0), ("<tool_response>", 0), ("</tool_response>", 0),
         ("<think>", 0), ("</think>", 0)]
# Own template; for one user message it renders the same bytes as the published one with
# add_generation_prompt=True, enable_thinking=False.
CHAT = ("{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
        "{%- endif %}")


def corpus(seed):
    r = random.Random(seed)
    adj = "red blue tall quiet rusty golden foggy bright tiny ancient wooden frozen striped glowing empty".split()
    noun = "fox teapot lighthouse street cafe mountain river violin astronaut cat ramen bridge forest window garden".split()
    place = "in fresh snow|at dawn|under neon lights|beside the sea|on a marble table|in the morning light".split("|")
    style = "wildlife photography|oil painting|macro photo|pencil sketch|cinematic still|watercolour".split("|")
    out = []
    for _ in range(4000):
        out.append(f"A {r.choice(adj)} {r.choice(noun)} and the {r.choice(adj)} {r.choice(noun)} {r.choice(place)}, "
                   f"{r.choice(style)}. It's {r.randint(1, 2026)}; don't change the {r.choice(noun)}'s colour!\n")
    out += ["user\nassistant\nReplace the cup of coffee with a tall glass of orange juice.\n"] * 20
    return out


def make_tokenizer(dst, seed):
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN_RE), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    t.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    t.train_from_iterator(corpus(seed), trainers.BpeTrainer(
        vocab_size=640, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    for s, sp in ADDED:
        a = AddedToken(s, special=bool(sp), normalized=False)
        (t.add_special_tokens if sp else t.add_tokens)([a])
    os.makedirs(dst, exist_ok=True)
    t.save(os.path.join(dst, "tokenizer.json"))
    t.model.save(dst)                                    # vocab.json + merges.txt
    base = t.token_to_id("<|endoftext|>")
    json.dump({s: base + i for i, (s, _) in enumerate(ADDED)}, open(f"{dst}/added_tokens.json", "w"), indent=1)
    json.dump({"add_bos_token": False, "add_prefix_space": False, "bos_token": None, "eos_token": "<|im_end|>",
               "pad_token": "<|endoftext|>", "unk_token": None, "errors": "replace", "split_special_tokens": False,
               "model_max_length": 131072, "clean_up_tokenization_spaces": False, "tokenizer_class": "Qwen2Tokenizer",
               "added_tokens_decoder": {str(base + i): {"content": s, "lstrip": False, "normalized": False, "rstrip": False,
                                                        "single_word": False, "special": bool(sp)}
                                        for i, (s, sp) in enumerate(ADDED)}},
              open(f"{dst}/tokenizer_config.json", "w"), indent=1)
    json.dump({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
               "additional_special_tokens": [s for s, sp in ADDED if sp][1:]},
              open(f"{dst}/special_tokens_map.json", "w"), indent=1)
    open(f"{dst}/chat_template.jinja", "w").write(CHAT)
    return t


@torch.no_grad()
def fill(mod, g):
    """Variance-preserving random weights (values rounded to bf16), so that every stage stays O(1)."""
    for name, p in sorted(mod.named_parameters()):
        if p.ndim >= 2:
            fan = p[0].numel()
            std = 1.0 if "embed_tokens" in name else 1.0 / math.sqrt(fan)
            if "modulation" in name or "norm_out.linear" in name:
                std *= 0.5
            v = torch.randn(p.shape, generator=g) * std
        elif "norm" in name and name.endswith("weight"):
            v = 1.0 + 0.1 * torch.randn(p.shape, generator=g)
        else:
            v = 0.05 * torch.randn(p.shape, generator=g)
        p.copy_(v.to(torch.bfloat16))
    for name, b in sorted(mod.named_buffers()):
        if name.endswith("running_mean"):
            b.copy_((0.2 * torch.randn(b.shape, generator=g)).to(torch.bfloat16))
        elif name.endswith("running_var"):
            b.copy_((0.5 + 1.5 * torch.rand(b.shape, generator=g)).to(torch.bfloat16))
    return mod.to(torch.bfloat16).eval()


def main():
    ap = argparse.ArgumentParser(); ap.add_argument("out"); ap.add_argument("--seed", type=int, default=0)
    a = ap.parse_args()
    os.makedirs(a.out, exist_ok=True)
    tok_dir = os.path.join(a.out, "tokenizer")
    t = make_tokenizer(tok_dir, a.seed)
    tok = Qwen2TokenizerFast.from_pretrained(tok_dir)
    g = torch.Generator().manual_seed(a.seed)
    te = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=704, hidden_size=48, intermediate_size=128, num_hidden_layers=30, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, hidden_act="silu", max_position_embeddings=40960, rms_norm_eps=1e-6,
        tie_word_embeddings=True, rope_theta=1000000.0, attention_bias=False, use_sliding_window=False,
        sliding_window=None, max_window_layers=30, bos_token_id=t.token_to_id("<|endoftext|>"),
        eos_token_id=t.token_to_id("<|im_end|>")))
    assert len(tok) <= 704
    tr = Flux2Transformer2DModel(
        patch_size=1, in_channels=128, out_channels=None, num_layers=2, num_single_layers=4, attention_head_dim=32,
        num_attention_heads=3, joint_attention_dim=3 * 48, timestep_guidance_channels=256, mlp_ratio=3.0,
        axes_dims_rope=(8, 8, 8, 8), rope_theta=2000, eps=1e-6, guidance_embeds=False)
    vae = AutoencoderKLFlux2(block_out_channels=(16, 32, 32, 32), layers_per_block=2, latent_channels=32,
                             norm_num_groups=8, sample_size=1024, batch_norm_eps=1e-4)
    sched = FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15,
        base_image_seq_len=256, max_image_seq_len=4096, time_shift_type="exponential")
    fill(te, g); fill(tr, g); fill(vae, g)
    Flux2KleinPipeline(sched, vae, te, tok, tr, is_distilled=True)   # sanity: accepted by the pipeline
    te.save_pretrained(f"{a.out}/text_encoder", max_shard_size="1500KB")
    tr.save_pretrained(f"{a.out}/transformer")
    vae.save_pretrained(f"{a.out}/vae")
    sched.save_pretrained(f"{a.out}/scheduler")
    json.dump({"_class_name": "Flux2KleinPipeline", "_diffusers_version": "0.37.1", "is_distilled": True,
               "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
               "text_encoder": ["transformers", "Qwen3ForCausalLM"],
               "tokenizer": ["transformers", "Qwen2TokenizerFast"],
               "transformer": ["diffusers", "Flux2Transformer2DModel"],
               "vae": ["diffusers", "AutoencoderKLFlux2"]}, open(f"{a.out}/model_index.json", "w"), indent=2)
    p = Flux2KleinPipeline.from_pretrained(a.out, torch_dtype=torch.bfloat16)
    print("reloaded:", type(p).__name__, "tokens", len(p.tokenizer), "pad", p.tokenizer.pad_token_id, p.tokenizer.padding_side)


if __name__ == "__main__":
    main()
