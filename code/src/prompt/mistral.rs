// SPDX-License-Identifier: Apache-2.0
//! FLUX.2 \[dev\]: Mistral's instruction layout with FLUX.2's system message.
//!
//! Mirrors `Flux2Pipeline._get_mistral_3_small_prompt_embeds`: image placeholders are taken out of the prompt, right
//! truncation (a long prompt loses `[/INST]`), padding **before** the prompt. transformers 5.3.0 pads on the other side
//! unless tokenizer_config.json says `padding_side: left`; the reference is left, so it is set here and never inferred.

use super::{Layout, Padding};

/// Mistral's layout.
pub const MISTRAL: Layout = Layout {
    before: "<s>[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured responses \
             focusing on object relationships, object\nattribution and actions without speculation.\
             [/SYSTEM_PROMPT][INST]",
    after: "[/INST]",
    removed: &["[IMG]"],
    special: &["<pad>", "<s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"],
    padding: Padding::Before,
    tokens: 512,
};

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    #[test]
    fn the_system_message_is_the_published_one() {
        let message = MISTRAL.before.strip_prefix("<s>[SYSTEM_PROMPT]").expect("opens");
        let message = message.strip_suffix("[/SYSTEM_PROMPT][INST]").expect("closes");
        assert_eq!(message.len(), 168);
        assert_eq!(Sha256::digest(message)[..8], [0xd4, 0x3d, 0x93, 0x08, 0x2f, 0x24, 0x03, 0x4d]);
    }
}
