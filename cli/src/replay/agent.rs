//! Tells crawlers, programs and browsers apart by their user agents.

/// Parts of the user agents of crawlers, of libraries and of command-line programs, in lower case. Many crawlers
/// write a URL into it, for operators who look at logs.
const AUTOMATED: &[&str] = &[
    "bot",
    "crawl",
    "spider",
    "slurp",
    "scrap",
    "scan",
    "fetch",
    "headless",
    "http://",
    "https://",
    "curl/",
    "wget",
    "python",
    "aiohttp",
    "httpx",
    "go-http-client",
    "java/",
    "httpclient",
    "libwww",
    "perl",
    "ruby",
    "guzzle",
    "node",
    "axios",
    "postman",
    "powershell",
];

/// Returns whether a user agent names a crawler or a script, or is missing. A crawler may also call itself a browser.
pub(crate) fn is_automated(agent: &str) -> bool {
    // A maker of phones has a crawler's name.
    let agent = agent.to_ascii_lowercase().replace("cubot", "");
    agent.is_empty() || AUTOMATED.iter().any(|part| agent.contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crawlers_and_scripts_are_automated() {
        for agent in [
            "",
            "Mozilla/5.0 (compatible; Googlebot/2.1; +http://www.google.com/bot.html)",
            "Mozilla/5.0 (Macintosh) AppleWebKit/605.1.15 (Applebot/0.1)",
            "curl/8.5.0",
            "python-requests/2.31.0",
            "Go-http-client/2.0",
            "Mozilla/5.0 (X11; Linux x86_64) HeadlessChrome/120.0.0.0",
        ] {
            assert!(is_automated(agent), "{agent}");
        }
        for agent in [
            "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/120.0.0.0 Safari/537.36",
            "Mozilla/5.0 (Linux; Android 9; CUBOT_X19) AppleWebKit/537.36",
            "okhttp/4.12.0",
        ] {
            assert!(!is_automated(agent), "{agent}");
        }
    }
}
