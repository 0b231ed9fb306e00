//! A limiter as people write it by hand: a token bucket in a hash, four numbers as the answer, one script per check,
//! through redis-rs.

use std::sync::Arc;

use redis::Script;

use super::contender::{Connecting, RedisContender, remote};

pub struct Textbook;

const SCRIPT: &str = r"
local rate, burst, cost = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local state = redis.call('HMGET', KEYS[1], 'tokens', 'at')
local tokens, at = tonumber(state[1]) or burst, tonumber(state[2]) or now
tokens = math.min(burst, tokens + math.max(0, now - at) * rate)
local allowed = 0
if tokens >= cost then
  tokens, allowed = tokens - cost, 1
end
redis.call('HSET', KEYS[1], 'tokens', tokens, 'at', now)
redis.call('PEXPIRE', KEYS[1], math.ceil(burst / rate * 1000))
local retry = allowed == 1 and 0 or math.ceil((cost - tokens) / rate * 1000)
return {allowed, math.floor(tokens), retry, math.ceil((burst - tokens) / rate * 1000)}
";

impl RedisContender for Textbook {
    fn name(&self) -> &'static str {
        "a textbook script"
    }

    fn connect<'a>(&'a self, url: &'a str, denied: bool) -> Connecting<'a> {
        Box::pin(async move {
            let client = redis::Client::open(url).expect("a good URL");
            let connection = client.get_connection_manager().await.expect("the server is there");
            let script = Arc::new(Script::new(SCRIPT));
            let (rate, burst) = if denied { (1.0 / 3_600.0, 1) } else { (1_000_000.0, 1_000_000) };
            remote(move |key| {
                let (mut connection, script) = (connection.clone(), Arc::clone(&script));
                async move {
                    let mut call = script.key(format!("textbook:{key}"));
                    let call = call.arg(rate).arg(burst).arg(1);
                    let answer: [i64; 4] = call.invoke_async(&mut connection).await.expect("the server answers");
                    answer[0] == 1
                }
            })
        })
    }
}
