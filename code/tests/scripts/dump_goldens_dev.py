#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run diffusers' Flux2Pipeline on a (tiny) dev checkpoint and dump every stage as safetensors.

usage: dump_goldens_dev.py MODEL_DIR OUT_DIR [--dtype f32|bf16|all] [--cases a,b]
Per case and dtype: OUT/<case>.<dtype>.safetensors and a .json with scalars, chat text and the tensor list;
OUT/index.json collects hashes, the schedules and how far bf16 strays from f32 when both start from the bf16 noise.
"""
import argparse, hashlib, json, os
import numpy as np, torch
from PIL import Image
from diffusers import Flux2Pipeline
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu, format_input, retrieve_timesteps
from safetensors.torch import save_file

PROMPT = "A red fox standing in fresh snow at dawn, wildlife photography"
EDIT = "Replace the cup of coffee with a tall glass of orange juice.\nKeep the café's sign: 'OPEN 24/7' ☕"
LONG = "[IMG]" + " ".join(f"{i} rusty lighthouses beside the frozen sea, {i * i}!" for i in range(1, 60))   # > 512 tokens
CASES = {  # name: (prompt, width, height, seed, steps, guidance, [(ref_w, ref_h, k)...])
    "t2i_64x64": (PROMPT, 64, 64, 42, 4, 4.0, []),
    "long_80x48": (LONG, 88, 56, 7, 3, 2.5, []),                  # truncated prompt (no padding), size floored to 80x48
    "ref1_96x64": (EDIT, 96, 64, 2**32 + 5, 5, 3.5, [(117, 90, 1)]),
}


def test_image(w, h, k):
    """Integer-only procedural picture, the same as in the klein goldens."""
    y, x = np.mgrid[0:h, 0:w].astype(np.int64)
    r = (x * 7 * k + y * 3) % 256
    g = ((x * x + y * y * k) // 5) % 256
    b = (((x // 8) + (y // 8)) % 2) * 200 + (x * y * k) % 56
    return np.stack([r, g, b], -1).astype(np.uint8)


def run(pipe, name, out, dt, latents=None):
    prompt, w, h, seed, steps, cfg, refs = CASES[name]
    lean = name.startswith("long")
    T, meta = {}, {"case": name, "dtype": dt, "prompt": prompt, "width": w, "height": h, "seed": seed, "steps": steps, "guidance": cfg}
    put = lambda k, v: T.__setitem__(k, v.detach().clone().contiguous())
    hooks, seen = [], set()

    def hook(mod, key):
        def f(m, a, o):
            n = key
            if key in ("dit.rope", "dit.time_proj"):      # called twice: _a image ids, _b text ids / _a time, _b guidance
                n += "_b" if key + "_a" in seen else "_a"
            if n in seen:
                return
            seen.add(n)
            ts = [t for t in o if t is not None] if isinstance(o, tuple) else [o]
            for i, t in enumerate(ts):
                put(f"{n}.{i}" if len(ts) > 1 else n, t)
        hooks.append(mod.register_forward_hook(f))

    tr, vae, te = pipe.transformer, pipe.vae, pipe.text_encoder
    lm = te.model.language_model
    if not lean:
        if not refs:
            hook(lm.rotary_emb, "te.rope"); hook(lm.layers[0].self_attn, "te.layer0.attn"); hook(lm.layers[0], "te.layer0")
        hook(tr.pos_embed, "dit.rope")
        hook(tr.x_embedder, "dit.x_embed"); hook(tr.context_embedder, "dit.ctx_embed")
        for i, b in enumerate(tr.transformer_blocks):
            hook(b, f"dit.double{i}")                     # .0 = text stream, .1 = image stream
        hook(tr.transformer_blocks[0].attn, "dit.double0.attn")   # .0 = image, .1 = text
        for i, b in enumerate(tr.single_transformer_blocks):
            hook(b, f"dit.single{i}")                     # text rows first, then image (+ reference) rows
    tg = tr.time_guidance_embed
    hook(tg.time_proj, "dit.time_proj"); hook(tg.timestep_embedder, "dit.time_emb"); hook(tg.guidance_embedder, "dit.guidance_emb")
    hook(tg, "dit.temb")
    hook(tr.double_stream_modulation_img, "dit.mod_img"); hook(tr.double_stream_modulation_txt, "dit.mod_txt")
    hook(tr.single_stream_modulation, "dit.mod_single"); hook(tr.norm_out, "dit.norm_out")
    hook(vae.decoder.conv_in, "vae.dec.conv_in"); hook(vae.decoder.mid_block, "vae.dec.mid")
    for i, b in enumerate(vae.decoder.up_blocks[:3]):
        hook(b, f"vae.dec.up{i}")

    old = {"prep": pipe.prepare_latents, "pimg": pipe.prepare_image_latents, "encp": pipe.encode_prompt, "enc": vae.encode,
           "dec": vae.decode, "fwd": tr.forward}
    cnt = {"e": 0, "t": 0}

    def prep(*a, **k):
        l, ids = old["prep"](*a, **k); put("noise_packed", l); put("img_ids", ids); return l, ids

    def pimg(*a, **k):
        l, ids = old["pimg"](*a, **k); put("ref_tokens", l); put("ref_ids", ids); return l, ids

    def encp(*a, **k):
        e, ids = old["encp"](*a, **k); put("prompt_embeds", e); put("txt_ids", ids); return e, ids

    def enc(x, *a, **k):
        r = old["enc"](x, *a, **k); i = cnt["e"]; cnt["e"] += 1
        put(f"ref{i}.pixels", x); put(f"ref{i}.moments", r.latent_dist.parameters); return r

    def dec(z, *a, **k):
        r = old["dec"](z, *a, **k); put("vae.dec.input", z); put("vae.dec.output", r[0]); return r

    def fwd(*a, **k):
        i = cnt["t"]; cnt["t"] += 1
        put(f"step{i}.timestep_in", k["timestep"])
        if i == 0:
            put("guidance_in", k["guidance"])
        r = old["fwd"](*a, **k); put(f"step{i}.model_out", r[0]); return r
    pipe.prepare_latents, pipe.prepare_image_latents, pipe.encode_prompt = prep, pimg, encp
    vae.encode, vae.decode, tr.forward = enc, dec, fwd

    proc = pipe.tokenizer
    meta["chat_text"] = proc.apply_chat_template(format_input([prompt], pipe.system_message), add_generation_prompt=False, tokenize=False)[0]
    ei = proc.apply_chat_template(format_input([prompt], pipe.system_message), add_generation_prompt=False, tokenize=True, return_dict=True,
                                  return_tensors="pt", padding="max_length", truncation=True, max_length=512)
    put("input_ids", ei["input_ids"]); put("attention_mask", ei["attention_mask"])
    imgs = []
    for i, (rw, rh, k) in enumerate(refs):
        a = test_image(rw, rh, k); put(f"ref{i}.source_rgb", torch.from_numpy(a.copy())); imgs.append(Image.fromarray(a))

    def cb(p, i, t, kw):
        put(f"step{i}.latents_after", kw["latents"]); return kw
    with torch.no_grad():
        img = pipe(prompt=prompt, image=imgs or None, width=w, height=h, num_inference_steps=steps, guidance_scale=cfg,
                   generator=torch.Generator().manual_seed(seed), latents=latents, callback_on_step_end=cb).images[0]
    put("image_u8", torch.from_numpy(np.array(img)))
    put("sched.sigmas", pipe.scheduler.sigmas); put("sched.timesteps", pipe.scheduler.timesteps)
    for hk in hooks:
        hk.remove()
    pipe.prepare_latents, pipe.prepare_image_latents, pipe.encode_prompt = old["prep"], old["pimg"], old["encp"]
    vae.encode, vae.decode, tr.forward = old["enc"], old["dec"], old["fwd"]
    meta["image_sha256"] = hashlib.sha256(np.array(img).tobytes()).hexdigest(); meta["image_size"] = img.size
    meta["real_tokens"] = int(ei["attention_mask"].sum())
    meta["tensors"] = {k: [str(v.dtype).replace("torch.", ""), list(v.shape)] for k, v in sorted(T.items())}
    if out:
        os.makedirs(out, exist_ok=True)
        save_file(T, f"{out}/{name}.{dt}.safetensors"); os.chmod(f"{out}/{name}.{dt}.safetensors", 0o644)
        json.dump(meta, open(f"{out}/{name}.{dt}.json", "w"), indent=1, ensure_ascii=False)
    print(name, dt, img.size, "tokens", meta["real_tokens"], meta["image_sha256"][:16], "out std", round(float(T["vae.dec.output"].float().std()), 3),
          "vel", round(float(T["step0.model_out"].float().std()), 3), "emb", round(float(T["prompt_embeds"].float().std()), 3))
    return T, meta


rel = lambda a, b: float((a.float() - b.float()).norm() / b.float().norm())
if __name__ == "__main__":
    ap = argparse.ArgumentParser(); ap.add_argument("model"); ap.add_argument("out")
    ap.add_argument("--dtype", default="all"); ap.add_argument("--cases", default=",".join(CASES))
    a = ap.parse_args()
    got = {}
    for dt in (["f32", "bf16"] if a.dtype == "all" else [a.dtype]):
        pipe = Flux2Pipeline.from_pretrained(a.model, torch_dtype=torch.bfloat16 if dt == "bf16" else torch.float32)
        pipe.set_progress_bar_config(disable=True)
        for c in a.cases.split(","):
            got[c, dt] = run(pipe, c, a.out, dt)
        if dt == "f32":
            f32 = pipe
    if a.dtype != "all":
        raise SystemExit
    idx = {"cases": {}, "schedules": {}, "bf16_vs_f32_from_the_same_bf16_noise": {}}
    for (c, dt), (T, m) in got.items():
        f = f"{c}.{dt}.safetensors"
        idx["cases"].setdefault(c, {k: m[k] for k in ("prompt", "width", "height", "seed", "steps", "guidance", "real_tokens", "image_size")})
        idx["cases"][c][dt] = {"file": f, "sha256": hashlib.sha256(open(f"{a.out}/{f}", "rb").read()).hexdigest(), "image_sha256": m["image_sha256"]}
        if dt == "bf16":                                   # yardstick: f32 arithmetic from the noise that the bf16 run drew
            w, h = m["image_size"]
            z = torch.randn((1, 128, h // 16, w // 16), generator=torch.Generator().manual_seed(m["seed"]), dtype=torch.bfloat16).float()
            R, _ = run(f32, c, None, "f32 from bf16 noise", latents=z)
            keys = ["prompt_embeds", "dit.temb", "step0.model_out", f"step{m['steps'] - 1}.latents_after", "vae.dec.output"]
            idx["bf16_vs_f32_from_the_same_bf16_noise"][c] = {k: rel(T[k], R[k]) for k in keys} | {
                "image_mean_abs_u8": float((T["image_u8"].float() - R["image_u8"].float()).abs().mean())}
    for L, n in ((4096, 4), (4096, 28), (4096, 50), (1024, 50), (8040, 50)):
        mu = compute_empirical_mu(L, n)
        retrieve_timesteps(f32.scheduler, n, "cpu", sigmas=np.linspace(1.0, 1 / n, n), mu=mu)
        idx["schedules"][f"L{L}_n{n}"] = {"mu": mu, "sigmas": f32.scheduler.sigmas.tolist(), "timesteps": f32.scheduler.timesteps.tolist(),
                                          "t_seen_by_bf16_dit": [float((t.to(torch.bfloat16) / 1000).to(torch.bfloat16) * 1000) for t in f32.scheduler.timesteps]}
    json.dump(idx, open(f"{a.out}/index.json", "w"), indent=1, ensure_ascii=False)
