#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a tiny random-weight FLUX.2-dev checkpoint with the published diffusers layout.

usage: make_tiny_dev.py OUT_DIR [--seed 0]
Same classes, file names, tensor names, dtypes (bf16 text encoder and DiT, f32 VAE), sharding style and special
token ids as the published repository; only widths, depths and the vocabulary are scaled down. Kept real:
32 latent channels (128 after the 2x2 patch), 512 tokens, taps 10/20/30, the 1000 special tokens and their
ids, left padding, the `guidance_embeds` key that is absent from transformer/config.json.
"""
import argparse, json, math, os, random
import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Pipeline, Flux2Transformer2DModel
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

# the pre-tokeniser of the published tokenizer.json (the Llama-3 one, not tekken's own)
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
NAMED = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
         "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
SPECIAL = NAMED + [f"<SPECIAL_{i}>" for i in range(20, 1000)]
# Own template; for one system and one user message it renders the same text as the published one.
CHAT = ("{{- bos_token }}{%- set ns = namespace(rest=messages) %}"
        "{%- macro text(c) %}{%- if c is string %}{{- c }}{%- else %}{%- for b in c %}"
        "{%- if b['type'] == 'text' %}{{- b['text'] }}{%- else %}{{- '[IMG]' }}{%- endif %}{%- endfor %}{%- endif %}{%- endmacro %}"
        "{%- for m in messages %}{%- if m['role'] == 'system' %}{{- '[SYSTEM_PROMPT]' + text(m['content']) + '[/SYSTEM_PROMPT]' }}"
        "{%- elif m['role'] == 'user' %}{{- '[INST]' + text(m['content']) + '[/INST]' }}"
        "{%- else %}{{- text(m['content']) + eos_token }}{%- endif %}{%- endfor %}")
VOCAB = 1536
dump = lambda o, p: json.dump(o, open(p, "w"), separators=(",", ":"), ensure_ascii=False)


def byte_chars():
    """byte -> printable character, the GPT-2 table"""
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    out, n = {}, 0
    for b in range(256):
        if b in keep:
            out[b] = chr(b)
        else:
            out[b] = chr(256 + n); n += 1
    return out


def corpus(seed):
    r = random.Random(seed)
    adj = "red blue tall quiet rusty golden foggy bright tiny ancient wooden frozen striped glowing empty".split()
    noun = "fox teapot lighthouse street cafe mountain river violin astronaut cat ramen bridge forest window garden".split()
    place = "in fresh snow|at dawn|under neon lights|beside the sea|on a marble table|in the morning light".split("|")
    style = "wildlife photography|oil painting|macro photo|pencil sketch|cinematic still|watercolour".split("|")
    out = [f"A {r.choice(adj)} {r.choice(noun)} and the {r.choice(adj)} {r.choice(noun)} {r.choice(place)}, "
           f"{r.choice(style)}. It's {r.randint(1, 2026)}; don't change the {r.choice(noun)}'s colour!\n" for _ in range(4000)]
    out += ["Structured responses about image descriptions, object relationships and actions.\n",
            "Replace the cup of coffee with a tall glass of orange juice.\n"] * 40
    return out


def make_tokenizer(dst, seed):
    t = Tokenizer(models.BPE())
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
                                     pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.pre_tokenizer = split
    t.train_from_iterator(corpus(seed), trainers.BpeTrainer(vocab_size=VOCAB - len(SPECIAL), show_progress=False,
                          initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    learnt = [k for k, v in sorted(t.get_vocab().items(), key=lambda kv: kv[1]) if len(k) > 1]
    B = byte_chars()
    rank = {s: len(SPECIAL) + i for i, s in enumerate([B[b] for b in range(256)] + learnt)}   # as tekken: bytes in order, then merges
    merges = []
    for s in rank:                                       # every split into two known pieces, in the order of the result
        cut = [(s[:i], s[i:]) for i in range(1, len(s)) if s[:i] in rank and s[i:] in rank]
        merges += sorted(cut, key=lambda p: (rank[p[0]], rank[p[1]]))
    vocab = {s: i for i, s in enumerate(SPECIAL)} | rank
    t = Tokenizer(models.BPE(vocab, merges, fuse_unk=False)); t.model.ignore_merges = True
    t.pre_tokenizer, t.decoder = split, decoders.ByteLevel()
    t.add_special_tokens(SPECIAL)
    t.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
    os.makedirs(dst, exist_ok=True)
    t.save(f"{dst}/tokenizer.json", pretty=False)
    dump({"add_bos_token": True, "add_eos_token": False, "add_prefix_space": None,
          "added_tokens_decoder": {str(i): {"content": s, "lstrip": False, "normalized": False, "rstrip": False,
                                            "single_word": False, "special": True} for i, s in enumerate(SPECIAL)},
          "additional_special_tokens": NAMED, "bos_token": "<s>", "clean_up_tokenization_spaces": False, "eos_token": "</s>",
          "extra_special_tokens": {}, "legacy": True, "model_max_length": 10 ** 30, "pad_token": "<pad>", "padding_side": "left",
          "processor_class": "PixtralProcessor", "tokenizer_class": "LlamaTokenizerFast", "unk_token": "<unk>",
          "use_default_system_prompt": False}, f"{dst}/tokenizer_config.json")
    dump({"additional_special_tokens": NAMED, "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
         f"{dst}/special_tokens_map.json")
    dump({"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "image_token": "[IMG]", "patch_size": 14,
          "processor_class": "PixtralProcessor", "spatial_merge_size": 2}, f"{dst}/processor_config.json")
    dump({"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
          "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_processor_type": "PixtralImageProcessorFast",
          "image_std": [0.26862954, 0.26130258, 0.27577711], "patch_size": {"height": 14, "width": 14},
          "processor_class": "PixtralProcessor", "resample": 3, "rescale_factor": 0.00392156862745098,
          "size": {"longest_edge": 1540}}, f"{dst}/preprocessor_config.json")
    open(f"{dst}/chat_template.jinja", "w").write(CHAT)


@torch.no_grad()
def fill(mod, g, dtype):
    """Variance-preserving random weights, so that every stage stays O(1)."""
    for name, p in sorted(mod.named_parameters()):
        if p.ndim >= 2:
            std = 1.0 if "embed_tokens" in name else 1.0 / math.sqrt(p[0].numel())
            if "modulation" in name or "norm_out.linear" in name:
                std *= 0.5
            v = torch.randn(p.shape, generator=g) * std
        elif name.endswith("weight") and ("norm" in name or "ln_pre" in name):
            v = 1.0 + 0.1 * torch.randn(p.shape, generator=g)
        else:
            v = 0.05 * torch.randn(p.shape, generator=g)
        p.copy_(v)
    for name, b in sorted(mod.named_buffers()):
        if name.endswith("running_mean"):
            b.copy_(0.2 * torch.randn(b.shape, generator=g))
        elif name.endswith("running_var"):
            b.copy_(0.5 + 1.5 * torch.rand(b.shape, generator=g))
    return mod.to(dtype).eval()


def save_shards(dst, stem, tensors, limit):
    """Shards in insertion order like huggingface_hub's splitter, file names 00001-of-0000N, and the index."""
    shards, size = [[]], 0
    for k, v in tensors.items():
        nb = v.numel() * v.element_size()
        if size + nb > limit and shards[-1]:
            shards.append([]); size = 0
        shards[-1].append(k); size += nb
    os.makedirs(dst, exist_ok=True)
    wm = {}
    for i, names in enumerate(shards, 1):
        f = f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file({k: tensors[k].contiguous() for k in names}, f"{dst}/{f}", metadata={"format": "pt"})
        os.chmod(f"{dst}/{f}", 0o644)
        wm |= {k: f for k in names}
    total = sum(v.numel() * v.element_size() for v in tensors.values())
    json.dump({"metadata": {"total_size": total}, "weight_map": dict(sorted(wm.items()))},
              open(f"{dst}/{stem}.safetensors.index.json", "w"), indent=1)


