//! The meaning of the headers of real servers.
//!
//! Each row names the page that documents the headers. Where the page has an example, the row has
//! its values, with a `Date` half a minute before the reset. Other values were made up in the
//! documented form.

use super::*;

struct Row {
    server: &'static str,
    source: &'static str,
    headers: &'static str,
    policies: &'static [&'static str],
    wait: Option<f64>,
}

/// Rows are written as `row(server, source, headers, policies, wait)`.
const fn row(
    server: &'static str,
    source: &'static str,
    headers: &'static str,
    policies: &'static [&'static str],
    wait: Option<f64>,
) -> Row {
    Row { server, source, headers, policies, wait }
}

#[rustfmt::skip]
const ROWS: &[Row] = &[
    row("GitHub", "docs.github.com/en/rest/using-the-rest-api/rate-limits-for-the-rest-api",
        "date: Tue, 16 Jan 2024 16:00:00 GMT
         x-ratelimit-limit: 5000
         x-ratelimit-remaining: 4987
         x-ratelimit-reset: 1705422600
         x-ratelimit-used: 13
         x-ratelimit-resource: core",
        &["core: 4987/5000, reset 1800s"], None),
    row("GitHub, exhausted", "docs.github.com/en/rest/using-the-rest-api/rate-limits-for-the-rest-api",
        "x-ratelimit-limit: 60
         x-ratelimit-remaining: 0
         x-ratelimit-reset: 1705422600
         x-ratelimit-used: 60
         x-ratelimit-resource: search",
        &["search: 0/60, reset 1800s"], Some(1800.0)),
    row("GitHub, secondary limit", "docs.github.com/en/rest/using-the-rest-api/rate-limits-for-the-rest-api",
        "retry-after: 60
         x-ratelimit-limit: 5000
         x-ratelimit-remaining: 4900
         x-ratelimit-reset: 1705422600",
        &["4900/5000, reset 1800s"], Some(60.0)),
    row("GitLab", "docs.gitlab.com/administration/settings/user_and_ip_rate_limits",
        "RateLimit-Limit: 60
         RateLimit-Name: throttle_authenticated_web
         RateLimit-Observed: 67
         RateLimit-Remaining: 0
         RateLimit-Reset: 1705420830
         RateLimit-ResetTime: Tue, 16 Jan 2024 16:00:30 GMT
         Retry-After: 30",
        &["throttle_authenticated_web: 0/60, reset 30s"], Some(30.0)),
    row("Discord", "docs.discord.com/developers/topics/rate-limits",
        "X-RateLimit-Limit: 5
         X-RateLimit-Remaining: 0
         X-RateLimit-Reset: 1470173023
         X-RateLimit-Reset-After: 1
         X-RateLimit-Bucket: abcd1234",
        &["abcd1234: 0/5, reset 1s"], Some(1.0)),
    row("Discord, refused", "docs.discord.com/developers/topics/rate-limits",
        "Retry-After: 65
         X-RateLimit-Limit: 10
         X-RateLimit-Remaining: 0
         X-RateLimit-Reset: 1470173023.123
         X-RateLimit-Reset-After: 64.57
         X-RateLimit-Bucket: abcd1234
         X-RateLimit-Scope: user",
        &["abcd1234: 0/10, reset 64.57s, of user"], Some(65.0)),
    row("Discord, global limit", "docs.discord.com/developers/topics/rate-limits",
        "Retry-After: 65
         X-RateLimit-Global: true
         X-RateLimit-Scope: global",
        &[], Some(65.0)),
    row("OpenAI", "platform.openai.com/docs/guides/rate-limits",
        "x-ratelimit-limit-requests: 60
         x-ratelimit-limit-tokens: 150000
         x-ratelimit-remaining-requests: 59
         x-ratelimit-remaining-tokens: 149984
         x-ratelimit-reset-requests: 1s
         x-ratelimit-reset-tokens: 6m0s",
        &["requests: 59/60, reset 1s, unit requests", "tokens: 149984/150000, reset 360s, unit tokens"], None),
    row("OpenAI, usage based", "community.openai.com/t/how-to-get-rate-limit-reset-time-for-response-api/1268905",
        "x-ratelimit-limit-requests: 5000
         x-ratelimit-limit-tokens_usage_based: 160000
         x-ratelimit-remaining-requests: 4999
         x-ratelimit-remaining-tokens_usage_based: 159976
         x-ratelimit-reset-requests: 12ms
         x-ratelimit-reset-tokens_usage_based: 9ms",
        &["requests: 4999/5000, reset 12ms, unit requests", "tokens_usage_based: 159976/160000, reset 9ms"], None),
    row("Azure OpenAI", "github.com/Azure/azure-openai-benchmark/issues/31",
        "retry-after: 1
         retry-after-ms: 1370",
        &[], Some(1.37)),
    row("Azure OpenAI, numbers below zero", "github.com/openai/openai-dotnet/issues/838",
        "x-ratelimit-limit-tokens: -1
         x-ratelimit-remaining-tokens: -1
         x-ratelimit-reset-tokens: 0",
        &["tokens: ?/?, reset 0ns, unit tokens"], None),
    row("Azure OpenAI, two spellings", "github.com/openai/openai-python/issues/937",
        "x-rate-limit-reset-tokens: 55
         x-ratelimit-remaining-tokens: 0
         x-ratelimit-remaining-requests: 8",
        &["requests: 8/?, unit requests", "tokens: 0/?, reset 55s, unit tokens"], Some(55.0)),
    row("Anthropic", "docs.anthropic.com/en/api/rate-limits",
        "anthropic-ratelimit-requests-limit: 4000
         anthropic-ratelimit-requests-remaining: 3999
         anthropic-ratelimit-requests-reset: 2024-01-16T16:00:01Z
         anthropic-ratelimit-input-tokens-limit: 400000
         anthropic-ratelimit-input-tokens-remaining: 0
         anthropic-ratelimit-input-tokens-reset: 2024-01-16T16:00:17Z",
        &["input-tokens: 0/400000, reset 17s, unit tokens", "requests: 3999/4000, reset 1s, unit requests"],
        Some(17.0)),
    row("Groq", "console.groq.com/docs/rate-limits",
        "retry-after: 2
         x-ratelimit-limit-requests: 14400
         x-ratelimit-limit-tokens: 18000
         x-ratelimit-remaining-requests: 14370
         x-ratelimit-remaining-tokens: 17997
         x-ratelimit-reset-requests: 2m59.56s
         x-ratelimit-reset-tokens: 7.66s",
        &["requests: 14370/14400, reset 179.56s, unit requests", "tokens: 17997/18000, reset 7.66s, unit tokens"],
        Some(2.0)),
    row("X", "docs.x.com/x-api/fundamentals/rate-limits",
        "x-rate-limit-limit: 900
         x-rate-limit-remaining: 0
         x-rate-limit-reset: 1705421700",
        &["0/900, reset 900s"], Some(900.0)),
    row("Twitch", "dev.twitch.tv/docs/api/guide",
        "date: Tue, 21 Nov 2017 16:44:40 GMT
         Ratelimit-Limit: 30
         Ratelimit-Remaining: 29
         Ratelimit-Reset: 1511282710",
        &["29/30, reset 30s"], None),
    row("Reddit", "support.reddithelp.com/hc/en-us/articles/16160319875092",
        "X-Ratelimit-Used: 7
         X-Ratelimit-Remaining: 593.0
         X-Ratelimit-Reset: 311",
        &["593/600, reset 311s"], None),
    row("Shopify", "shopify.dev/docs/api/admin-rest/usage/rate-limits",
        "X-Shopify-Shop-Api-Call-Limit: 40/40
         Retry-After: 2.0",
        &["0/40, unit requests"], Some(2.0)),
    row("Vimeo", "developer.vimeo.com/guidelines/rate-limiting",
        "X-RateLimit-Limit: 100
         X-RateLimit-Remaining: 0
         X-RateLimit-Reset: 2024-01-16T16:01:00+00:00",
        &["0/100, reset 60s"], Some(60.0)),
    row("Vimeo, formerly", "developer.vimeo.com/guidelines/rate-limiting (2013)",
        "date: Mon, 20 May 2013 13:59:27 GMT
         X-RateLimit-Limit: 7500
         X-RateLimit-Remaining: 7499
         X-RateLimit-Reset: 1369058397",
        &["7499/7500, reset 30s"], None),
    row("Linear", "linear.app/developers/rate-limiting",
        "X-RateLimit-Requests-Limit: 1500
         X-RateLimit-Requests-Remaining: 1499
         X-RateLimit-Requests-Reset: 1705424400000
         X-RateLimit-Complexity-Limit: 250000
         X-RateLimit-Complexity-Remaining: 0
         X-RateLimit-Complexity-Reset: 1705420801500
         X-Complexity: 12",
        &["complexity: 0/250000, reset 1.5s", "requests: 1499/1500, reset 3600s, unit requests"], Some(1.5)),
    row("Cloudflare's API", "developers.cloudflare.com/fundamentals/api/reference/limits",
        r#"Ratelimit: "default";r=50;t=30
         Ratelimit-Policy: "burst";q=100;w=60"#,
        &["burst: ?/100 per 60s", "default: 50/?, reset 30s"], None),
    row("Envoy", "envoyproxy.io, XRateLimitHeadersRFCVersion",
        r#"x-ratelimit-limit: 10, 10;w=1;name="per-ip", 1000;w=3600;name="per-path"
         x-ratelimit-remaining: 0
         x-ratelimit-reset: 1"#,
        &["0/10 per 1s, reset 1s", "?/1000 per 3600s"], Some(1.0)),
    row("Kong", "developer.konghq.com/plugins/rate-limiting",
        "RateLimit-Limit: 6
         RateLimit-Remaining: 4
         RateLimit-Reset: 47
         X-RateLimit-Limit-Second: 5
         X-RateLimit-Remaining-Second: 4
         X-RateLimit-Limit-Hour: 10000
         X-RateLimit-Remaining-Hour: 9998",
        &["4/6, reset 47s", "hour: 9998/10000 per 3600s", "second: 4/5 per 1s"], None),
    row("Traefik", "github.com/traefik/traefik, pkg/middlewares/ratelimiter",
        "Retry-After: 1
         X-Retry-In: 333.333334ms",
        &[], Some(1.0)),
    row("tower_governor", "github.com/benwis/tower-governor",
        "x-ratelimit-limit: 5
         x-ratelimit-remaining: 0
         x-ratelimit-after: 3
         retry-after: 3",
        &["0/5, reset 3s"], Some(3.0)),
    row("express-rate-limit, draft 8", "express-rate-limit.mintlify.app/reference/configuration",
        r#"RateLimit-Policy: "100-in-15min"; q=100; w=900; pk=:ZDIwZjM2YWY2NDBi:
         RateLimit: "100-in-15min"; r=99; t=900"#,
        &["100-in-15min: 99/100 per 900s, reset 900s, of d20f36af640b"], None),
    row("express-rate-limit, legacy and draft 6", "express-rate-limit.mintlify.app/reference/configuration",
        "Date: Tue, 16 Jan 2024 16:00:00 GMT
         X-RateLimit-Limit: 100
         X-RateLimit-Remaining: 99
         X-RateLimit-Reset: 1705421700
         RateLimit-Policy: 100;w=900
         RateLimit-Limit: 100
         RateLimit-Remaining: 99
         RateLimit-Reset: 900",
        &["99/100 per 900s, reset 900s", "99/100, reset 900s"], None),
    row("throttled (Go)", "github.com/throttled/throttled/issues/55",
        "Retry-After: 1
         X-Ratelimit-Limit: 6
         X-Ratelimit-Remaining: 0
         X-Ratelimit-Reset: 6",
        &["0/6, reset 6s"], Some(1.0)),
    row("bucket4j", "github.com/MarcGiffing/bucket4j-spring-boot-starter",
        "X-Rate-Limit-Remaining: 0
         X-Rate-Limit-Retry-After-Seconds: 8",
        &["0/?"], Some(8.0)),
    row("rack-attack's example", "github.com/rack/rack-attack",
        "RateLimit-Limit: 300
         RateLimit-Remaining: 0
         RateLimit-Reset: 1705420860",
        &["0/300, reset 60s"], Some(60.0)),
    row("AWS, Selling Partner API", "developer-docs.amazon.com/sp-api/docs/usage-plans-and-rate-limits",
        "x-amzn-RateLimit-Limit: 0.5",
        &[], None),
    row("Amazon, Alexa", "github.com/express-rate-limit/ratelimit-header-parser, source/parsers/non-standard.ts",
        "X-RateLimit-Max: 10
         X-RateLimit-Remaining: 0
         X-RateLimit-ResetsOn: 1705420810",
        &["0/10, reset 10s"], Some(10.0)),
    row("Azure Resource Manager", "learn.microsoft.com/en-us/azure/azure-resource-manager/management/request-limits-and-throttling",
        "x-ms-ratelimit-remaining-subscription-reads: 11999
         x-ms-ratelimit-remaining-resource: Microsoft.Compute/GetVMScaleSet3Min;197,Microsoft.Compute/GetVMScaleSet30Min;1297",
        &["subscription-reads: 11999/?"], None),
    row("Azure Cosmos DB", "learn.microsoft.com/en-us/rest/api/cosmos-db/common-cosmosdb-rest-response-headers",
        "x-ms-retry-after-ms: 9",
        &[], Some(0.009)),
    row("Azure DevOps", "learn.microsoft.com/en-us/azure/devops/integrate/concepts/rate-limits",
        "Retry-After: 10
         X-RateLimit-Resource: core
         X-RateLimit-Delay: 0.125
         X-RateLimit-Limit: 200
         X-RateLimit-Remaining: 0
         X-RateLimit-Reset: 1705421100",
        &["core: 0/200, reset 300s"], Some(10.0)),
    row("Stripe", "docs.stripe.com/rate-limits",
        "Stripe-Rate-Limited-Reason: global-rate
         Stripe-Should-Retry: true",
        &[], None),
    row("Slack", "docs.slack.dev/apis/web-api/rate-limits",
        "Retry-After: 30",
        &[], Some(30.0)),
    row("Okta", "developer.okta.com/docs/reference/rl-best-practices",
        "Date: Thu, 31 Dec 2020 23:59:30 GMT
         X-Rate-Limit-Limit: 1200
         X-Rate-Limit-Remaining: 1199
         X-Rate-Limit-Reset: 1609459200",
        &["1199/1200, reset 30s"], None),
    row("Docker Hub", "docs.docker.com/docker-hub/usage/pulls",
        "ratelimit-limit: 100;w=21600
         ratelimit-remaining: 20;w=21600
         docker-ratelimit-source: 192.0.2.1",
        &["20/100 per 21600s"], None),
    row("Hugging Face", "huggingface.co/docs/hub/rate-limits",
        r#"RateLimit: "api";r=0;t=55
         RateLimit-Policy: "fixed window";"api";q=500;w=300"#,
        &["api: 0/?, reset 55s"], Some(55.0)),
    row("PyPI", "a response of pypi.org",
        r#"ratelimit-policy: "project.create.user";q=4;w=86400;pk=:user:
         ratelimit: "project.create.user";r=3;t=86400"#,
        &["project.create.user: 3/4 per 86400s, reset 86400s, of \\xba\\xc7\\xab"], None),
    row("npm", "docs.npmjs.com/policies/open-source-terms, by Cloudflare's rules",
        "Retry-After: 58",
        &[], Some(58.0)),
    row("Atlassian, Jira Cloud", "community.developer.atlassian.com/t/2026-point-based-rate-limits/97828",
        r#"Beta-Ratelimit-Policy: "tenant-app-quota";q=100100;w=3600
         Beta-Ratelimit: "tenant-app-quota";r=17842;t=2107
         X-Beta-Ratelimit-Reason: jira-quota-tenant-based
         X-Beta-Ratelimit-Nearlimit: true
         X-Ratelimit-Limit: 350
         X-Ratelimit-Remaining: 349"#,
        &["349/350", "tenant-app-quota: 17842/100100 per 3600s, reset 2107s"], None),
    row("Atlassian, Jira Cloud, exhausted", "community.developer.atlassian.com/t/2026-point-based-rate-limits/97828",
        r#"Beta-Ratelimit: "tenant-app-quota";r=0;t=2788
         X-Beta-Ratelimit-Reset: 2024-01-16T17:00Z
         X-Ratelimit-Limit: 400
         X-Ratelimit-Remaining: 399"#,
        &["399/400", "?/?, reset 3600s", "tenant-app-quota: 0/?, reset 2788s"], Some(2788.0)),
    row("Atlassian, Data Center", "confluence.atlassian.com, _RateLimiting_HTTPheaders",
        "X-RateLimit-Limit: 100
         X-RateLimit-Remaining: 99
         X-RateLimit-Interval-Seconds: 60
         X-RateLimit-FillRate: 10
         retry-after: 0",
        &["99/100 per 60s"], None),
    row("HubSpot", "developers.hubspot.com/docs/developer-tooling/platform/usage-guidelines",
        "X-HubSpot-RateLimit-Daily: 250000
         X-HubSpot-RateLimit-Daily-Remaining: 249999
         X-HubSpot-RateLimit-Interval-Milliseconds: 10000
         X-HubSpot-RateLimit-Max: 100
         X-HubSpot-RateLimit-Remaining: 0",
        &["0/100 per 10s", "daily: 249999/250000 per 86400s"], None),
    row("HubSpot, formerly", "developers.hubspot.com/changelog, 6 November 2018",
        "X-HubSpot-RateLimit-Secondly: 10
         X-HubSpot-RateLimit-Secondly-Remaining: 9",
        &["secondly: 9/10 per 1s"], None),
    row("Zendesk", "developer.zendesk.com/documentation/api-basics/best-practices/best-practices-for-avoiding-rate-limiting",
        "x-rate-limit: 700
         ratelimit-limit: 700
         x-rate-limit-remaining: 699
         ratelimit-remaining: 699
         ratelimit-reset: 41
         zendesk-ratelimit-tickets-index: total=100; remaining=0; resets=41",
        &["699/700", "699/700, reset 41s", "tickets-index: 0/100, reset 41s"], Some(41.0)),
    row("SendGrid", "twilio.com/docs/sendgrid/api-reference/how-to-use-the-sendgrid-v3-api/rate-limits",
        "Date: Wed, 19 Feb 2014 13:07:13 GMT
         X-RateLimit-Limit: 150
         X-RateLimit-Remaining: 0
         X-RateLimit-Reset: 1392815263",
        &["0/150, reset 30s"], Some(30.0)),
    row("Brevo", "developers.brevo.com/docs/limit-headers",
        "x-sib-ratelimit-limit: 1000
         x-sib-ratelimit-remaining: 0
         x-sib-ratelimit-reset: 12",
        &["0/1000, reset 12s"], Some(12.0)),
    row("Resend", "resend.com/docs/api-reference/rate-limit",
        "ratelimit-limit: 2
         ratelimit-remaining: 0
         ratelimit-reset: 1
         retry-after: 1",
        &["0/2, reset 1s"], Some(1.0)),
    row("MailerLite", "developers-classic.mailerlite.com/docs/api-rate-limits",
        "X-RateLimit-Limit: 60
         X-RateLimit-Remaining: 0
         X-RateLimit-Retry-After: 59",
        &["0/60"], Some(59.0)),
    row("Figma", "developers.figma.com/docs/rest-api/rate-limits",
        "Retry-After: 12
         X-Figma-Plan-Tier: pro
         X-Figma-Rate-Limit-Type: low",
        &[], Some(12.0)),
    row("Notion", "developers.notion.com/reference/request-limits",
        "Retry-After: 60",
        &[], Some(60.0)),
    row("Airtable", "airtable.com/developers/web/api/rate-limits: waits are in the text only",
        "content-type: application/json",
        &[], None),
    row("Telegram", "core.telegram.org/bots/faq: `retry_after` is in the body",
        "content-type: application/json
         Retry-After: 35",
        &[], Some(35.0)),
    row("Spotify", "developer.spotify.com/documentation/web-api/concepts/rate-limits",
        "retry-after: 3",
        &[], Some(3.0)),
    row("Google Cloud Storage", "cloud.google.com/storage/docs/retry-strategy",
        "Retry-After: Tue, 16 Jan 2024 16:00:05 GMT",
        &[], Some(5.0)),
    row("Akamai", "techdocs.akamai.com/adaptive-media-delivery/reference/rate-limiting",
        "X-RateLimit-Limit: 60
         X-RateLimit-Remaining: 0
         X-RateLimit-Next: 2024-01-16T16:00:01.500Z",
        &["0/60, reset 1.5s"], Some(1.5)),
    row("Sentry", "docs.sentry.io/api/ratelimits",
        "X-Sentry-Rate-Limit-Limit: 40
         X-Sentry-Rate-Limit-Remaining: 39
         X-Sentry-Rate-Limit-Reset: 1705420801
         X-Sentry-Rate-Limit-ConcurrentLimit: 25
         X-Sentry-Rate-Limit-ConcurrentRemaining: 24
         X-Sentry-Rate-Limits: 60:error:organization",
        &["39/40, reset 1s", "concurrent: 24/25"], None),
    row("Strava", "developers.strava.com/docs/rate-limits",
        "X-Ratelimit-Limit: 600,30000
         X-Ratelimit-Usage: 692,29300",
        &["0/600"], None),
    row("Contentful", "contentful.com/developers/api-changes/content-delivery-api-and-graphql-api-response-header",
        "x-contentful-ratelimit-second-limit: 55
         x-contentful-ratelimit-second-remaining: 0
         x-contentful-ratelimit-reset: 1",
        &["?/?, reset 1s", "second: 0/55 per 1s"], None),
    row("Imgur", "apidocs.imgur.com",
        "X-RateLimit-UserLimit: 500
         X-RateLimit-UserRemaining: 0
         X-RateLimit-UserReset: 1705424400
         X-RateLimit-ClientLimit: 12500
         X-RateLimit-ClientRemaining: 12499",
        &["client: 12499/12500", "user: 0/500, reset 3600s"], Some(3600.0)),
    row("Yelp", "docs.developer.yelp.com/docs/fusion-rate-limiting",
        "RateLimit-DailyLimit: 5000
         RateLimit-Remaining: 4031
         RateLimit-ResetTime: 2024-01-17T00:00:00+00:00",
        &["4031/?, reset 28800s", "daily: ?/5000 per 86400s"], None),
    row("Appwrite", "appwrite.io/docs/rate-limits",
        "Date: Mon, 01 Jul 2013 17:47:23 GMT
         X-RateLimit-Limit: 60
         X-RateLimit-Remaining: 56
         X-RateLimit-Reset: 1372700873",
        &["56/60, reset 30s"], None),
    row("Syntage", "docs.syntage.com/guides/api/rate-limiting",
        "Date: Sun, 29 Nov 2020 19:26:54 GMT
         X-RateLimit-Limit: 60
         X-RateLimit-Remaining: 0
         X-RateLimit-Reset: 1606678044",
        &["0/60, reset 30s"], Some(30.0)),
    row("WHOOP", "developer.whoop.com/docs/developing/rate-limiting",
        "X-RateLimit-Limit: 100, 100;window=60, 10000;window=86400
         X-RateLimit-Remaining: 98
         X-RateLimit-Reset: 3",
        &["98/100 per 60s, reset 3s", "?/10000 per 86400s"], None),
    row("lemlist, a date of JavaScript", "developer.lemlist.com/api-reference/getting-started/rate-limits",
        "Retry-After: 2
         X-RateLimit-Limit: 20
         X-RateLimit-Remaining: 7
         X-RateLimit-Reset: Tue Feb 16 2021 09:02:42 GMT+0100 (Central European Standard Time)",
        &["7/20"], Some(2.0)),
    row("Prisjakt, milliseconds from now, which are read as seconds", "developer.prisjakt.nu/docs/sections/rate-limit",
        "X-Rate-Limit-Limit: 10000
         X-Rate-Limit-Remaining: 0
         X-Rate-Limit-Reset: 600000",
        &["0/10000, reset 600000s"], Some(600_000.0)),
    row("IBM Verify", "ibm.com/docs/en/sva/11.0.3?topic=stanza-add-response-headers",
        "X-Rate-Limit-Policy: api
         X-Rate-Limit-Remaining: 5
         X-Rate-Limit-Reset: 1705420803",
        &["5/?, reset 3s"], None),
];

#[test]
fn vendors_headers_mean_what_their_documentation_says() {
    assert!(ROWS.len() >= 60);
    for Row { server, source, headers, policies, wait } in ROWS {
        let advice = read(headers);
        assert_eq!(in_short(&advice), *policies, "{server} ({source})");
        assert_eq!(advice.wait().duration(), wait.map(seconds), "{server} ({source})");
    }
}

/// Returns the headers of all rows.
pub(super) fn all() -> impl Iterator<Item = &'static str> {
    ROWS.iter().map(|row| row.headers)
}
