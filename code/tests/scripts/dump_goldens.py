#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run diffusers' Flux2KleinPipeline on a (tiny) checkpoint and dump every stage as safetensors.

usage: dump_goldens.py MODEL_DIR OUT_DIR [--dtype f32|bf16|f32_bf16noise|all] [--cases a,b]
File per case and dtype: OUT/<case>.<dtype>.safetensors (+ .json with scalars and names).
f32_bf16noise: f32 weights and arithmetic, started from the noise that the bf16 pipeline draws for the seed:
the yardstick for how far a bf16 run (diffusers' or ours) strays.
"""
import argparse, hashlib, json, os
import numpy as np, torch
from PIL import Image
from diffusers import Flux2KleinPipeline
from safetensors.torch import save_file

PROMPT = "A red fox standing in fresh snow at dawn, wildlife photography"
EDIT = "Replace the cup of coffee with a tall glass of orange juice.\nKeep the café's sign: 'OPEN 24/7' ☕"
CASES = {  # name: (prompt, width, height, seed, [(ref_w, ref_h, k)...])
    "t2i_64x64": (PROMPT, 64, 64, 42, []),
    "t2i_160x96": (PROMPT, 160, 96, 1234, []),
    "t2i_88x72": (EDIT, 88, 72, 7, []),                 # not multiples of 16: floored to 80x64
    "ref1_96x64": (EDIT, 96, 64, 3, [(117, 90, 1)]),
    "ref3_64x128": (EDIT, 64, 128, 2**32 + 5, [(64, 64, 1), (130, 77, 2), (70, 101, 3)]),
}


def test_image(w, h, k):
    """Integer-only procedural picture, so that any language can regenerate it."""
    y, x = np.mgrid[0:h, 0:w].astype(np.int64)
    r = (x * 7 * k + y * 3) % 256
    g = ((x * x + y * y * k) // 5) % 256
    b = (((x // 8) + (y // 8)) % 2) * 200 + (x * y * k) % 56
    return np.stack([r, g, b], -1).astype(np.uint8)


def run(pipe, name, out, dt):
    prompt, w, h, seed, refs = CASES[name]
    T, meta = {}, {"case": name, "prompt": prompt, "width": w, "height": h, "seed": seed, "dtype": dt}
    put = lambda k, v: T.__setitem__(k, v.detach().clone().contiguous())
    hooks, seen = [], set()

    def hook(mod, key, pick=None):
        def f(m, a, o):
            n = key
            if key == "dit.rope":                       # called for img ids first, then txt ids
                n = "dit.rope_img" if "dit.rope_img.cos" not in T else "dit.rope_txt"
                if n + ".cos" not in T:
                    put(n + ".cos", o[0]); put(n + ".sin", o[1])
                return
            if n in seen:
                return
            seen.add(n)
            if isinstance(o, tuple):
                for i, t in enumerate(o):
                    put(f"{n}.{i}", t)
            else:
                put(n, o)
        hooks.append(mod.register_forward_hook(f))

    tr, vae, te = pipe.transformer, pipe.vae, pipe.text_encoder
    hook(te.model.embed_tokens, "te.embed")
    for i in (0, 8, 17, 26):
        hook(te.model.layers[i], f"te.layer{i}")
    hook(te.model.layers[0].self_attn.q_norm, "te.layer0.q_norm")
    hook(te.model.rotary_emb, "te.rope")
    hook(tr.pos_embed, "dit.rope")
    hook(tr.time_guidance_embed.time_proj, "dit.time_proj")
    hook(tr.time_guidance_embed, "dit.temb")
    hook(tr.double_stream_modulation_img, "dit.mod_img"); hook(tr.double_stream_modulation_txt, "dit.mod_txt")
    hook(tr.single_stream_modulation, "dit.mod_single")
    hook(tr.x_embedder, "dit.x_embed"); hook(tr.context_embedder, "dit.ctx_embed")
    for i, b in enumerate(tr.transformer_blocks):
        hook(b, f"dit.double{i}")                       # .0 = text stream, .1 = image stream
    hook(tr.transformer_blocks[0].attn, "dit.double0.attn")   # .0 = image, .1 = text
    for i, b in enumerate(tr.single_transformer_blocks):
        hook(b, f"dit.single{i}")                       # text rows first, then image(+reference) rows
    hook(tr.norm_out, "dit.norm_out"); hook(tr, "dit.velocity_step0")
    for i, b in enumerate(vae.decoder.up_blocks):
        hook(b, f"vae.dec.up{i}")
    hook(vae.decoder.conv_in, "vae.dec.conv_in"); hook(vae.decoder.mid_block, "vae.dec.mid")
    if refs:
        for i, b in enumerate(vae.encoder.down_blocks):
            hook(b, f"vae.enc0.down{i}")
        hook(vae.encoder.mid_block, "vae.enc0.mid")

    o_prep, o_pimg, o_enc, o_dec, o_tok = (pipe.prepare_latents, pipe.prepare_image_latents, vae.encode, vae.decode,
                                           pipe.encode_prompt)
    cnt = {"e": 0, "t": 0}

    def prep(*a, **k):
        l, ids = o_prep(*a, **k); put("noise_packed", l); put("img_ids", ids); return l, ids

    def pimg(*a, **k):
        l, ids = o_pimg(*a, **k); put("ref_tokens", l); put("ref_ids", ids); return l, ids

    def enc(x, *a, **k):
        r = o_enc(x, *a, **k); i = cnt["e"]; cnt["e"] += 1
        put(f"ref{i}.pixels", x); put(f"ref{i}.moments", r.latent_dist.parameters); return r

    def dec(z, *a, **k):
        r = o_dec(z, *a, **k); put("vae.dec.input", z); put("vae.dec.output", r[0]); return r

    def encp(*a, **k):
        e, ids = o_tok(*a, **k); put("prompt_embeds", e); put("txt_ids", ids); return e, ids

    pipe.prepare_latents, pipe.prepare_image_latents, vae.encode, vae.decode, pipe.encode_prompt = prep, pimg, enc, dec, encp
    tok = pipe.tokenizer
    text = tok.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True,
                                   enable_thinking=False)
    enc_in = tok(text, return_tensors="pt", padding="max_length", truncation=True, max_length=512)
    meta["chat_text"] = text
    put("input_ids", enc_in["input_ids"]); put("attention_mask", enc_in["attention_mask"])

    orig_fwd = tr.forward

    def fwd(*a, **k):
        i = cnt["t"]; cnt["t"] += 1
        put(f"step{i}.timestep_in", k["timestep"]); r = orig_fwd(*a, **k); put(f"step{i}.model_out", r[0]); return r
    tr.forward = fwd

    imgs = []
    for i, (rw, rh, k) in enumerate(refs):
        a = test_image(rw, rh, k); put(f"ref{i}.source_rgb", torch.from_numpy(a.copy())); imgs.append(Image.fromarray(a))

    def cb(p, i, t, kw):
        put(f"step{i}.latents_after", kw["latents"]); return kw
    with torch.no_grad():
        latents = None
        if dt == "f32_bf16noise":
            latents = torch.randn((1, 128, h // 16, w // 16), generator=torch.Generator().manual_seed(seed),
                                  dtype=torch.bfloat16).float()
        img = pipe(latents=latents, prompt=prompt, image=imgs or None, width=w, height=h, num_inference_steps=4, guidance_scale=1.0,
                   generator=torch.Generator().manual_seed(seed), callback_on_step_end=cb).images[0]
    put("image_u8", torch.from_numpy(np.array(img)))
    put("sched.sigmas", pipe.scheduler.sigmas); put("sched.timesteps", pipe.scheduler.timesteps)
    for hk in hooks:
        hk.remove()
    pipe.prepare_latents, pipe.prepare_image_latents, vae.encode, vae.decode, pipe.encode_prompt = o_prep, o_pimg, o_enc, o_dec, o_tok
    tr.forward = orig_fwd
    T = {k: v for k, v in T.items() if isinstance(v, torch.Tensor)}
    os.makedirs(out, exist_ok=True)
    save_file(T, f"{out}/{name}.{dt}.safetensors")
    meta["image_sha256"] = hashlib.sha256(np.array(img).tobytes()).hexdigest()
    meta["image_size"] = img.size
    meta["tensors"] = {k: [str(v.dtype).replace("torch.", ""), list(v.shape)] for k, v in sorted(T.items())}
    json.dump(meta, open(f"{out}/{name}.{dt}.json", "w"), indent=1)
    print(name, dt, img.size, meta["image_sha256"][:16], "std", float(T["vae.dec.output"].float().std()),
          "vel", float(T["step0.model_out"].float().std()), "emb", float(T["prompt_embeds"].float().std()))


if __name__ == "__main__":
    ap = argparse.ArgumentParser(); ap.add_argument("model"); ap.add_argument("out")
    ap.add_argument("--dtype", default="all"); ap.add_argument("--cases", default=",".join(CASES))
    a = ap.parse_args()
    for dt in (["f32", "bf16", "f32_bf16noise"] if a.dtype == "all" else [a.dtype]):
        pipe = Flux2KleinPipeline.from_pretrained(a.model, torch_dtype=torch.bfloat16 if dt == "bf16" else torch.float32)
        pipe.set_progress_bar_config(disable=True)
        for c in a.cases.split(","):
            run(pipe, c, a.out, dt)
