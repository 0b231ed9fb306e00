//! Reads what the answer of a model costs, while it passes. It knows the forms of OpenAI's and Anthropic's APIs, which
//! many other servers have, too.
//!
//! The file stands alone: copy it into a gateway of your own. It needs `serde_json`.

use serde_json::Value;

/// Bytes of text in a token, roughly. It only counts until the model states the number.
const BYTES_PER_TOKEN: u64 = 4;

/// The longest line of a stream that is read, in bytes. A longer one counts as text as a whole.
const LINE_MAX: usize = 64 << 10;

/// The fields of an event that hold text of the model: answers, thoughts, and arguments of tools.
const TEXTS: [&str; 7] = ["content", "reasoning_content", "refusal", "arguments", "text", "thinking", "partial_json"];

/// Estimates the tokens of a text.
pub(crate) fn estimate(bytes: usize) -> u64 {
    (bytes as u64).div_ceil(BYTES_PER_TOKEN)
}

/// The tokens of one request: as stated by the model, and until then as estimated. It holds at most one line of a
/// stream.
#[derive(Default)]
pub(crate) struct Tokens {
    prompt: u64,
    /// The tokens of the answer, as last stated.
    answer: u64,
    /// Bytes of text that came after that statement.
    text: usize,
    /// The line that has not ended.
    line: Vec<u8>,
    /// Whether that line is too long, so that its bytes are only counted.
    is_long: bool,
}

impl Tokens {
    /// Begins with the estimate of the prompt.
    pub(crate) fn new(prompt: u64) -> Self {
        Self { prompt, ..Self::default() }
    }

    /// Returns the tokens of the prompt and of the answer so far.
    pub(crate) fn total(&self) -> u64 {
        self.prompt.saturating_add(self.answer).saturating_add(estimate(self.text))
    }

    /// Reads a piece of a stream of events. The pieces may be cut anywhere.
    pub(crate) fn read_piece(&mut self, piece: &[u8]) {
        for part in piece.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            if self.is_long || self.line.len() + part.len() > LINE_MAX {
                self.text = self.text.saturating_add(self.line.len() + part.len());
                self.line.clear();
                self.is_long = true;
            } else {
                self.line.extend_from_slice(part);
            }
            if part.ends_with(b"\n") || part.ends_with(b"\r") {
                self.is_long = false;
                self.read_line();
            }
        }
    }

    /// Reads a line. Both vendors write an event's data into one line.
    fn read_line(&mut self) {
        let event = self.line.strip_prefix(b"data:").and_then(|data| serde_json::from_slice(data).ok());
        self.line.clear();
        if let Some(event) = event {
            self.read(&event);
        }
    }

    /// Reads an event of a stream, or a whole answer.
    pub(crate) fn read(&mut self, event: &Value) {
        self.text = self.text.saturating_add(text_bytes(event));
        // Anthropic states the prompt in `message_start`, and the answer so far in `message_delta`. OpenAI states both
        // in the last event, or in `response.completed`. So do whole answers.
        let usage = [&event["usage"], &event["message"]["usage"], &event["response"]["usage"]];
        let Some(usage) = usage.into_iter().find(|usage| usage.is_object()) else { return };
        let number = |names: &[&str]| names.iter().find_map(|name| usage[*name].as_u64());
        if let Some(prompt) = number(&["prompt_tokens", "input_tokens"]) {
            // Anthropic counts what its cache reads and writes apart from these.
            let cached = ["cache_creation_input_tokens", "cache_read_input_tokens"];
            self.prompt = cached.iter().fold(prompt, |sum, name| sum.saturating_add(number(&[name]).unwrap_or(0)));
        }
        if let Some(answer) = number(&["completion_tokens", "output_tokens"]) {
            (self.answer, self.text) = (answer, 0);
        }
    }
}

fn text_bytes(value: &Value) -> usize {
    match value {
        Value::Object(fields) => fields.iter().map(|(name, value)| text_bytes_of(name, value)).sum(),
        Value::Array(items) => items.iter().map(text_bytes).sum(),
        _ => 0,
    }
}

fn text_bytes_of(name: &str, value: &Value) -> usize {
    match value {
        Value::String(text) if TEXTS.contains(&name) => text.len(),
        value => text_bytes(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPENAI: &str = r#"data: {"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}

data: {"choices":[{"delta":{"content":"Grüß"}}],"usage":null}

data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{\"a\":1}"}}]}}],"usage":null}

: a comment
data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5,"total_tokens":14}}

data: [DONE]

"#;

    const ANTHROPIC: &str = r#"event: message_start
data: {"type":"message_start","message":{"content":[],"usage":{"input_tokens":4,"cache_read_input_tokens":20,"output_tokens":1}}}

event: content_block_delta
data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"Hello"}}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":6}}

"#;

    /// Reads a stream in pieces, and returns the total.
    fn total<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> u64 {
        let mut tokens = Tokens::new(3);
        pieces.into_iter().for_each(|piece| tokens.read_piece(piece));
        tokens.total()
    }

    #[test]
    fn usage_is_read_however_the_stream_is_cut() {
        for (stream, stated) in [(OPENAI, 14), (ANTHROPIC, 30)] {
            for end in ["\n", "\r\n", "\r"] {
                let stream = stream.replace('\n', end);
                let bytes = stream.as_bytes();
                assert_eq!(total(bytes.chunks(1)), stated, "byte by byte");
                for at in 0..=bytes.len() {
                    assert_eq!(total([&bytes[..at], &bytes[at..]]), stated, "cut at {at}");
                }
            }
        }
    }

    #[test]
    fn aborted_stream_costs_its_text_so_far() {
        let until = |stream: &str, end: &str| total([stream.split_inclusive(end).next().unwrap().as_bytes()]);
        // The estimate of the prompt, 3, and 6 bytes of text; then 7 more, of a tool's arguments.
        assert_eq!(until(OPENAI, "Grüß\"}}],\"usage\":null}\n"), 3 + 2);
        assert_eq!(until(OPENAI, ": a comment\n"), 3 + 4);
        // The prompt as stated, the first token, and 5 bytes of text.
        assert_eq!(until(ANTHROPIC, "\"Hello\"}}\n"), 24 + 1 + 2);
    }

    #[test]
    fn long_line_is_counted_and_not_kept() {
        let mut tokens = Tokens::new(0);
        tokens.read_piece(b"data: {\"choices\":[{\"delta\":{\"content\":\"");
        for _ in 0..1_000 {
            tokens.read_piece(&[b'x'; 1_000]);
            assert!(tokens.line.capacity() <= 2 * LINE_MAX);
        }
        assert!(tokens.total() >= 250_000);
        tokens.read_piece(b"\"}}]}\n");
        tokens.read_piece(b"data: {\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2}}\n");
        assert_eq!(tokens.total(), 3, "the statement replaces the estimate");
    }

    #[test]
    fn whatever_is_no_event_is_passed_over() {
        for stream in [
            "",
            "\n\n",
            "data:\n",
            "data: [1, {\"usage\": 7}]\n",
            "data: {\"usage\": {\"prompt_tokens\": -1}}\n",
            "usage\n",
        ] {
            assert_eq!(total([stream.as_bytes()]), 3, "{stream:?}");
        }
    }
}
