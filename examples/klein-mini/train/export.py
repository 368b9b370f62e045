# SPDX-License-Identifier: Apache-2.0
"""Assemble the trained parts into a bf16 checkpoint folder in the layout of Flux2KleinPipeline."""
import argparse, json, os, shutil
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from transformers import Qwen2TokenizerFast, Qwen3Config, Qwen3ForCausalLM
import text as T, vae as V, dit as Dm


def parts(work, dit):
    tok = Qwen2TokenizerFast.from_pretrained(f"{work}/tokenizer")
    te = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=T.V, hidden_size=T.H, intermediate_size=T.M, num_hidden_layers=T.NL, num_attention_heads=T.NH, num_key_value_heads=T.NKV,
        head_dim=T.D, hidden_act="silu", max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_theta=1000000.0,
        attention_bias=False, use_sliding_window=False, sliding_window=None, max_window_layers=T.NL,
        bos_token_id=tok.convert_tokens_to_ids("<|endoftext|>"), eos_token_id=tok.convert_tokens_to_ids("<|im_end|>")))
    m = T.TextEncoder(); m.load_state_dict(torch.load(f"{work}/te.pt")["model"])
    st = m.hf_state(); st["lm_head.weight"] = st["model.embed_tokens.weight"]; te.load_state_dict(st)
    tr = Flux2Transformer2DModel(
        patch_size=1, in_channels=128, out_channels=None, num_layers=Dm.ND, num_single_layers=Dm.NS, attention_head_dim=Dm.D,
        num_attention_heads=Dm.NH, joint_attention_dim=Dm.TX, timestep_guidance_channels=256, mlp_ratio=Dm.MLP / Dm.N,
        axes_dims_rope=(Dm.AX,) * 4, rope_theta=Dm.THETA, eps=1e-6, guidance_embeds=False)
    d = Dm.DiT(); d.load_state_dict(torch.load(f"{work}/{dit}")["ema"]); tr.load_state_dict(d.export())
    v = V.make(); bs = torch.load(f"{work}/basis.pt")
    for name, a, b in (("dec", v.decoder, v.post_quant_conv), ("enc", v.encoder, v.quant_conv)):
        if os.path.exists(f"{work}/{name}.pt"):
            s = torch.load(f"{work}/{name}.pt"); a.load_state_dict(s["main"]); b.load_state_dict(s["extra"])
    v.bn.running_mean.copy_(bs["mean"]); v.bn.running_var.copy_(bs["var"])
    sched = FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15,
        base_image_seq_len=256, max_image_seq_len=4096, time_shift_type="exponential")
    return tok, te.eval(), tr.eval(), v.eval(), sched, d


def main():
    ap = argparse.ArgumentParser(); ap.add_argument("work"); ap.add_argument("dit"); ap.add_argument("out"); ap.add_argument("--check", action="store_true"); a = ap.parse_args()
    torch.set_num_threads(1); tok, te, tr, v, sched, d = parts(a.work, a.dit)
    if a.check:                                     # our training code against the published classes
        with torch.no_grad():
            ids = tok(T.chat("a red circle on the left, café ☕"), return_tensors="pt", padding="max_length", max_length=512)
            n = ids["attention_mask"].sum(1); h = te(**ids, output_hidden_states=True).hidden_states
            m = T.TextEncoder(); m.load_state_dict(torch.load(f"{a.work}/te.pt")["model"])
            mine = m(ids["input_ids"], n, torch.arange(512)[None]); ref = torch.cat([h[k] for k in T.TAPS], -1)
            print("text encoder max difference", (mine - ref).abs().max().item(), "scale", ref.abs().max().item())
            x = torch.randn(1, 96, 128); pos = torch.zeros(1, 136, 4); pos[0, :40, 3] = torch.arange(40); k = torch.arange(96); pos[0, 40:, 0] = 10 * (k >= 48); pos[0, 40:, 1] = k % 48 // 8; pos[0, 40:, 2] = k % 8; c = ref[:, :40]
            A = d(x, c, torch.tensor([.88]), pos, torch.zeros(1, 1, 1, 136))
            B = tr(hidden_states=x, encoder_hidden_states=c, timestep=torch.tensor([.88]), img_ids=pos[0, 40:], txt_ids=pos[0, :40], guidance=None, return_dict=False)[0]
            print("DiT max difference", (A - B).abs().max().item(), "scale", B.abs().max().item())
    for mod in (te, tr, v): mod.to(torch.bfloat16)
    if os.path.exists(a.out): shutil.rmtree(a.out)
    os.makedirs(a.out); shutil.copytree(f"{a.work}/tokenizer", f"{a.out}/tokenizer")
    te.save_pretrained(f"{a.out}/text_encoder", max_shard_size="1200KB"); tr.save_pretrained(f"{a.out}/transformer"); v.save_pretrained(f"{a.out}/vae"); sched.save_pretrained(f"{a.out}/scheduler")
    json.dump({"_class_name": "Flux2KleinPipeline", "_diffusers_version": "0.37.1", "is_distilled": True, "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
               "text_encoder": ["transformers", "Qwen3ForCausalLM"], "tokenizer": ["transformers", "Qwen2TokenizerFast"],
               "transformer": ["diffusers", "Flux2Transformer2DModel"], "vae": ["diffusers", "AutoencoderKLFlux2"]}, open(f"{a.out}/model_index.json", "w"), indent=2)
    for r, _, fs in os.walk(a.out):
        for f in fs: os.chmod(os.path.join(r, f), 0o644)
    Flux2KleinPipeline.from_pretrained(a.out, torch_dtype=torch.bfloat16)
    print("bytes", sum(os.path.getsize(os.path.join(r, f)) for r, _, fs in os.walk(a.out) for f in fs))


if __name__ == "__main__": main()
