#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rebuild FLUX.2-dev's tokenizer/tokenizer.json byte for byte from the mistral-common wheel (pip download --no-deps mistral-common).

usage: rebuild_tokenizer.py MISTRAL_COMMON_WHEEL OUT.json      (needs the `tokenizers` library, 0.22.2 tried)
"""
import base64, hashlib, json, sys, zipfile
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
WANT = "b76085f9923309d873994d444989f7eb6ec074b06f25b58f1e8d7b7741070949"
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
NAMED = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
         "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
special = NAMED + [f"<SPECIAL_{i}>" for i in range(20, 1000)]
keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
rest = iter(range(256, 512)); ch = [chr(b) if b in keep else chr(next(rest)) for b in range(256)]     # byte -> character
text = lambda bs: "".join(ch[b] for b in bs)

entries = json.loads(zipfile.ZipFile(sys.argv[1]).read("mistral_common/data/tekken_240911.json"))["vocab"][:131072 - len(special)]
rank = {base64.b64decode(e["token_bytes"]): len(special) + e["rank"] for e in entries}
merges = []
for t in rank:                                            # in rank order: every split into two known tokens
    cuts = [(t[:i], t[i:]) for i in range(1, len(t)) if t[:i] in rank and t[i:] in rank]
    merges += [(text(a), text(b)) for a, b in sorted(cuts, key=lambda p: (rank[p[0]], rank[p[1]]))]
vocab = {s: i for i, s in enumerate(special)} | {text(t): r for t, r in rank.items()}
tok = Tokenizer(models.BPE(vocab, merges, fuse_unk=False)); tok.model.ignore_merges = True
tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
                                             pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
tok.decoder = decoders.ByteLevel(); tok.add_special_tokens(special)
tok.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
tok.save(sys.argv[2], pretty=True)
got = hashlib.sha256(open(sys.argv[2], "rb").read()).hexdigest()
print(len(vocab), "tokens", len(merges), "merges", got, "as published" if got == WANT else "NOT the published file")
