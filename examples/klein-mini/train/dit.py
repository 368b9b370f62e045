# SPDX-License-Identifier: Apache-2.0
"""DiT of klein-mini: the network, its start and its export. Training is in fit.py."""
import math
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F
N, NH, D, MLP, ND, NS, TX = 192, 6, 32, 384, 2, 4, 192
AX, THETA = 8, 2000


def w(o, i, s=1.0): return nn.Parameter(torch.randn(o, i) * s / math.sqrt(i))


def heads(t): return t.view(t.shape[0], t.shape[1], NH, D)


def rope(t, cos, sin):                              # half-split order inside; export() restores adjacent pairs
    a, b = t[..., :D // 2], t[..., D // 2:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def rms(t, g):
    t = t.float(); return t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) * g


def ln(x): return F.layer_norm(x.float(), (N,), eps=1e-6)


def attend(q, k, v, cos, sin, bias):
    q, k = rope(q, cos, sin).transpose(1, 2), rope(k, cos, sin).transpose(1, 2)
    o = F.scaled_dot_product_attention(q, k, v.float().transpose(1, 2), attn_mask=bias)
    return o.transpose(1, 2).flatten(2)


def swiglu(u): return F.silu(u[..., :MLP]) * u[..., MLP:]


class Dual(nn.Module):
    def __init__(s):
        super().__init__()
        for n in "xc":
            setattr(s, n + "qkv", w(3 * N, N)); setattr(s, n + "o", w(N, N, .4)); setattr(s, n + "in", w(2 * MLP, N)); setattr(s, n + "out", w(N, MLP, .4))
            setattr(s, n + "qn", nn.Parameter(torch.ones(D) * 2)); setattr(s, n + "kn", nn.Parameter(torch.ones(D) * 2))

    def forward(s, x, c, mx, mc, cos, sin, bias):
        a, b = mx.chunk(6, -1), mc.chunk(6, -1); T = c.shape[1]
        q1, k1, v1 = F.linear(ln(x) * (1 + a[1]) + a[0], s.xqkv).chunk(3, -1)
        q2, k2, v2 = F.linear(ln(c) * (1 + b[1]) + b[0], s.cqkv).chunk(3, -1)
        q = torch.cat([rms(heads(q2), s.cqn), rms(heads(q1), s.xqn)], 1); k = torch.cat([rms(heads(k2), s.ckn), rms(heads(k1), s.xkn)], 1)
        o = attend(q, k, torch.cat([heads(v2), heads(v1)], 1), cos, sin, bias)
        x = x + a[2] * F.linear(o[:, T:], s.xo); c = c + b[2] * F.linear(o[:, :T], s.co)
        x = x + a[5] * F.linear(swiglu(F.linear(ln(x) * (1 + a[4]) + a[3], s.xin)), s.xout)
        c = c + b[5] * F.linear(swiglu(F.linear(ln(c) * (1 + b[4]) + b[3], s.cin)), s.cout)
        return x, c


class Single(nn.Module):
    def __init__(s):
        super().__init__()
        s.inp, s.out = w(3 * N + 2 * MLP, N), w(N, N + MLP, .4)
        s.qn, s.kn = nn.Parameter(torch.ones(D) * 1.5), nn.Parameter(torch.ones(D) * 1.5)

    def forward(s, x, m, cos, sin, bias):
        sh, sc, g = m.chunk(3, -1)
        q, k, v, u = F.linear(ln(x) * (1 + sc) + sh, s.inp).split([N, N, N, 2 * MLP], -1)
        o = attend(rms(heads(q), s.qn), rms(heads(k), s.kn), heads(v), cos, sin, bias)
        return x + g * F.linear(torch.cat([o.to(u.dtype), swiglu(u)], -1), s.out)


def time_features(sigma):
    f = (sigma * 1000)[:, None] * torch.exp(-math.log(10000) * torch.arange(128) / 128); return torch.cat([f.cos(), f.sin()], -1)


