# SPDX-License-Identifier: Apache-2.0
"""Text encoder of klein-mini: 28 thin Qwen3 layers, trained to parse captions; its taps 9, 18, 27 condition the DiT."""
import argparse, math, time
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F
from tokenizers import Tokenizer
import shapes
H, NH, NKV, D, M, NL, V = 64, 4, 2, 32, 64, 28, 736
TAPS = (9, 18, 27)
TRAINED = 9             # the layers up to the first tap are trained; the later ones stay random with small output


class Layer(nn.Module):
    def __init__(s, out=.3):
        super().__init__()
        mk = lambda o, i: nn.Parameter(torch.randn(o, i) / math.sqrt(i))
        s.q, s.k, s.v, s.o = mk(NH * D, H), mk(NKV * D, H), mk(NKV * D, H), mk(H, NH * D)
        s.gate, s.up, s.down = mk(M, H), mk(M, H), mk(H, M)
        s.qn, s.kn, s.n1, s.n2 = (nn.Parameter(torch.ones(k)) for k in (D, D, H, H))
        with torch.no_grad(): s.o *= out; s.down *= out

    def forward(s, x, cos, sin, mask):
        B, T, _ = x.shape
        h = F.rms_norm(x, (H,), s.n1, 1e-6)
        q = F.rms_norm((h @ s.q.T).view(B, T, NH, D), (D,), s.qn, 1e-6).transpose(1, 2)
        k = F.rms_norm((h @ s.k.T).view(B, T, NKV, D), (D,), s.kn, 1e-6).transpose(1, 2)
        v = (h @ s.v.T).view(B, T, NKV, D).transpose(1, 2)
        rot = lambda t: t * cos + torch.cat([-t[..., D // 2:], t[..., :D // 2]], -1) * sin
        q, k = rot(q), rot(k)
        k, v = k.repeat_interleave(NH // NKV, 1), v.repeat_interleave(NH // NKV, 1)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + o.transpose(1, 2).reshape(B, T, NH * D) @ s.o.T
        h = F.rms_norm(x, (H,), s.n2, 1e-6)
        return x + (F.silu(h @ s.gate.T) * (h @ s.up.T)) @ s.down.T


class TextEncoder(nn.Module):
    def __init__(s):
        super().__init__()
        s.emb = nn.Parameter(torch.randn(V, H)); s.layers = nn.ModuleList(Layer(.3 if i < TRAINED else .15) for i in range(NL)); s.norm = nn.Parameter(torch.ones(H))

    def forward(s, ids, n, pos, depth=27):
        """ids [B,T], n [B] real lengths, pos [B,T] -> [B,T,3*H]; rows past n see real rows only."""
        T = ids.shape[1]
        inv = 1e6 ** (-torch.arange(0, D, 2).float() / D)
        a = pos[:, None, :, None].float() * inv; cos, sin = torch.cat([a.cos()] * 2, -1), torch.cat([a.sin()] * 2, -1)
        i = torch.arange(T)
        ok = (i[None, :, None] >= i[None, None, :]) & (i[None, None, :] < n[:, None, None])
        mask = torch.zeros(ok.shape).masked_fill(~ok, -1e9)[:, None]
        x = s.emb[ids]; out = []
        for k, l in enumerate(s.layers[:depth]):
            x = l(x, cos, sin, mask)
            if k + 1 in TAPS: out.append(x)
        return torch.cat(out, -1)

    def hf_state(s):
        d = {"model.embed_tokens.weight": s.emb, "model.norm.weight": s.norm}
        for i, l in enumerate(s.layers):
            p = f"model.layers.{i}."
            d |= {p + "self_attn.q_proj.weight": l.q, p + "self_attn.k_proj.weight": l.k, p + "self_attn.v_proj.weight": l.v, p + "self_attn.o_proj.weight": l.o,
                  p + "self_attn.q_norm.weight": l.qn, p + "self_attn.k_norm.weight": l.kn, p + "input_layernorm.weight": l.n1,
                  p + "post_attention_layernorm.weight": l.n2, p + "mlp.gate_proj.weight": l.gate, p + "mlp.up_proj.weight": l.up, p + "mlp.down_proj.weight": l.down}
        return {k: v.detach() for k, v in d.items()}


def chat(t): return f"<|im_start|>user\n{t}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Tok:
    def __init__(s, path): s.t = Tokenizer.from_file(path); s.pad = s.t.token_to_id("<|endoftext|>")

    def batch(s, texts, extra, rng):
        """-> ids, lengths, positions; `extra` pad rows after the longest, at random positions up to 511."""
        L = [e.ids for e in s.t.encode_batch([chat(t) for t in texts])]
        n = np.array([len(l) for l in L]); T = n.max() + extra
        ids = np.full((len(L), T), s.pad); pos = np.zeros((len(L), T), np.int64)
        for i, l in enumerate(L):
            ids[i, :n[i]] = l; pos[i, :n[i]] = np.arange(n[i]); pos[i, n[i]:] = rng.integers(n[i], 512, T - n[i])
        return torch.from_numpy(ids), torch.from_numpy(n), torch.from_numpy(pos)


def sample_text(r):
    k = r.random()
    if k < .62: return shapes.caption(r, shapes.sample_scene(r, .35))
    if k < .88: return shapes.edit(r, shapes.sample_scene(r, .3))[1:]
    a = [shapes.sample_scene(r, 0) for _ in range(2 if r.random() < .7 else 3)]
    return shapes.compose(r, a)[1:]


def main():
    ap = argparse.ArgumentParser(); ap.add_argument("tok"); ap.add_argument("out"); ap.add_argument("--seconds", type=float, default=480)
    ap.add_argument("--batch", type=int, default=64); ap.add_argument("--threads", type=int, default=2); ap.add_argument("--lr", type=float, default=2e-3); ap.add_argument("--init"); ap.add_argument("--seed", type=int, default=0)
    a = ap.parse_args(); torch.set_num_threads(a.threads); torch.manual_seed(a.seed); r = np.random.default_rng(a.seed)
    tok, m = Tok(a.tok), TextEncoder(); nf = sum(shapes.FIELDS.values()); head = nn.Linear(H, nf)
    if a.init: st = torch.load(a.init); m.load_state_dict(st["model"]); head.load_state_dict(st["head"])
    print("parameters", sum(p.numel() for p in m.parameters()), "bytes of bf16", 2 * sum(p.numel() for p in m.parameters()))
    P = [m.emb] + list(m.layers[:TRAINED].parameters()) + list(head.parameters())
    opt = torch.optim.AdamW([{"params": [p for p in P if p.ndim > 1], "weight_decay": .02}, {"params": [p for p in P if p.ndim == 1], "weight_decay": 0}], lr=a.lr, betas=(.9, .98), fused=True)
    t0, step, names = time.time(), 0, list(shapes.FIELDS)
    while True:
        f = (time.time() - t0) / a.seconds
        if f >= 1: break
        for g in opt.param_groups: g["lr"] = a.lr * min(1, (step + 1) / 60) * (.5 + .5 * math.cos(math.pi * f)) + 1e-5
        data = [sample_text(r) for _ in range(a.batch)]
        ids, n, pos = tok.batch([d[0] for d in data], 2, r)
        x = m(ids, n, pos, TRAINED)
        want = (torch.arange(ids.shape[1])[None] >= n[:, None] - 3).nonzero()
        y = {k: torch.tensor([d[1][k] for d in data])[want[:, 0]] for k in names}
        lg = head(x[want[:, 0], want[:, 1]] * .3).split(list(shapes.FIELDS.values()), -1)
        loss = sum(F.cross_entropy(l, y[k]) for l, k in zip(lg, names))
        opt.zero_grad(); loss.backward(); gn = nn.utils.clip_grad_norm_(P, 1.0); opt.step(); step += 1
        if step % 25 == 0 or step < 4:
            acc = {k: float((l.argmax(-1) == y[k]).float().mean()) for l, k in zip(lg, names)}
            print(f"{step} {time.time() - t0:.0f}s loss {loss.item():.3f} gn {gn:.2f} x {x.std().item():.2f} acc " + " ".join(f"{k}:{v:.2f}" for k, v in acc.items()), flush=True)
            torch.save({"model": m.state_dict(), "head": head.state_dict()}, a.out)
    torch.save({"model": m.state_dict(), "head": head.state_dict()}, a.out)
    # held-out check
    r = np.random.default_rng(12345); ok = {k: [] for k in names}; every = []
    with torch.no_grad():
        for _ in range(8):
            data = [sample_text(r) for _ in range(128)]; ids, n, pos = tok.batch([d[0] for d in data], 2, r); x = m(ids, n, pos, TRAINED)
            lg = head(x[:, -1] * .3).split(list(shapes.FIELDS.values()), -1)
            c = torch.stack([(l.argmax(-1) == torch.tensor([d[1][k] for d in data])) for l, k in zip(lg, names)])
            for k, v in zip(names, c): ok[k] += v.tolist()
            every += c.all(0).tolist()
    print("held out, tap 9, last pad row:", {k: round(float(np.mean(v)), 3) for k, v in ok.items()}, "all fields", round(float(np.mean(every)), 3))


if __name__ == "__main__": main()