TEXT = {"attention_dropout": 0.0, "head_dim": 32, "hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.02,
        "intermediate_size": 64, "max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 4,
        "num_hidden_layers": 31, "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0,
        "sliding_window": None, "use_cache": True, "vocab_size": VOCAB}
VISION = {"attention_dropout": 0.0, "head_dim": 16, "hidden_act": "silu", "hidden_size": 32, "image_size": 1540,
          "initializer_range": 0.02, "intermediate_size": 64, "model_type": "pixtral", "num_attention_heads": 2,
          "num_channels": 3, "num_hidden_layers": 2, "patch_size": 14, "rope_theta": 10000.0}
TE = {"architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
      "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2, "text_config": TEXT,
      "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vision_config": VISION, "vision_feature_layer": -1}
DIT = {"attention_head_dim": 32, "axes_dims_rope": [8, 8, 8, 8], "eps": 1e-06, "in_channels": 128, "joint_attention_dim": 144,
       "mlp_ratio": 3.0, "num_attention_heads": 2, "num_layers": 2, "num_single_layers": 4, "out_channels": None,
       "patch_size": 1, "rope_theta": 2000, "timestep_guidance_channels": 256}   # no guidance_embeds: default true


def main():
    ap = argparse.ArgumentParser(); ap.add_argument("out"); ap.add_argument("--seed", type=int, default=0)
    a = ap.parse_args(); out = a.out
    os.makedirs(out, exist_ok=True)
    make_tokenizer(f"{out}/tokenizer", a.seed)
    g = torch.Generator().manual_seed(a.seed + 100)
    te = Mistral3ForConditionalGeneration(Mistral3Config(**json.loads(json.dumps({k: v for k, v in TE.items() if k != "torch_dtype"}))))
    tr = Flux2Transformer2DModel(**DIT)
    vae = AutoencoderKLFlux2(block_out_channels=(16, 32, 32, 32), layers_per_block=2, latent_channels=32, norm_num_groups=8,
                             sample_size=1024, batch_norm_eps=1e-4)
    fill(te, g, torch.bfloat16); fill(tr, g, torch.bfloat16); fill(vae, g, torch.float32)
    # published names: the pre-v5 spelling, vision tower first, LM head last
    sd = te.state_dict()
    pick = lambda old, new: {new + k[len(old):]: v for k, v in sd.items() if k.startswith(old)}
    sd = (pick("model.vision_tower.", "vision_tower.") | pick("model.multi_modal_projector.", "multi_modal_projector.")
          | pick("model.language_model.", "language_model.model.") | {"language_model.lm_head.weight": sd["lm_head.weight"]})
    save_shards(f"{out}/text_encoder", "model", sd, 1_000_000)
    json.dump(TE, open(f"{out}/text_encoder/config.json", "w"), indent=1)
    json.dump({"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2}, open(f"{out}/text_encoder/generation_config.json", "w"))
    save_shards(f"{out}/transformer", "diffusion_pytorch_model", tr.state_dict(), 800_000)
    json.dump({"_class_name": "Flux2Transformer2DModel", "_diffusers_version": "0.36.0.dev0", **DIT},
              open(f"{out}/transformer/config.json", "w"), indent=1)
    vae.save_pretrained(f"{out}/vae"); os.chmod(f"{out}/vae/diffusion_pytorch_model.safetensors", 0o644)
    FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15,
                                    base_image_seq_len=256, max_image_seq_len=4096,
                                    time_shift_type="exponential").save_pretrained(f"{out}/scheduler")
    json.dump({"_class_name": "Flux2Pipeline", "_diffusers_version": "0.36.0.dev0",
               "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
               "text_encoder": ["transformers", "Mistral3ForConditionalGeneration"],
               "tokenizer": ["transformers", "PixtralProcessor"], "transformer": ["diffusers", "Flux2Transformer2DModel"],
               "vae": ["diffusers", "AutoencoderKLFlux2"]}, open(f"{out}/model_index.json", "w"), indent=1)
    p = Flux2Pipeline.from_pretrained(out, torch_dtype=torch.bfloat16)
    tk = p.tokenizer.tokenizer
    print("reloaded", type(p).__name__, type(p.tokenizer).__name__, type(tk).__name__, "pad", tk.pad_token_id, tk.padding_side,
          "guidance_embeds", p.transformer.config.guidance_embeds, "rope", p.text_encoder.config.text_config.rope_parameters,
          "window", p.text_encoder.config.text_config.sliding_window)
    new = p.text_encoder.state_dict()
    bad = [k for k, v in sd.items() if not torch.equal(v, new[k.replace("language_model.model.", "model.language_model.")
           .replace("language_model.lm_head", "lm_head") if k.startswith("language_model") else "model." + k])]
    print("text encoder tensors", len(sd), "differing after reload:", bad)


if __name__ == "__main__":
    main()
