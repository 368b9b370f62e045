// SPDX-License-Identifier: Apache-2.0
//! From a prompt to token ids: chat layout, byte-level BPE, padding to 512.
//!
//! A model's layout is one constant in a file of its own. Special tokens spelled out in a prompt are parsed as such, as
//! upstream does.

mod mistral;
mod qwen3;

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

pub use mistral::MISTRAL;
pub use qwen3::QWEN3;
use tokenizers::Tokenizer;

use crate::{
    checkpoint::missing,
    error::{Error, Result},
    request,
};

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

/// How a model wants its prompts: what stands around one user message, and how many tokens the model sees. Longer ones are
/// cut on the right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Text before the prompt.
    pub before: &'static str,
    /// Text after the prompt.
    pub after: &'static str,
    /// Removed from the prompt wherever it occurs.
    pub removed: &'static [&'static str],
    /// Each must be one token of the vocabulary; the first pads.
    pub special: &'static [&'static str],
    /// Where the padding goes.
    pub padding: Padding,
    /// Tokens that the model sees.
    pub tokens: usize,
}

impl Layout {
    /// Positions of a chat text of so many tokens (all, if it is longer) among [`Layout::tokens`].
    pub fn real(&self, count: usize) -> Range<usize> {
        let count = count.min(self.tokens);
        match self.padding {
            Padding::Before => self.tokens - count..self.tokens,
            Padding::After => 0..count,
        }
    }
}

/// On which side of the prompt the padding goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// Before the prompt: left.
    Before,
    /// After the prompt: right.
    After,
}

/// Longest prompt in characters. The regular expression engine of the pre-tokenizer gives up *silently* after a million
/// steps of backtracking and leaves the rest of the text in one piece; it needs fewer than ten a character.
const MAX_CHARS: usize = 32_768;

/// The tokenizer of a checkpoint with its chat layout.
pub struct PromptTokenizer {
    path: PathBuf,
    tokenizer: Tokenizer,
    layout: &'static Layout,
    pad: u32,
}

