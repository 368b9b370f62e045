# SPDX-License-Identifier: Apache-2.0
"""Small byte-level BPE with Qwen2 layout, special tokens and chat template, trained on captions of the synthetic world."""
import json, os, sys
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers, AddedToken
import shapes
QWEN_RE = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
ADDED = [("<|endoftext|>", 1), ("<|im_start|>", 1), ("<|im_end|>", 1), ("<|object_ref_start|>", 1),
         ("<|object_ref_end|>", 1), ("<|box_start|>", 1), ("<|box_end|>", 1), ("<|quad_start|>", 1),
         ("<|quad_end|>", 1), ("<|vision_start|>", 1), ("<|vision_end|>", 1), ("<|vision_pad|>", 1),
         ("<|image_pad|>", 1), ("<|video_pad|>", 1), ("<tool_call>", 0), ("</tool_call>", 0),
         ("<|fim_prefix|>", 0), ("<|fim_middle|>", 0), ("<|fim_suffix|>", 0), ("<|fim_pad|>", 0),
         ("<|repo_name|>", 0), ("<|file_sep|>", 0), ("<tool_response>", 0), ("</tool_response>", 0),
         ("<think>", 0), ("</think>", 0)]
CHAT = ("{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
        "{%- endif %}")


def corpus():
    r = np.random.default_rng(1)
    for _ in range(6000):
        s = shapes.sample_scene(r); yield shapes.caption(r, s)[0] + "\n"; yield shapes.edit(r, s)[1] + "\n"
        a, b, c = (shapes.sample_scene(r, 0) for _ in range(3)); yield shapes.compose(r, [a, b, c][:int(r.integers(2, 4))])[1] + "\n"
    for _ in range(300):
        yield "user\n\nassistant\nthe quick photo of a house and tree, with an old cat in the garden at night; that is not this, it's for you.\n"


def build(dst):
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN_RE), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    t.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    t.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=934, min_frequency=20,
                          initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    for s, sp in ADDED:
        a = AddedToken(s, special=bool(sp), normalized=False)
        (t.add_special_tokens if sp else t.add_tokens)([a])
    os.makedirs(dst, exist_ok=True)
    t.save(f"{dst}/tokenizer.json"); t.model.save(dst)
    base = t.token_to_id("<|endoftext|>")
    json.dump({s: base + i for i, (s, _) in enumerate(ADDED)}, open(f"{dst}/added_tokens.json", "w"), indent=1)
    json.dump({"add_bos_token": False, "add_prefix_space": False, "bos_token": None, "eos_token": "<|im_end|>",
               "pad_token": "<|endoftext|>", "unk_token": None, "errors": "replace", "split_special_tokens": False,
               "model_max_length": 131072, "clean_up_tokenization_spaces": False, "tokenizer_class": "Qwen2Tokenizer",
               "added_tokens_decoder": {str(base + i): {"content": s, "lstrip": False, "normalized": False, "rstrip": False,
                                                        "single_word": False, "special": bool(sp)} for i, (s, sp) in enumerate(ADDED)}},
              open(f"{dst}/tokenizer_config.json", "w"), indent=1)
    json.dump({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
               "additional_special_tokens": [s for s, sp in ADDED if sp][1:]}, open(f"{dst}/special_tokens_map.json", "w"), indent=1)
    open(f"{dst}/chat_template.jinja", "w").write(CHAT)
    return t


if __name__ == "__main__":
    t = build(sys.argv[1]); print("vocabulary", t.get_vocab_size())
