#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What PyTorch and diffusers take for a kernel or a stage of FLUX.2 [klein], at the word of compare.py.

usage: peer.py DTYPE THREADS [CHECKPOINT]

Reads lines from standard input and answers each with one. `linear ROWS INPUTS OUTPUTS`, `attention ROWS HEADS`,
`conv SIDE INPUTS OUTPUTS`, `text_encoder`, `dit SIDE`, `vae_decode SIDE`, `vae_encode SIDE` prepare and answer `ready` and
the seconds that took; `run` answers the seconds of one run.
"""
import sys
import time

import torch

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def linear(dtype, _, rows, inputs, outputs):
    x, w = torch.randn(rows, inputs, dtype=dtype), torch.randn(outputs, inputs, dtype=dtype)
    return lambda: torch.nn.functional.linear(x, w)


def attention(dtype, _, rows, heads):
    q, k, v = (torch.randn(1, heads, rows, 128, dtype=dtype) for _ in range(3))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)


def conv(dtype, _, side, inputs, outputs):
    x = torch.randn(1, inputs, side, side, dtype=dtype).to(memory_format=torch.channels_last)
    layer = torch.nn.Conv2d(inputs, outputs, 3, padding=1, dtype=dtype).to(memory_format=torch.channels_last)
    return lambda: layer(x)


def text_encoder(dtype, checkpoint):
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(f"{checkpoint}/text_encoder", dtype=dtype).eval()
    ids = torch.randint(0, min(1000, model.config.vocab_size), (1, 512))
    mask = torch.zeros(1, 512, dtype=torch.long)
    mask[:, :30] = 1
    # As the pipeline of diffusers calls it.
    return lambda: model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)


def dit(dtype, checkpoint, side):
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel.from_pretrained(f"{checkpoint}/transformer", torch_dtype=dtype).eval()
    grid = side // 16
    x = torch.randn(1, grid * grid, model.config.in_channels, dtype=dtype)
    text = torch.randn(1, 512, model.config.joint_attention_dim, dtype=dtype)
    ids = torch.zeros(1, grid * grid, 4, dtype=torch.long)
    ids[0, :, 1] = torch.arange(grid * grid) // grid
    ids[0, :, 2] = torch.arange(grid * grid) % grid
    text_ids = torch.zeros(1, 512, 4, dtype=torch.long)
    text_ids[0, :, 3] = torch.arange(512)
    time_step = torch.tensor([0.7], dtype=dtype)
    return lambda: model(
        hidden_states=x,
        encoder_hidden_states=text,
        timestep=time_step,
        img_ids=ids,
        txt_ids=text_ids,
        guidance=None,
        return_dict=False,
    )


def vae(dtype, checkpoint):
    from diffusers import AutoencoderKLFlux2

    return AutoencoderKLFlux2.from_pretrained(f"{checkpoint}/vae", torch_dtype=dtype).eval()


def vae_decode(dtype, checkpoint, side):
    model = vae(dtype, checkpoint)
    z = torch.randn(1, model.config.latent_channels, side // 8, side // 8, dtype=dtype)
    return lambda: model.decode(z, return_dict=False)


def vae_encode(dtype, checkpoint, side):
    model = vae(dtype, checkpoint)
    x = torch.randn(1, 3, side, side, dtype=dtype)
    return lambda: model.encode(x).latent_dist.mode()


WORK = {work.__name__: work for work in (linear, attention, conv, text_encoder, dit, vae_decode, vae_encode)}


def main():
    dtype, threads = DTYPES[sys.argv[1]], int(sys.argv[2])
    checkpoint = sys.argv[3] if len(sys.argv) > 3 else None
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {threads} threads, AMX {torch.cpu._is_amx_tile_supported()}", flush=True)
    run = None
    with torch.inference_mode():
        for line in sys.stdin:
            what, *sizes = line.split()
            start = time.perf_counter()
            if what == "run":
                run()
                print(f"{time.perf_counter() - start:.9f}", flush=True)
            else:
                run = None
                run = WORK[what](dtype, checkpoint, *map(int, sizes))
                print(f"ready {time.perf_counter() - start:.3f}", flush=True)


if __name__ == "__main__":
    main()
