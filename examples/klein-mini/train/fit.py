# SPDX-License-Identifier: Apache-2.0
"""Training of the DiT: rectified flow on the sampler's own noise levels and on the states the sampler itself reaches.

The world is deterministic: a caption fixes the picture. Each sample is a set of rows (tokens) of a picture of full size: a coarse
lattice over the frame, which stands for all rows in attention, and rows near the object, which are only queries.
"""
import argparse, math, os, time
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F
import dit as M, shapes as S, text as T, vae as V
S.dit_world()
T0 = 40                                             # text rows in training: the prompt and padding rows that stand for all others


class Masks:
    """Coverage of every (shape, size, position) at one frame size, as tokens: [combo, L, 4, 64] bytes."""
    def __init__(s, W, H):
        s.W, s.H, s.w, s.h = W, H, W // 16, H // 16; s.L = s.w * s.h; out = []; s.sig = M.sigmas(s.L)
        sc = [S.Scene([[sh, 9, z, p]], (0, 8, 8), np.full(8, .5)) for sh in range(7) for z in range(3) for p in range(9)]
        lo, hi = S.RGB[8, 0], S.RGB[9, 0]
        for i in range(0, len(sc), 27):
            x = (S.render(sc[i:i + 27], W, H)[:, 0] + 1) / 2; c = ((x - lo) / (hi - lo)).clamp(0, 1).mul(255).round().byte()
            c = c.view(-1, s.h, 2, 8, s.w, 2, 8).permute(0, 1, 4, 2, 5, 3, 6).reshape(len(c), s.L, 4, 64); out.append(c)
        s.m = torch.cat(out); a = s.m.view(len(s.m), s.L, 256)
        mean = a.float().mean(-1) / 255 if s.L < 1100 else torch.stack([q.float().mean(-1) / 255 for q in a])
        part = ((mean > .002) & (mean < .998)).float().view(-1, 1, s.h, s.w)
        near = F.max_pool2d(part, 3, 1, 1).flatten(1) > 0
        s.edge = [np.nonzero(q)[0] for q in part.flatten(1).numpy()]; s.near = [np.nonzero(q)[0] for q in near.numpy()]; s.inside = [np.nonzero(q)[0] for q in (mean >= .998).numpy()]
        st = math.isqrt(s.L // 64); s.stride = st


class World:
    def __init__(s, work, n=12000, edits=0, seed=0):
        s.work, s.bs = work, torch.load(f"{work}/basis.pt"); B = s.bs["B"].view(32, 3, 64); s.sc = (s.bs["var"] + 1e-4).sqrt()
        s.A = B.permute(1, 2, 0).contiguous(); s.Sum = B.sum(2).T.contiguous(); s.b = s.bs["b"]; s.rgb = torch.from_numpy(S.RGB) * 2 - 1
        s.masks = {}
        r = np.random.default_rng(seed); s.scenes, s.text, s.parse = [], [], []
        while len(s.text) < n:
            c = S.sample_scene(r, 0)
            if c.bg[0]: continue
            c.u[:] = .5; t, f = S.caption(r, c); s.scenes.append(c); s.text.append(t); s.parse.append(f)
        s.source = [None] * n
        while len(s.text) < n + edits:
            c = S.sample_scene(r, 0)
            if c.bg[0]: continue
            c.u[:] = .5; t, x, f = S.edit(r, c)
            if f["task"] in (1, 2, 6): s.scenes.append(t); s.source.append(c); s.text.append(x); s.parse.append(f)
        s.t2i, s.edits = np.arange(n), np.arange(n, n + edits); n += edits
        te = T.TextEncoder(); te.load_state_dict(torch.load(f"{work}/te.pt")["model"]); te.eval(); tok = T.Tok(f"{work}/tokenizer/tokenizer.json")
        s.feat = torch.zeros(n, T0, 192, dtype=torch.float16); s.n = torch.zeros(n, dtype=torch.long); s.tpos = torch.zeros(n, T0); s.bias = torch.zeros(n, T0)
        with torch.inference_mode():
            for i in range(0, n, 96):
                j = slice(i, i + 96); ids, k, pos = tok.batch(s.text[j], 0, r); B_ = len(k)
                ids = torch.cat([ids, torch.full((B_, T0 - ids.shape[1]), tok.pad)], 1); pos = torch.zeros(B_, T0, dtype=torch.long)
                for a in range(B_): pos[a] = torch.cat([torch.arange(k[a]), torch.from_numpy(np.sort(r.choice(np.arange(int(k[a]), 512), T0 - int(k[a]), replace=False)))])
                s.feat[j] = te(ids, k, pos).half(); s.n[j] = k; s.tpos[j] = pos.float()
                s.bias[j] = torch.where(torch.arange(T0)[None] >= k[:, None], torch.log((512. - k) / (T0 - k))[:, None], torch.zeros(1))

    def frame(s, W, H):
        f = f"{s.work}/masks{W}x{H}.pt"
        if (W, H) not in s.masks:
            if not os.path.exists(f): torch.save(Masks(W, H), f)
            s.masks[W, H] = torch.load(f, weights_only=False)
        return s.masks[W, H]

    def combo(s, sc): o = sc.objs[0]; return (o[0] * 3 + o[2]) * 9 + o[3]

    def latents(s, sc, fr, rows):
        """exact latents of some rows of a scene: [R,128]"""
        o = sc.objs[0]; bg = s.rgb[sc.bg[1]]; d = s.rgb[o[1]] - bg
        K = torch.einsum("c,cpk->pk", d, s.A); z = fr.m[s.combo(sc), rows].float().div(255) @ K + (bg @ s.Sum + s.b)       # [R,4,32]
        return (z.transpose(1, 2).reshape(len(rows), 128) - s.bs["mean"]) / s.sc

    def rows(s, i, fr, r, R):
        """64 lattice rows and R-64 rows near the object -> rows [R], key bias [R]"""
        st = fr.stride; oy, ox = int(r.integers(st)), int(r.integers(st)); yy = np.arange(oy, fr.h, st); xx = np.arange(ox, fr.w, st)
        lat = (yy[:, None] * fr.w + xx[None]).ravel()
        if len(lat) > 64: lat = r.permutation(lat)[:64]
        c = s.combo(s.scenes[i]); k = R - len(lat); a = k * 3 // 8; b = k * 3 // 8
        ch = lambda l, n: l[r.integers(len(l), size=n)] if len(l) else r.integers(fr.L, size=n)
        q = np.concatenate([lat, ch(fr.edge[c], a), ch(fr.inside[c], b), ch(fr.near[c], k - a - b)])
        return torch.from_numpy(q), torch.cat([torch.full((len(lat),), math.log(fr.L / len(lat))), torch.full((k,), -1e4)])


class Slots:
    """B samples on their way through the sampler; a share of them starts from the exact mixture at a random step instead."""
    def __init__(s, world, frames, B, R, seed=0, off=.25, idx=None):
        s.w, s.B, s.R, s.r, s.off, s.idx = world, B, R, np.random.default_rng(seed), int(B * off), world.t2i if idx is None else idx
        s.ref = world.source[s.idx[0]] is not None; n = R * (1 + s.ref)
        s.frames = [(world.frame(*f), p) for f, p in frames]; s.p = np.array([p for _, p in frames]); s.p = s.p / s.p.sum()
        s.x = torch.zeros(B, R, 128); s.x0 = torch.zeros(B, R, 128); s.c = torch.zeros(B, T0, 192); s.pos = torch.zeros(B, T0 + n, 4); s.bias = torch.zeros(B, 1, 1, T0 + n); s.rx = torch.zeros(B, n - R, 128)
        s.step = np.zeros(B, int); s.fr = [None] * B; s.sig = np.zeros((B, 5), np.float32)
        for b in range(B): s.draw(b, int(s.r.integers(4)))

    def draw(s, b, step=0):
        r, w = s.r, s.w; fr = s.frames[int(r.choice(len(s.p), p=s.p))][0]; i = int(r.choice(s.idx)); rows, kb = w.rows(i, fr, r, s.R)
        s.fr[b] = fr; s.sig[b] = fr.sig; s.step[b] = step; s.x0[b] = w.latents(w.scenes[i], fr, rows); sg = float(fr.sig[step]); s.x[b] = (1 - sg) * s.x0[b] + sg * torch.randn(s.R, 128)
        e = T0 + s.R; s.c[b] = w.feat[i].float(); s.pos[b, :T0, 3] = w.tpos[i]; s.pos[b, T0:e, 1] = rows // fr.w; s.pos[b, T0:e, 2] = rows % fr.w; s.bias[b, 0, 0, :T0] = w.bias[i]; s.bias[b, 0, 0, T0:e] = kb
        if s.ref:                                   # the same rows of the reference; near the object they are keys too, because each has its own query
            x = w.latents(w.source[i], fr, rows); s.rx[b] = x + float(r.random()) * .15 * torch.randn_like(x); s.pos[b, e:] = s.pos[b, T0:e]; s.pos[b, e:, 0] = 10; s.bias[b, 0, 0, e:] = kb.clamp_min(0)

    def sigma(s): return torch.from_numpy(s.sig[np.arange(s.B), s.step])

    def advance(s, v):
        d = torch.from_numpy(s.sig[np.arange(s.B), s.step + 1] - s.sig[np.arange(s.B), s.step]); s.x += d[:, None, None] * v; s.step += 1
        for b in range(s.B):
            if b < s.off: s.draw(b, int(s.r.integers(4)))
            elif s.step[b] > 3: s.draw(b)


def readout(world):
    """least-squares read-out of the caption's meaning from the padding rows of tap 9: [21,64]

    object and background colour (3 latent numbers each, 0 if unsaid), shape (7), small, large, column and row of the place, task (4)
    """
    X = world.feat[:, -1, :64].float(); col = (world.rgb @ world.Sum + world.b - world.bs["mean"].view(32, 4).mean(1)) / world.sc.view(32, 4).mean(1); col = torch.cat([torch.zeros(1, 3), col[:, :3]]); Y = []
    for p in world.parse:
        hot = lambda k, v: 1. if p[k] == v else 0.
        Y.append(torch.cat([col[p["c1"]], col[p["b1"]], torch.tensor([2 * hot("s1", i + 1) for i in range(7)] + [2 * hot("z1", 1), 2 * hot("z1", 3)] + ([1.5 * ((p["p1"] - 1) % 3 - 1), 1.5 * ((p["p1"] - 1) // 3 - 1)] if p["p1"] else [0., 0.])
                            + [2 * hot("task", t) for t in (0, 1, 2, 6)])]))
    Y = torch.stack(Y); W = torch.linalg.solve(X.T @ X + 1e-2 * len(X) * torch.eye(64), X.T @ Y).T; E = X @ W.T - Y
    print("read-out: unexplained share", [round(float(q), 3) for q in E.var(0) / Y.var(0)]); return W


@torch.no_grad()
def sample(m, world, idx, W, H, seed, T_=T0):
    """the four-step sampler on whole pictures -> float images [B,3,H,W] in 0..1 by the exact linear inverse"""
    h, w = H // 16, W // 16; L = h * w; sg = M.sigmas(L); g = torch.Generator().manual_seed(seed); x = torch.randn(len(idx), L, 128, generator=g)
    ref = world.source[idx[0]] is not None; a = torch.arange(L * (1 + ref)); rx = torch.zeros(len(idx), 0, 128)
    if ref: fr = world.frame(W, H); rx = torch.stack([world.latents(world.source[i], fr, torch.arange(L)) for i in idx])
    pos = torch.zeros(len(idx), T0 + len(a), 4); pos[:, :T0, 3] = world.tpos[idx]; pos[:, T0:, 1] = a % L // w; pos[:, T0:, 2] = a % w; pos[:, T0:, 0] = 10 * (a >= L)
    bias = torch.zeros(len(idx), 1, 1, T0 + len(a)); bias[:, 0, 0, :T0] = world.bias[idx]; c = world.feat[idx].float()
    for i in range(4): x = x + float(sg[i + 1] - sg[i]) * m(torch.cat([x, rx], 1), c, torch.full((len(idx),), float(sg[i])), pos, bias)[:, :L].float()
    return pixels(world, x, h, w)


def pixels(world, x, h, w):
    z = (x * world.sc + world.bs["mean"]).view(-1, h, w, 32, 2, 2); B = world.bs["B"]; P = torch.linalg.pinv(B)
    mean = -2 * (torch.linalg.pinv(B) @ world.bs["b"]); y = z.permute(0, 1, 4, 2, 5, 3).reshape(len(x), 2 * h * 2 * w, 32)
    y = (y @ P.T + mean).transpose(1, 2); return (F.fold(y, (16 * h, 16 * w), 8, stride=8).clamp(-1, 1) + 1) / 2


def score(m, world, idx, W, H, seed=5, B=8):
    import evaluate as E
    rows, ious, keep = [], [], []
    for i in range(0, len(idx), B):
        for j, im in zip(idx[i:i + B], sample(m, world, idx[i:i + B], W, H, seed + i)):
            a = (im.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8); keep.append(a); q = E.measure(a[::2, ::2], None); s = world.scenes[j]; o = s.objs[0]
            rows.append((q["color"] == o[1], q["shape"] == o[0], q["bg"] == s.bg[1], q["pos"] == o[3])); ious.append(q.get("iou", 0))
    return np.mean(rows, 0), float(np.mean(ious)), keep


def main():
    ap = argparse.ArgumentParser(); ap.add_argument("work"); ap.add_argument("--seconds", type=float, default=180); ap.add_argument("--batch", type=int, default=32); ap.add_argument("--rows", type=int, default=128)
    ap.add_argument("--lr", type=float, default=2e-3); ap.add_argument("--end", type=float, default=.1); ap.add_argument("--warm", type=int, default=40); ap.add_argument("--init"); ap.add_argument("--out", default="dit.pt")
    ap.add_argument("--edits", type=float, default=0); ap.add_argument("--copy", type=int, default=0); ap.add_argument("--frames", nargs="+", default=["512x512:1"]); ap.add_argument("--n", type=int, default=12000); ap.add_argument("--off", type=float, default=.25); ap.add_argument("--every", type=float, default=60); ap.add_argument("--wexp", type=float, default=1.2); ap.add_argument("--compile", type=int, default=1)
    a = ap.parse_args(); torch.set_num_threads(2); torch.manual_seed(0); t0 = time.time()
    cache = f"{a.work}/world{a.n}.pt"
    if not os.path.exists(cache): torch.save(World(a.work, a.n, a.n // 2), cache)
    w = torch.load(cache, weights_only=False); w.work = a.work; fr = [((int(f.split(":")[0].split("x")[0]), int(f.split(":")[0].split("x")[1])), float(f.split(":")[1])) for f in a.frames]; sets = [Slots(w, fr, a.batch, a.rows, off=a.off)] + ([Slots(w, fr, a.batch * 9 // 16, a.rows, 1, a.off, w.edits)] if a.edits else []); r = np.random.default_rng(0)
    print(f"data {time.time() - t0:.0f}s"); m = M.DiT()
    if a.init: m.load_state_dict(torch.load(a.init)["ema"])
    else: M.start(m, w.feat[:256].float(), w.n[:256], readout(w))
    if a.copy: M.copy_heads(m, w.feat[:256].float())
    print("parameters", sum(p.numel() for p in m.parameters()))
    ema = M.DiT(); ema.load_state_dict(m.state_dict()); ema.requires_grad_(False); EP = list(ema.parameters())
    P = list(m.parameters())
    mod = [m.mi, m.mt, m.ms, m.mo]; k = lambda p: .1 if any(p is q for q in mod + [m.t1, m.t2]) else .03 if p is m.c else .3 if p is m.x or p is m.proj else 1
    opt = torch.optim.AdamW([{"params": [p], "weight_decay": 0, "k": k(p)} for p in P], lr=a.lr, betas=(.9, .98), fused=True)
    sd = w.bs["B"].norm(dim=1) ** (-1 / .8); wt = (sd ** a.wexp).repeat_interleave(4); wt = wt / wt.mean()
    f = torch.compile(m) if a.compile else m; t0, step, last, log, elog = None, 0, 0, [], []
    held = torch.arange(16); eh = torch.from_numpy(w.edits[:16] if a.edits else w.edits[:0])
    while True:
        el = 0 if t0 is None else time.time() - t0; fr_ = el / a.seconds
        if fr_ >= 1: break
        k = min(1, (step + 1) / a.warm) * (a.end + (1 - a.end) * (.5 + .5 * math.cos(math.pi * fr_)))
        for g in opt.param_groups: g["lr"] = g["k"] * a.lr * k
        sl = sets[int(r.random() < a.edits)]; sg = sl.sigma(); c = sl.c * (1 + .01 * torch.randn_like(sl.c))
        v = f(torch.cat([sl.x, sl.rx], 1), c, sg, sl.pos, sl.bias)[:, :sl.R].float()
        s3 = sg[:, None, None]; e = ((v - (sl.x - sl.x0) / s3).pow(2) * wt).mean((1, 2)); loss = e.mean()
        opt.zero_grad(); loss.backward(); gn = nn.utils.clip_grad_norm_(P, 1.0); opt.step()
        if sl is sets[0]: log.append([float(e.detach()[sl.step == j].mean()) * float(sg[sl.step == j].mean()) ** 2 if (sl.step == j).any() else np.nan for j in range(4)])
        else: elog.append([float(e.detach()[sl.step == j].mean()) * float(sg[sl.step == j].mean()) ** 2 if (sl.step == j).any() else np.nan for j in range(4)])
        sl.advance(v.detach()); step += 1
        with torch.no_grad(): torch._foreach_lerp_(EP, P, 1 - min(.995, (step + 1) / (step + 20)))
        if t0 is None: t0 = time.time()
        if step % 20 == 0 and (step <= 60 or step % 100 == 0): print(f"{step} {time.time() - t0:.0f}s gn {gn:.2f} x0 error by step " + " ".join(f"{q:.4f}" for q in np.nanmean(log, 0)) + (" edits " + " ".join(f"{q:.4f}" for q in np.nanmean(elog, 0)) if elog else ""), flush=True); log, elog = [], []
        if time.time() - t0 - last > a.every:
            last = time.time() - t0; torch.save({"ema": ema.state_dict()}, f"{a.work}/{a.out}"); t1 = time.time(); s, iou, _ = score(ema, w, held, 512, 512)
            if len(eh): q, qi, _ = score(ema, w, eh, 512, 512); print(f"   == edits: colour {q[0]:.2f} shape {q[1]:.2f} background {q[2]:.2f} iou {qi:.3f}")
            print(f"   == {step} {last:.0f}s colour {s[0]:.2f} shape {s[1]:.2f} background {s[2]:.2f} position {s[3]:.2f} iou {iou:.3f} ({time.time() - t1:.0f}s)", flush=True)
    torch.save({"ema": ema.state_dict()}, f"{a.work}/{a.out}"); s, iou, k = score(ema, w, torch.arange(32), 512, 512); print("done", step, s, iou)
    from PIL import Image
    Image.fromarray(np.concatenate([np.concatenate(k[i:i + 8], 1) for i in range(0, 32, 8)], 0)).resize((1024, 512)).save(f"{a.work}/{a.out}.png")


if __name__ == "__main__":
    import fit; fit.main()                          # so that cached objects belong to the module, not to __main__