class DiT(nn.Module):
    def __init__(s):
        super().__init__()
        s.x, s.c, s.t1, s.t2 = nn.Parameter(torch.eye(N, 128)), w(N, TX, .06), w(N, 256), w(N, N, 8.)
        s.mi, s.mt, s.ms, s.mo = (nn.Parameter(torch.zeros(k * N, N)) for k in (6, 6, 3, 2))
        s.proj = nn.Parameter(torch.eye(128, N) * 1.6)
        s.dual, s.single = nn.ModuleList(Dual() for _ in range(ND)), nn.ModuleList(Single() for _ in range(NS))

    def embed(s, sigma): return F.silu(F.linear(F.silu(F.linear(time_features(sigma), s.t1)), s.t2))[:, None]

    def forward(s, x, c, sigma, pos, bias):
        """x [B,L(+refs),128], c [B,T,192], sigma [B], pos [B or 1,T+L+refs,4], bias [B,1,1,S] -> velocity of all image rows"""
        e = s.embed(sigma)
        fr = THETA ** (-torch.arange(0, AX, 2) / AX)
        ang = (pos[..., None] * fr).flatten(2); cos, sin = ang.cos()[:, :, None], ang.sin()[:, :, None]
        x, c = F.linear(x, s.x).float(), F.linear(c, s.c).float(); T = c.shape[1]
        mi, mt, ms = F.linear(e, s.mi), F.linear(e, s.mt), F.linear(e, s.ms)
        for b in s.dual: x, c = b(x, c, mi, mt, cos, sin, bias)
        h = torch.cat([c, x], 1)
        for b in s.single: h = b(h, ms, cos, sin, bias)
        sc, sh = F.linear(e, s.mo).chunk(2, -1)
        return F.linear(ln(h[:, T:]) * (1 + sc) + sh, s.proj)

    def export(s):
        """state dict under the diffusers names"""
        perm = torch.arange(D).view(2, D // 2).T.flatten()           # adjacent pairs from half-split
        ph = lambda t: t.view(NH, D, N)[:, perm].reshape(N, N)
        d = {"x_embedder.weight": s.x, "context_embedder.weight": s.c, "time_guidance_embed.timestep_embedder.linear_1.weight": s.t1,
             "time_guidance_embed.timestep_embedder.linear_2.weight": s.t2, "double_stream_modulation_img.linear.weight": s.mi,
             "double_stream_modulation_txt.linear.weight": s.mt, "single_stream_modulation.linear.weight": s.ms,
             "norm_out.linear.weight": s.mo, "proj_out.weight": s.proj}
        for i, b in enumerate(s.dual):
            p = f"transformer_blocks.{i}."
            for n, names, o, ff in (("x", ("to_q", "to_k", "to_v"), "to_out.0", "ff"), ("c", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "ff_context")):
                q, k, v = getattr(b, n + "qkv").chunk(3, 0)
                d |= {p + f"attn.{names[0]}.weight": ph(q), p + f"attn.{names[1]}.weight": ph(k), p + f"attn.{names[2]}.weight": v,
                      p + f"attn.{o}.weight": getattr(b, n + "o"), p + f"{ff}.linear_in.weight": getattr(b, n + "in"), p + f"{ff}.linear_out.weight": getattr(b, n + "out")}
            d |= {p + "attn.norm_q.weight": b.xqn[perm], p + "attn.norm_k.weight": b.xkn[perm], p + "attn.norm_added_q.weight": b.cqn[perm], p + "attn.norm_added_k.weight": b.ckn[perm]}
        for i, b in enumerate(s.single):
            p = f"single_transformer_blocks.{i}.attn."; q, k, v, u = b.inp.split([N, N, N, 2 * MLP], 0)
            d |= {p + "to_qkv_mlp_proj.weight": torch.cat([ph(q), ph(k), v, u]), p + "to_out.weight": b.out, p + "norm_q.weight": b.qn[perm], p + "norm_k.weight": b.kn[perm]}
        return {k: v.detach().clone().contiguous() for k, v in d.items()}


# ---------------------------------------------------------------- a start from which it learns
KAPPA = 4.0
dim = lambda axis, f, im: axis * 4 + f + 16 * im      # half-split order: axes t, row, column, l; frequencies 1, .15, .022, .0033 per token
POS0, PARSE0 = 132, 148                               # spare residual dimensions: 128-131 constant, 132-147 position, 148-191 parse


@torch.no_grad()
def start(m, feats, n, heads_, seed=0):
    """Put the time modulation, the anchor rows, the position read-outs and the copy of the caption's parse in place.

    feats [B,T,192] text features (n real rows, then padding rows), heads_ [K,64]: read-out of the caption's meaning from tap 9.
    Image queries become constants. Rows 0 to 2 of every prompt ("<|im_start|>", "user", newline) never change, so they serve as
    anchors at position 0: rotary embedding makes the balance between two anchors a smooth function of the image row's place.
    """
    g = torch.Generator().manual_seed(seed); B, T = feats.shape[:2]
    sg = torch.linspace(.6, 1, 81); e = m.embed(sg)[:, 0].double()
    fit = torch.linalg.solve(e.T @ e + 1e-6 * len(e) * e.pow(2).mean() * torch.eye(N), e.T @ torch.ones(len(sg), dtype=torch.double)).float()
    print("constant modulation: error", (e.float() @ fit - 1).abs().max().item())
    u = torch.zeros(N); u[128:132] = torch.tensor([1., -1, 1, -1]) / 2
    for W, shifts, gates in ((m.mi, (0, 3), (2, 5)), (m.mt, (0, 3), (2, 5)), (m.ms, (0,), (2,))):
        for k in shifts: W[k * N:(k + 1) * N] = KAPPA * u[:, None] * fit
        for k in gates: W[k * N:(k + 1) * N] = fit.expand(N, N)
    # context embedder: parse read-out, anchor flags, whitened features
    f9 = feats[..., :64]; R = torch.arange(T).expand(B, T); kind = torch.where(R < 3, R, torch.where(R >= n[:, None] - 3, 3, 4)).flatten()
    A = f9.reshape(-1, 64).double(); wt = torch.zeros(len(A), dtype=torch.double)
    for k in range(5): wt[kind == k] = 1. / (kind == k).sum()
    Y = F.one_hot(kind, 5)[:, :4].double()
    fl = torch.linalg.solve(A.T @ (A * wt[:, None]) + 1e-3 * torch.eye(64), A.T @ (Y * wt[:, None])).float()
    print("flags", [(round((A.float() @ fl)[kind == k][:, j].mean().item(), 3), round((A.float() @ fl)[kind == k][:, j].std().item(), 3)) for j in range(4) for k in (j, 4)])
    ev, U = torch.linalg.eigh(A.T @ A / len(A)); P = (U / ev.clamp_min(4.).sqrt()).T.float()
    m.c.zero_(); m.c[:len(heads_), :64] = heads_; m.c[64:68, :64] = fl.T * 5; m.c[132:, :64] = P[-60:] * .5

    unit = lambda v: v / v.norm()

    def vec(*parts):
        v = torch.zeros(D)
        for a, x in parts: v[a] += x
        return v
    neutral = dim(3, 0, 0)                            # an axis that is 0 for all anchors and unused by these queries
    mask = dim(0, 3, 0)                               # slowest time axis: the same for text, image and references
    base = vec((mask, -1.))

    seen = []
    hk = [b.register_forward_pre_hook(lambda mod, a: seen.append((ln(a[1]) * (1 + a[3].chunk(6, -1)[1]) + a[3].chunk(6, -1)[0], ln(a[0]) * (1 + a[2].chunk(6, -1)[1]) + a[2].chunk(6, -1)[0]))) for b in m.dual]
    x = torch.randn(B, 16, 128, generator=g); pos = torch.zeros(1, T + 16, 4); bias = torch.zeros(B, 1, 1, T + 16)

    def install(i, plan):
        seen.clear(); m(x, feats, torch.full((B,), .9), pos, bias); b = m.dual[i]; C, X = seen[i]
        Cf = C.reshape(-1, N).double(); d = torch.linalg.solve(Cf.T @ (Cf * wt[:, None]) + 1e-4 * torch.eye(N), Cf.T @ (Y * wt[:, None])).float()
        got = Cf.float() @ d; print("block", i, "anchor fit", [(round(got[kind == j][:, j].mean().item(), 3), round(got[kind != j][:, j].abs().max().item(), 3)) for j in range(4)])
        uk = u / KAPPA; print("  u.shift text", (C @ uk).mean().item(), (C @ uk).std().item(), "image", (X @ uk).mean().item(), (X @ uk).std().item())
        Xw, Cw = b.xqkv.view(3, N, N), b.cqkv.view(3, N, N); big = 8.; ui = uk / (X @ uk).mean()      # q and k are normalised: large weights only make these heads change slowly
        for h, p in plan.items():
            r = slice(h * D, h * D + D); q = unit(p["q"]); k0 = p.get("base", base)
            Xw[0, r] = big * q[:, None] * ui; Cw[0, r] = big * q[:, None] * uk
            Xw[1, r] = big * p.get("image", k0)[:, None] * ui
            Cw[1, r] = big * (k0[:, None] * uk + sum((k - k0)[:, None] * d[:, j] for j, k in p["anchors"].items()))
            if p["kind"] == "pos":                    # values: one head dimension per anchor; image rows (if they take part) count as minus
                Cw[2, r] = sum(vec((o, 5.))[:, None] * d[:, j] for o, j in enumerate(p["vals"])); Xw[2, r] = 0
                if "imgval" in p: Xw[2, r] = vec((0, -5.))[:, None] * ui
                b.xo[:, r] = 0; b.co[:, r] *= .3
                for o in range(len(p["vals"])): b.xo[POS0 + p["out"] + o, h * D + o] = 1.
            elif p["kind"] == "parse":
                Cw[2, r] = p["read"] ; Xw[2, r] = 0; b.xo[:, r] = p["write"]; b.co[:, r] *= .3

    A0 = 22.6

    def topleft(f, phase, amp, out):                  # logits amp*cos(w h - phase) for row 0, the same with the column for row 1, 0 for row 2
        m_, s_ = .5, math.sqrt(.375); p = amp / (A0 * s_)
        q = vec((mask, m_), (dim(1, f, 0), s_), (dim(2, f, 0), s_)); nn_ = math.sqrt(1 - p * p)
        return dict(kind="pos", q=q, anchors={0: vec((dim(1, f, 0), p * math.cos(phase)), (dim(1, f, 1), p * math.sin(phase)), (neutral, nn_)),
                                              1: vec((dim(2, f, 0), p * math.cos(phase)), (dim(2, f, 1), p * math.sin(phase)), (neutral, nn_)), 2: vec((neutral, 1.))}, vals=[0, 1], out=out)

    def far_edge(axis, amp, c, out):                  # image keys are tilted towards the far edge; anchor row 0 has the fixed logit c
        m_, s_ = .5, math.sqrt(.75); p = amp / (A0 * s_)
        return dict(kind="pos", q=vec((mask, m_), (dim(axis, 2, 0), s_)), image=vec((dim(axis, 2, 1), -p), (neutral, math.sqrt(1 - p * p))),
                    anchors={0: vec((mask, c / (A0 * m_)), (neutral, math.sqrt(1 - (c / (A0 * m_)) ** 2)))}, vals=[0], imgval=1, out=out)

    uk0 = u / KAPPA

    def parse():
        k = len(heads_); read = torch.zeros(D, N); read[torch.arange(k), torch.arange(k)] = 1.
        write = torch.zeros(N, D); write[PARSE0 + torch.arange(k), torch.arange(k)] = 1.2
        read[k] = uk0; write[128:132, k] = 20 * u[128:132]             # a large constant keeps the gain of the layer norms steady
        return dict(kind="parse", q=vec((mask, 1.)), anchors={3: vec((mask, 1.))}, read=read, write=write)
    for W in [b.xin for b in m.dual] + [b.inp for b in m.single]: W[:, 132:] *= 2.5
    for W in [b.xout for b in m.dual] + [b.xo for b in m.dual] + [b.out for b in m.single]: W[:128] *= .1      # at first the output is the input
    w2 = THETA ** -.5
    install(0, {0: parse(), 2: topleft(2, 16 * w2 + math.pi / 2, 9, 0), 3: topleft(1, math.pi / 2, 4, 2), 4: topleft(1, 0, 4, 4), 5: topleft(0, 0, 3, 6)})
    install(1, {0: topleft(0, math.pi / 2, 3, 8), 1: far_edge(1, 12, 9.2, 10), 2: far_edge(2, 12, 9.2, 11), 3: topleft(2, 32 * w2 + math.pi / 2, 9, 12)})
    [h.remove() for h in hk]


@torch.no_grad()
def copy_heads(m, feats, which=(4, 5), seed=3):
    """Turn two heads of the second dual block into a copy of the reference's row at the same place (or of nothing, without a reference).

    Queries and keys of image rows are constants, so their product depends only on the offset in time, row and column; it is largest at
    time offset 10. Text row 0 takes the attention where there is no such row.
    """
    g = torch.Generator().manual_seed(seed); b = m.dual[1]; B, T = feats.shape[:2]; L = 48; seen = []
    hk = b.register_forward_pre_hook(lambda mod, a: seen.append((ln(a[1]) * (1 + a[3].chunk(6, -1)[1]) + a[3].chunk(6, -1)[0], ln(a[0]) * (1 + a[2].chunk(6, -1)[1]) + a[2].chunk(6, -1)[0])))
    pos = torch.zeros(1, T + L, 4); pos[:, :T, 3] = torch.arange(T); pos[:, T:, 1] = torch.randint(0, 32, (L,), generator=g).float(); pos[:, T:, 2] = torch.randint(0, 32, (L,), generator=g).float()
    for s in (1., .88, .72): m(torch.randn(B, L, 128, generator=g), feats, torch.full((B,), s), pos, torch.zeros(B, 1, 1, T + L))
    hk.remove(); C = torch.cat([x[0] for x in seen]); X = torch.cat([x[1] for x in seen]).reshape(-1, N).double()
    uk = torch.linalg.solve(X.T @ X + 1e-3 * len(X) * torch.eye(N), X.sum(0)).float(); got = X.float() @ uk; print("copy heads: constant", got.mean().item(), got.std().item())
    first = (torch.arange(T) == 0).expand(len(C), T).flatten(); A = C.reshape(-1, N).double(); wt = torch.where(first, 1. / first.sum(), 1. / (~first).sum()).double()
    d = torch.linalg.solve(A.T @ (A * wt[:, None]) + 1e-4 * torch.eye(N), A.T @ (wt * first)).float(); ct = torch.linalg.solve(A.T @ A + 1e-3 * len(A) * torch.eye(N), A.sum(0)).float()
    print("copy heads: row 0", (A.float() @ d)[first].mean().item(), (A.float() @ d)[~first].std().item(), "constant", (A.float() @ ct).std().item())
    cols = [dim(1, 0, 0), dim(1, 1, 0), dim(2, 0, 0), dim(2, 1, 0), dim(0, 0, 0)]; e = torch.tensor([.17, .22, .17, .22, .22]) * .94
    q, k, kt, kb = torch.zeros(D), torch.zeros(D), torch.zeros(D), torch.zeros(D); q[cols] = e.sqrt(); k[cols] = e.sqrt(); rest = dim(0, 2, 0); q[rest] = math.sqrt(.06); kt[rest] = 1; kb[rest] = -1
    k[dim(0, 0, 0)], k[dim(0, 0, 1)] = math.sqrt(e[4]) * math.cos(-10.), math.sqrt(e[4]) * math.sin(-10.)      # key at time 10 turns to the query's angle
    for c in cols + [dim(1, 0, 1), dim(1, 1, 1), dim(2, 0, 1), dim(2, 1, 1), dim(0, 0, 1)]: b.xkn[c] = 5.
    b.ckn[rest] = 16.
    Xw, Cw = b.xqkv.view(3, N, N), b.cqkv.view(3, N, N)
    for n, h in enumerate(which):
        r = slice(h * D, h * D + D); Xw[0, r] = 8 * q[:, None] * uk; Xw[1, r] = 8 * k[:, None] * uk; Cw[1, r] = 8 * (kb[:, None] * ct + (kt - kb)[:, None] * d)
        Xw[2, r] = 0; Xw[2, r, n * D:n * D + D] = torch.eye(D) * 3; Cw[2, r] *= .1; b.co[:, r] *= .3
        b.xo[:, r] = torch.randn(N, D, generator=g) / math.sqrt(N) * (torch.arange(N) >= 128)[:, None] * .6


def mu_of(L, n=4):
    hi, lo = .00016927 * L + .45666666, 8.73809524e-5 * L + 1.89833333
    if L > 4300: return hi
    a = (hi - lo) / 190; return a * n + hi - 200 * a


def sigmas(L, n=4):
    s = np.linspace(1, 1 / n, n); e = math.exp(mu_of(L, n)); return np.append(e / (e + 1 / s - 1), 0).astype(np.float32)