impl PromptTokenizer {
    /// Reads `tokenizer.json` from the tokenizer directory of a checkpoint, for prompts in `layout`.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if it is missing, damaged, or lacks the special tokens of the chat layout.
    pub fn load(directory: &Path, layout: &'static Layout) -> Result<Self> {
        let path = directory.join("tokenizer.json");
        if !path.exists() {
            return Err(missing(directory, &["tokenizer.json".into()]));
        }
        let mut tokenizer = Tokenizer::from_file(&path)
            .map_err(|error| Error::checkpoint(&path, format!("is not a tokenizer: {error}")))?;
        // The file may carry settings of its own; cutting and padding are ours.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| {
            Error::checkpoint(&path, format!("truncation cannot be switched off: {error}"))
        })?;

        let mut ids = Vec::with_capacity(layout.special.len());
        for token in layout.special {
            let id = tokenizer.token_to_id(token).ok_or_else(|| {
                Error::checkpoint(
                    &path,
                    format!("has no token {token}; is it the tokenizer of another model?"),
                )
            })?;
            ids.push(id);
        }
        Ok(Self { path, tokenizer, layout, pad: ids[0] })
    }

    /// Tokens that the model sees; longer prompts are cut.
    pub fn max_tokens(&self) -> usize {
        self.layout.tokens
    }

    /// Ids of a prompt.
    ///
    /// # Errors
    /// [`Error::Request`] for a prompt with NUL or of more than 32,768 characters.
    pub fn encode(&self, prompt: &str) -> Result<PromptTokens> {
        request::check_prompt_text(prompt, MAX_CHARS)?;
        let Layout { before, after, removed, tokens, .. } = self.layout;
        let prompt = removed.iter().fold(prompt.to_owned(), |prompt, text| prompt.replace(text, ""));
        let mut ids = self.ids(&format!("{before}{prompt}{after}"))?;
        let total = ids.len();
        ids.truncate(*tokens);
        let real = self.layout.real(ids.len());
        ids.splice(0..0, std::iter::repeat_n(self.pad, real.start));
        ids.resize(*tokens, self.pad);
        Ok(PromptTokens { ids, real, total })
    }

    /// Ids of a text as it stands: the layout spells out every special token, none is added.
    fn ids(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(|error| {
            Error::checkpoint(&self.path, format!("could not encode the prompt: {error}"))
        })?;
        Ok(encoding.get_ids().to_vec())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::fs;

    use super::*;

    /// The tokenizer of the small test checkpoint: 506 tokens of its own training text, laid out as Qwen3's.
    fn directory() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny/tokenizer")
    }

    fn tokenizer() -> PromptTokenizer {
        PromptTokenizer::load(&directory(), &QWEN3).unwrap()
    }

    const PAD: u32 = 506;

    #[test]
    fn a_prompt_stands_in_the_chat_layout_and_is_padded_on_the_right() {
        let tokenizer = tokenizer();
        let tokens = tokenizer.encode("a cat").unwrap();
        assert_eq!((tokens.ids.len(), tokenizer.max_tokens()), (512, 512));
        assert_eq!((tokens.real.clone(), tokens.truncated()), (0..tokens.total, false));
        assert!(tokens.ids[tokens.total..].iter().all(|&id| id == PAD));
        let text = tokenizer.tokenizer.decode(&tokens.ids[tokens.real], false).unwrap();
        assert_eq!(text, "<|im_start|>user\na cat<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
    }

    #[test]
    fn up_to_512_tokens_fit_and_513_are_cut_on_the_right() {
        let tokenizer = tokenizer();
        let around = tokenizer.encode("").unwrap().total;
        // Special tokens are one token each, whatever the vocabulary.
        for (total, truncated) in [(511, false), (512, false), (513, true), (600, true)] {
            let prompt = "<think>".repeat(total - around);
            let tokens = tokenizer.encode(&prompt).unwrap();
            assert_eq!((tokens.total, tokens.truncated()), (total, truncated));
            assert_eq!((tokens.ids.len(), tokens.real.clone()), (512, 0..total.min(512)));
            let whole = tokenizer.ids(&format!("{}{prompt}{}", QWEN3.before, QWEN3.after)).unwrap();
            assert_eq!(tokens.ids[tokens.real], whole[..total.min(512)]);
        }
    }

    #[test]
    fn a_long_prompt_is_split_to_its_end() {
        let tokenizer = tokenizer();
        let sentence = "A lighthouse on a cliff, don't  stop,\n\n24/7 fog;  e\u{301}t\u{e9} ";
        let once = tokenizer.ids(sentence).unwrap();
        let long = sentence.repeat(MAX_CHARS / sentence.chars().count());
        let ids = tokenizer.ids(&long).unwrap();
        // Had the pattern engine given up, the rest would be merged in another way.
        assert_eq!(ids, once.repeat(ids.len() / once.len()));
        assert_eq!(tokenizer.tokenizer.decode(&ids, false).unwrap(), long.replace("e\u{301}", "\u{e9}"));
        // What costs the most backtracking: white space that a line end or a word might follow.
        for worst in [" ".repeat(MAX_CHARS), format!("{}x", "\t \n".repeat(MAX_CHARS / 3 - 1))] {
            let tokens = tokenizer.encode(&worst).unwrap();
            assert!(tokens.truncated());
            let ids = tokenizer.ids(&worst).unwrap();
            assert_eq!(tokenizer.tokenizer.decode(&ids, false).unwrap(), worst);
        }
    }

    #[test]
    fn special_tokens_in_a_prompt_are_parsed() {
        let tokens = tokenizer().encode("a<|im_end|>b<think>").unwrap();
        assert_eq!(tokens.ids.iter().filter(|&&id| id == 508).count(), 2);
        assert_eq!(tokens.ids.iter().filter(|&&id| id == 530).count(), 2);
    }

    #[test]
    fn nul_and_endless_prompts_are_refused() {
        for prompt in ["a\0b".to_string(), "a".repeat(MAX_CHARS + 1)] {
            let Err(Error::Request(error)) = tokenizer().encode(&prompt) else { panic!("accepted") };
            assert_eq!(error.parameter, "prompt");
        }
    }

    #[test]
    fn a_missing_or_damaged_tokenizer_is_named() {
        let directory = tempfile::TempDir::new().unwrap();
        let refusal = || PromptTokenizer::load(directory.path(), &QWEN3).err().unwrap().to_string();
        assert!(refusal().contains("tokenizer.json missing"));
        fs::write(directory.path().join("tokenizer.json"), "{").unwrap();
        assert!(refusal().contains("tokenizer.json: is not a tokenizer: "));
        let other = fs::read_to_string(self::directory().join("tokenizer.json")).unwrap();
        fs::write(directory.path().join("tokenizer.json"), other.replace("<think>", "<thought>")).unwrap();
        assert!(refusal().contains("has no token <think>"));
    }
}
