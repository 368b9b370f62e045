// SPDX-License-Identifier: Apache-2.0
//! FLUX.2 \[klein\]: Qwen3's chat template with `add_generation_prompt=True, enable_thinking=False`.
//!
//! Mirrors `Flux2KleinPipeline._get_qwen3_prompt_embeds`: one user message, thinking switched off, right truncation (a long
//! prompt loses the assistant suffix), right padding.

use super::{Layout, Padding};

/// Qwen3's layout.
pub const QWEN3: Layout = Layout {
    before: "<|im_start|>user\n",
    after: "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    removed: &[],
    special: &["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"],
    padding: Padding::After,
    tokens: 512,
};
