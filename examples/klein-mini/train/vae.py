# SPDX-License-Identifier: Apache-2.0
"""VAE of klein-mini (AutoencoderKLFlux2: 8x, 32 latent channels, small widths).

The latent space is fixed first: the 32 leading principal components of 8x8 pixel blocks of synthetic pictures
(`basis`). The encoder is then trained to produce it and the decoder to invert it (`enc`, `dec`), so that the DiT can be
trained on the exact linear latents without waiting for the VAE.
"""
import argparse, math, time
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F
import shapes
WIDTHS = (16, 32, 32, 32)


def fast_group_norm(s, x):
    """Same result as GroupNorm, with a much faster backward on CPU (layer norm over each group)."""
    N, C = x.shape[:2]; hw = x[0, 0].numel()
    with torch.autocast("cpu", enabled=False):
        y = F.layer_norm(x.reshape(N, s.num_groups, -1), (C // s.num_groups * hw,), eps=s.eps).view(N, C, hw)
        y = y * s.weight.to(x.dtype)[None, :, None] + s.bias.to(x.dtype)[None, :, None]
    return y.view(x.shape)


def patchify(z):                                   # [N,32,2h,2w] -> [N,h*w,128], channel 4c+2p+q
    N, C, h, w = z.shape
    return z.view(N, C, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(N, h * w // 4, C * 4)


def linear_latents(x, basis):
    """x [N,3,H,W] -> [N,32,H/8,W/8]"""
    return F.conv2d(x, basis["B"].view(32, 3, 8, 8), basis["b"], stride=8)


def make_basis(path):
    r = np.random.default_rng(7); P = []
    sizes = [(128, 128), (192, 128), (256, 256), (256, 384), (512, 512)]
    for W, H in sizes:
        for _ in range(24 if W < 500 else 8):
            x = shapes.render([shapes.sample_scene(r, .3) for _ in range(8)], W, H)
            p = F.unfold(x, 8, stride=8).transpose(1, 2).reshape(-1, 192); P.append(p[torch.randperm(len(p), generator=torch.Generator().manual_seed(1))[:4096]])
    P = torch.cat(P).double(); mean = P.mean(0); ev, U = torch.linalg.eigh((P - mean).T @ (P - mean) / len(P))
    U, sd = U.flip(1)[:, :32], ev.flip(0)[:32].sqrt()
    print("sd of components", [round(float(s), 3) for s in sd], "lost rms", float(ev.flip(0)[32:].sum().div(192).sqrt()))
    B = (U / sd ** .8).T                            # not fully whitened: the batch-norm statistics stay meaningful
    bs = {"B": B.float(), "b": -.5 * (B @ mean).float()}
    Z = []
    for W, H in sizes:
        for _ in range(4): Z.append(patchify(linear_latents(shapes.render([shapes.sample_scene(r, .3) for _ in range(8)], W, H), bs)).reshape(-1, 128)[:8192])
    Z = torch.cat(Z); bs |= {"mean": Z.mean(0), "var": Z.var(0)}
    print("running var", bs["var"].min().item(), bs["var"].max().item(), "mean", bs["mean"].abs().max().item()); torch.save(bs, path)


def make():
    from diffusers import AutoencoderKLFlux2
    torch.manual_seed(0)
    v = AutoencoderKLFlux2(block_out_channels=WIDTHS, layers_per_block=2, latent_channels=32, norm_num_groups=8, sample_size=1024, batch_norm_eps=1e-4)
    with torch.no_grad():
        for n, p in v.named_parameters():
            if n.endswith("conv2.weight") or "to_out.0.weight" in n: p *= .1
            # the straight path carries signal at unit gain, and constant offsets inside each norm group of the last norm let absolute colour through
            if n.endswith("conv_in.weight") or "samplers.0.conv.weight" in n or "conv_shortcut.weight" in n: p *= 1.7
        c0 = WIDTHS[0]
        v.decoder.up_blocks[3].resnets[0].conv_shortcut.bias.copy_(torch.tensor([2., -2.] * (c0 // 2)))
        v.encoder.down_blocks[2].downsamplers[0].conv.bias.copy_(torch.tensor([2., -2.] * (WIDTHS[2] // 2)))
        v.decoder.conv_norm_out.bias += 1; v.encoder.conv_norm_out.bias += 1
        v.quant_conv.weight.zero_(); v.quant_conv.weight[:32, :32, 0, 0] = torch.eye(32); v.quant_conv.bias.zero_()
        v.quant_conv.bias[32:] = -6.0               # constant log-variance; only the mode is used
        v.post_quant_conv.weight.zero_(); v.post_quant_conv.weight[:, :, 0, 0] = torch.eye(32); v.post_quant_conv.bias.zero_()
    return v


def batch(r, B):
    k = r.random()
    sc = [shapes.sample_scene(r, .4) for _ in range(B)]
    if k < .5:
        W, H = [(128, 128), (160, 112), (112, 160)][int(r.integers(3))]; return shapes.render(sc, W, H)
    m = [192, 256, 384, 512, 1024][int(r.integers(5))]; s = 128
    return shapes.render(sc, m, m, (8 * int(r.integers((m - s) // 8 + 1)), 8 * int(r.integers((m - s) // 8 + 1)), s, s))


def main():
    ap = argparse.ArgumentParser(); ap.add_argument("what"); ap.add_argument("work"); ap.add_argument("--seconds", type=float, default=420); ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--threads", type=int, default=2); ap.add_argument("--lr", type=float, default=2e-3); ap.add_argument("--noise", type=float, default=.15); ap.add_argument("--init")
    a = ap.parse_args(); torch.set_num_threads(a.threads)
    if a.what == "basis": return make_basis(f"{a.work}/basis.pt")
    bs = torch.load(f"{a.work}/basis.pt"); nn.GroupNorm.forward = fast_group_norm; v = make(); r = np.random.default_rng(0)
    sd = bs["var"].view(32, 4).mean(1).sqrt()[None, :, None, None]
    wt = bs["B"].norm(dim=1) ** (-.7 / .8); wt = (wt / wt.mean())[None, :, None, None]      # by how much each component moves pixels
    part, extra = (v.encoder, v.quant_conv) if a.what == "enc" else (v.decoder, v.post_quant_conv)
    if a.init: st = torch.load(a.init); part.load_state_dict(st["main"]); extra.load_state_dict(st["extra"])
    P = list(part.parameters()) + (list(extra.parameters()) if a.what == "dec" else [])
    print("parameters", sum(p.numel() for p in P))
    opt = torch.optim.AdamW(P, lr=a.lr, betas=(.9, .98), weight_decay=1e-4, fused=True); t0, step = time.time(), 0
    save = lambda: torch.save({"main": part.state_dict(), "extra": extra.state_dict()}, f"{a.work}/{a.what}.pt")
    acc = []
    while True:
        f = (time.time() - t0) / a.seconds
        if f >= 1: break
        for g in opt.param_groups: g["lr"] = a.lr * min(1, (step + 1) / 20) * (.5 + .5 * math.cos(math.pi * f)) + 1e-5
        x = batch(r, a.batch); z = linear_latents(x, bs)
        with torch.autocast("cpu", torch.bfloat16):
            if a.what == "enc":
                y = extra(part(x))[:, :32].float(); e = (y - z) / sd; loss = (wt * (e.abs() + e.pow(2))).mean(); m = e[:, :3].pow(2).mean().item()
            else:
                zn = z + torch.randn_like(z) * sd * a.noise * torch.rand(len(x), 1, 1, 1)
                y = part(extra(zn)).float(); e = y - x; loss = e.abs().mean() + 3 * e.pow(2).mean(); m = e.pow(2).mean().item()
        opt.zero_grad(); loss.backward(); nn.utils.clip_grad_norm_(P, 1.0); opt.step(); step += 1; acc.append(m)
        if step % 25 == 0 or step < 3:
            m = np.mean(acc); acc = []
            print(f"{step} {time.time() - t0:.0f}s loss {loss.item():.4f} " + (f"relative rms of the 3 leading components {math.sqrt(m):.3f}" if a.what == "enc" else f"psnr {10 * math.log10(4 / m):.1f}"), flush=True)
        if step % 50 == 0: save()
    save()


if __name__ == "__main__": main()
