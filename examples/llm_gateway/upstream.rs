//! Stands in for a vendor: a server with the APIs of OpenAI and Anthropic, whose model repeats one word.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Json, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde_json::{Value, json};
use tokio_stream::StreamExt;

/// The tokens of every prompt, as this vendor counts them.
pub(crate) const PROMPT: u64 = 7;

/// The tokens after which the model `breaks` does.
pub(crate) const BREAKS_AFTER: u64 = 3;

#[derive(Clone)]
pub(crate) struct Model {
    /// The time of a token.
    pub(crate) pace: Duration,
    /// The tokens that were generated for all requests.
    pub(crate) generated: Arc<AtomicU64>,
}

/// The events of one answer, in the words of an API.
struct Words {
    first: String,
    token: String,
    last: String,
}

fn event(data: &Value) -> String {
    let name = data["type"].as_str().map_or(String::new(), |name| format!("event: {name}\n"));
    format!("{name}data: {data}\n\n")
}

impl Model {
    pub(crate) fn app(self) -> Router {
        Router::new()
            .route("/v1/chat/completions", post(openai))
            .route("/v1/messages", post(anthropic))
            .with_state(self)
    }

    /// Generates an answer that is sent as a whole.
    async fn think(&self, tokens: u64) {
        tokio::time::sleep(self.pace.saturating_mul(u32::try_from(tokens).unwrap_or(u32::MAX))).await;
    }

    fn answer(&self, asked: &Value, words: Words) -> Response {
        let breaks = asked["model"] == "breaks";
        let tokens = if breaks { BREAKS_AFTER } else { most(asked) };
        let generated = Arc::clone(&self.generated);
        let events = tokio_stream::iter(0..tokens).throttle(self.pace).map(move |_| {
            generated.fetch_add(1, Ordering::SeqCst);
            Ok(Bytes::from(words.token.clone()))
        });
        let end = if breaks { Err(io::Error::other("the model broke")) } else { Ok(Bytes::from(words.last)) };
        let events = tokio_stream::iter([Ok(Bytes::from(words.first))]).chain(events).chain(tokio_stream::iter([end]));
        ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(events)).into_response()
    }
}

fn most(asked: &Value) -> u64 {
    asked["max_tokens"].as_u64().unwrap_or(20)
}

async fn openai(State(model): State<Model>, Json(asked): Json<Value>) -> Response {
    if asked["model"] == "fails" {
        return (StatusCode::INTERNAL_SERVER_ERROR, Json(json!({"error": {"message": "the model failed"}})))
            .into_response();
    }
    let completion = most(&asked);
    let usage = json!({"prompt_tokens": PROMPT, "completion_tokens": completion, "total_tokens": PROMPT + completion});
    if asked["stream"] != true {
        model.think(completion).await;
        let message = json!({"role": "assistant", "content": "word".repeat(completion as usize)});
        return Json(json!({"choices": [{"message": message}], "usage": usage})).into_response();
    }
    let delta = |delta: Value| json!({"choices": [{"index": 0, "delta": delta}], "usage": null});
    let has_usage = asked["stream_options"]["include_usage"] == true;
    let usage = if has_usage { event(&json!({"choices": [], "usage": usage})) } else { String::new() };
    let first = event(&delta(json!({"role": "assistant", "content": ""})));
    let token = event(&delta(json!({"content": "word"})));
    model.answer(&asked, Words { first, token, last: format!("{usage}data: [DONE]\n\n") })
}

async fn anthropic(State(model): State<Model>, Json(asked): Json<Value>) -> Response {
    if asked["model"] == "fails" {
        let error = json!({"type": "error", "error": {"type": "overloaded_error", "message": "the model is busy"}});
        return (StatusCode::SERVICE_UNAVAILABLE, Json(error)).into_response();
    }
    let output = most(&asked);
    if asked["stream"] != true {
        model.think(output).await;
        let content = json!([{"type": "text", "text": "word".repeat(output as usize)}]);
        let usage = json!({"input_tokens": PROMPT, "output_tokens": output});
        return Json(json!({"type": "message", "content": content, "usage": usage})).into_response();
    }
    let usage = json!({"input_tokens": PROMPT, "output_tokens": 0});
    let first = event(&json!({"type": "message_start", "message": {"content": [], "usage": usage}}));
    let text = json!({"type": "text_delta", "text": "word"});
    let token = event(&json!({"type": "content_block_delta", "index": 0, "delta": text}));
    let usage = json!({"output_tokens": output});
    let end = event(&json!({"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": usage}));
    let last = format!("{end}{}", event(&json!({"type": "message_stop"})));
    model.answer(&asked, Words { first, token, last })
}
