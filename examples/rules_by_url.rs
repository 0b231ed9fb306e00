//! Rules from a web server: the program asks for the text at an interval. The server sends it only if its `ETag`
//! has changed. For etcd, `changed` watches a key, and its revision takes the place of the tag.
//!
//! ```sh
//! cargo run --example rules_by_url -- http://127.0.0.1:8000/rules.yaml
//! ```

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use axum::{Router, routing::get};
use http::header::{ETAG, IF_NONE_MATCH};
use http::{HeaderValue, StatusCode};
use tower_ratelimit::{MemoryLimiter, rules::Rules};

struct Source {
    client: reqwest::Client,
    url: String,
    tag: Option<HeaderValue>,
}

impl Source {
    fn new(url: String) -> Self {
        Self { client: reqwest::Client::new(), url, tag: None }
    }

    /// Returns the text if it has changed.
    async fn changed(&mut self) -> Result<Option<Vec<u8>>, Box<dyn Error + Send + Sync>> {
        let mut request = self.client.get(&self.url).timeout(Duration::from_secs(5));
        if let Some(tag) = &self.tag {
            request = request.header(IF_NONE_MATCH, tag);
        }
        let mut response = request.send().await?.error_for_status()?;
        if response.status() == StatusCode::NOT_MODIFIED {
            return Ok(None);
        }
        let (tag, mut text) = (response.headers().get(ETAG).cloned(), Vec::new());
        while let Some(part) = response.chunk().await? {
            text.extend_from_slice(&part);
            if text.len() > 1 << 20 {
                return Err("the text is longer than a file of rules may be".into());
            }
        }
        self.tag = tag;
        Ok(Some(text))
    }

    async fn follow(mut self, rules: Rules, every: Duration) {
        loop {
            tokio::time::sleep(every).await;
            match self.changed().await {
                Ok(Some(text)) => drop(rules.replace(text)), // observers get the problems
                Ok(None) => {}
                Err(error) => eprintln!("{}: {error}", self.url), // the rules stay
            }
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let url = std::env::args().nth(1).ok_or("name the URL of the rules")?;
    let mut source = Source::new(url);
    let rules = Rules::from_text(source.changed().await?.unwrap_or_default())?;
    let limit = rules.layer(MemoryLimiter::new())?;
    tokio::spawn(source.follow(rules, Duration::from_secs(10)));

    let app = Router::new().route("/", get(|| async { "hello\n" })).layer(limit);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use axum::response::IntoResponse;

    use super::*;

    #[tokio::test]
    async fn rules_follow_the_text_of_the_server() {
        let served = Arc::new(AtomicU64::new(5));
        let limit = served.clone();
        let answer = move |headers: http::HeaderMap| {
            let limit = limit.load(Ordering::Relaxed);
            let tag = format!("\"{limit}\"");
            let is_known = headers.get(IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes());
            let text = format!("rules: [{{name: a, quota: {limit} per hour, key: peer-ip}}]");
            std::future::ready(match is_known {
                true => StatusCode::NOT_MODIFIED.into_response(),
                false => ([(ETAG, tag)], text).into_response(),
            })
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let url = format!("http://{}/", listener.local_addr().expect("it is bound"));
        tokio::spawn(axum::serve(listener, Router::new().route("/", get(answer))).into_future());

        let mut source = Source::new(url);
        let text = source.changed().await.expect("the server answers").expect("it is new");
        assert_eq!(source.changed().await.expect("the server answers"), None, "the tag is known");
        let rules = Rules::from_text(text).expect("the text has rules");
        let layer = rules.layer(MemoryLimiter::new()).expect("memory supports the quota");
        tokio::spawn(source.follow(rules, Duration::from_millis(10)));
        for wanted in [5, 7] {
            served.store(wanted, Ordering::Relaxed);
            while layer.policies()[0].quota().limit() != wanted {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
}
