# SPDX-License-Identifier: Apache-2.0
"""Work folder from a finished checkpoint: text encoder, VAE and tokenizer are kept, the latent basis is computed again and compared.

usage: readback.py CHECKPOINT W
"""
import glob, os, shutil, sys
import torch
from safetensors.torch import load_file
import text as T, vae as V


def main(ck, work):
    torch.set_num_threads(2); os.makedirs(work, exist_ok=True); shutil.copytree(f"{ck}/tokenizer", f"{work}/tokenizer", dirs_exist_ok=True); d = {}
    for f in glob.glob(f"{ck}/text_encoder/*.safetensors"): d |= load_file(f)
    m = T.TextEncoder()
    with torch.no_grad():
        for k, p in m.hf_state().items(): p.copy_(d[k].float())
    torch.save({"model": m.state_dict()}, f"{work}/te.pt")
    v = {k: x.float() for k, x in load_file(f"{ck}/vae/diffusion_pytorch_model.safetensors").items()}
    sub = lambda p: {k[len(p):]: x for k, x in v.items() if k.startswith(p)}
    torch.save({"main": sub("decoder."), "extra": sub("post_quant_conv.")}, f"{work}/dec.pt"); torch.save({"main": sub("encoder."), "extra": sub("quant_conv.")}, f"{work}/enc.pt")
    V.make_basis(f"{work}/basis.pt"); bs = torch.load(f"{work}/basis.pt")
    print("basis against checkpoint: mean differs by", (bs["mean"] - v["bn.running_mean"]).abs().max().item(), "variance ratio", (bs["var"] / v["bn.running_var"]).min().item(), (bs["var"] / v["bn.running_var"]).max().item())


if __name__ == "__main__": main(*sys.argv[1:3])
