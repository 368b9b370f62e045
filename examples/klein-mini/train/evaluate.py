# SPDX-License-Identifier: Apache-2.0
"""Numbers for klein-mini, made with the unmodified Flux2KleinPipeline.

usage: evaluate.py CHECKPOINT OUT_DIR [--n 64] [--only 512x512,edits] [--dtype bf16]
Colours are judged by the nearest palette colour, shapes by the best overlap with turned templates, positions by the centroid.
"""
import argparse, json, math, os, time
import numpy as np, torch
from PIL import Image
from diffusers import Flux2KleinPipeline
import shapes as S
S.dit_world()


def nearest(a):                                     # [...,3] in 0..1 -> palette index
    return ((a[..., None, :] - S.RGB) ** 2).sum(-1).argmin(-1)


def templates():
    out = []
    for sh in range(7):
        for u in (0., .25, .5, .75, 1.):
            s = S.Scene([[sh, 8, 2, 4]], (0, 9, 9), np.array([.5, .5, .5, u] * 2)); x = S.render([s], 96, 96)[0]
            out.append((sh, norm_mask((x[0] < 0).numpy())))
    return out


def norm_mask(m, n=48):
    y, x = np.nonzero(m)
    if len(x) < 20: return np.zeros((n, n), bool)
    cy, cx, k = y.mean(), x.mean(), math.sqrt(max(x.max() - x.min(), y.max() - y.min()) ** 2 + 1) / (n * .9)
    g = np.arange(n) - n / 2 + .5; yy, xx = np.round(cy + g * k).astype(int), np.round(cx + g * k).astype(int)
    ok = ((yy >= 0) & (yy < m.shape[0]))[:, None] & ((xx >= 0) & (xx < m.shape[1]))[None]
    return m[yy.clip(0, m.shape[0] - 1)][:, xx.clip(0, m.shape[1] - 1)] & ok


TPL = None


