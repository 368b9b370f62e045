// SPDX-License-Identifier: Apache-2.0
//! From a prompt to token ids: chat layout, byte-level BPE, padding to 512.

use std::{ops::Range, path::Path};

use crate::error::Result;

/// Token ids of one prompt, padded to the model's length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptTokens {
    /// Ids, exactly the model's text length (512).
    pub ids: Vec<u32>,
    /// Which of them are the prompt's (the rest is padding).
    pub real: Range<usize>,
    /// Tokens of the whole chat text before truncation.
    pub total: usize,
}

impl PromptTokens {
    /// Whether the prompt was cut.
    pub fn truncated(&self) -> bool {
        self.total > self.ids.len()
    }
}

/// The tokenizer of a checkpoint with its chat layout.
pub struct PromptTokenizer {}

impl PromptTokenizer {
    /// Reads `tokenizer.json` from the tokenizer directory of a checkpoint.
    pub fn load(directory: &Path) -> Result<Self> {
        let _ = directory;
        todo!()
    }

    /// Ids of a prompt.
    pub fn encode(&self, prompt: &str) -> Result<PromptTokens> {
        let _ = prompt;
        todo!()
    }
}