def measure(img, sc):
    """-> dict of what came out, for a scene with one object on a plain background"""
    global TPL; TPL = TPL or templates()
    a = np.asarray(img, np.float32) / 255; H, W = a.shape[:2]; k = max(2, min(H, W) // 40)
    edge = np.concatenate([a[:k].reshape(-1, 3), a[-k:].reshape(-1, 3), a[:, :k].reshape(-1, 3), a[:, -k:].reshape(-1, 3)])
    bg = np.median(edge, 0); q = max(1, min(H, W) // 128); a = a[:H // q * q, :W // q * q].reshape(H // q, q, W // q, q, 3).mean((1, 3)); H, W = a.shape[:2]
    d = np.abs(a - bg).max(-1); m = d > .18
    if m.any(): m &= d > .5 * np.quantile(d[m], .75)     # covered by the object at least by half
    r = {"bg": int(nearest(bg)), "area": float(m.mean()), "flat": float(np.abs(a[~m] - bg).mean()) if (~m).any() else 1.0}
    if m.sum() < 30: return r | {"color": -1, "shape": -1, "pos": -1}
    r["color"] = int(np.bincount(nearest(a[m]), minlength=11).argmax())
    y, x = np.nonzero(m); cx, cy = x.mean() / W, y.mean() / H
    r["pos"] = min(range(9), key=lambda p: (cx - (.25, .5, .75)[p % 3]) ** 2 + (cy - (.25, .5, .75)[p // 3]) ** 2)
    n = norm_mask(m); iou = [((n & t).sum() / max(1, (n | t).sum()), s) for s, t in TPL]; r["iou"], r["shape"] = float(max(iou)[0]), max(iou)[1]
    return r


def main():
    ap = argparse.ArgumentParser(); ap.add_argument("model"); ap.add_argument("out"); ap.add_argument("--n", type=int, default=64)
    ap.add_argument("--only", default=""); ap.add_argument("--dtype", default="bf16"); ap.add_argument("--threads", type=int, default=2); a = ap.parse_args()
    torch.set_num_threads(a.threads); os.makedirs(a.out, exist_ok=True)
    pipe = Flux2KleinPipeline.from_pretrained(a.model, torch_dtype=torch.bfloat16 if a.dtype == "bf16" else torch.float32); pipe.set_progress_bar_config(disable=True)

    def gen(prompt, W, H, seed, image=None):
        return pipe(prompt=prompt, image=image, width=W, height=H, num_inference_steps=4, guidance_scale=1.0, generator=torch.Generator().manual_seed(seed)).images[0]

    pil = lambda sc, W, H: Image.fromarray(((S.render([sc], W, H)[0].clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())
    res, r = {}, np.random.default_rng(777)
    runs = [("512x512", 512, 512, a.n), ("768x512", 768, 512, a.n // 4), ("512x768", 512, 768, a.n // 4), ("1024x1024", 1024, 1024, a.n // 8)]
    def one():
        while True:
            s = S.sample_scene(r, 0)
            if s.bg[0] == 0: s.u[:] = .5; return s      # the world that the DiT knows: plain backgrounds, no free numbers
    for name, W, H, n in runs:
        if a.only and name not in a.only.split(","): continue
        rows, t0 = [], time.time()
        for i in range(n):
            s = one(); p, _ = S.caption(r, s); m = measure(gen(p, W, H, 1000 + i), s); o = s.objs[0]
            rows.append((m["color"] == o[1], m["bg"] == s.bg[1], m["shape"] == o[0], m["pos"] == o[3]))
            if not all(rows[-1]): print("  ", name, p, "| wanted", S.COLORS[o[1]], S.COLORS[s.bg[1]], S.SHAPES[o[0]], S.POS[o[3]], "| got", S.COLORS[m["color"]], S.COLORS[m["bg"]], S.SHAPES[m["shape"]], S.POS[m["pos"]], flush=True)
        if rows:
            q = np.array(rows); res[name] = {"prompts": n, "colour": q[:, 0].mean(), "background": q[:, 1].mean(), "both colours": (q[:, 0] & q[:, 1]).mean(), "shape": q[:, 2].mean(), "position": q[:, 3].mean(), "seconds per image": round((time.time() - t0) / n, 2)}
            print(name, {k: round(float(v), 3) for k, v in res[name].items()}, flush=True)
    if not a.only or "edits" in a.only:
        by, t0, i = {}, time.time(), 0
        while i < a.n // 2:
            s = one(); t, p, f = S.edit(r, s)
            if f["task"] not in (1, 2, 6): continue
            m = measure(gen(p, 512, 512, 2000 + i, [pil(s, 512, 512)]), t); o = t.objs[0]; i += 1
            row = (m["color"] == o[1], m["bg"] == t.bg[1], m["shape"] == o[0], m["pos"] == o[3]); by.setdefault(S.TASKS[f["task"]], []).append(row)
            if not all(row): print("   edit", p, "| wanted", S.COLORS[o[1]], S.COLORS[t.bg[1]], S.SHAPES[o[0]], S.POS[o[3]], "| got", S.COLORS[m["color"]], S.COLORS[m["bg"]], S.SHAPES[m["shape"]], S.POS[m["pos"]], flush=True)
        by["all"] = [x for v in list(by.values()) for x in v]
        for k, rows in by.items():
            q = np.array(rows); res["edit: " + k] = {"prompts": len(q), "colour": q[:, 0].mean(), "background": q[:, 1].mean(), "both colours": (q[:, 0] & q[:, 1]).mean(), "shape": q[:, 2].mean(), "position": q[:, 3].mean()}
            print("edit:", k, {k2: round(float(v), 3) for k2, v in res["edit: " + k].items()}, flush=True)
    json.dump(res, open(f"{a.out}/evaluation.json", "w"), indent=1, default=float)


if __name__ == "__main__": main()
