//! The vectors that are not replayed, each with its reason.

/// A vector that is not replayed.
pub(crate) struct LeftOut {
    pub(crate) id: &'static str,
    pub(crate) why: Why,
    pub(crate) reason: &'static str,
}

/// The reason for which a vector is left out.
pub(crate) enum Why {
    /// It replays up to this step, counted from 0, whose field deliberately differs here.
    Differs { step: usize, field: &'static str },
    /// It needs a feature that this crate's limiters do not have.
    NotHere,
}

const fn differs(id: &'static str, step: usize, field: &'static str, reason: &'static str) -> LeftOut {
    LeftOut { id, why: Why::Differs { step, field }, reason }
}

const fn not_here(id: &'static str, reason: &'static str) -> LeftOut {
    LeftOut { id, why: Why::NotHere, reason }
}

const KEEPS_USED: &str = "the source keeps the available tokens when a quota is changed; here the used amount is kept, so \
                          that a larger quota is larger at once";
const GIVES_BACK_UNDRAINED: &str = "the source takes off what was reserved after the cancelled one, and gives nothing back \
                                    once its time has come; here a refund gives back what has not yet drained";
const NEVER_IS_NEVER: &str = "the source tells a wait for a cost above the capacity, after which it is denied again; here \
                              no wait is told";
const TOLD_AS_IT_IS: &str = "the source says 0 remaining whenever it denies; here what remains is told as it is";
const OF_A_STORE: &str = "it is about a store's own counters, keys and expiry, which no answer of a limiter shows";

/// Every vector that is not replayed and is no property.
pub(crate) const LEFT_OUT: &[LeftOut] = &[
    // Oracles
    differs("tb-bucket4j-replace-as-is", 2, "remaining", KEEPS_USED),
    differs("tb-bucket4j-replace-intervally", 2, "remaining", KEEPS_USED),
    differs("tb-xtime-cancel-too-late", 3, "act_at_ms", GIVES_BACK_UNDRAINED),
    differs("tb-xtime-cancel-0", 4, "act_at_ms", GIVES_BACK_UNDRAINED),
    differs("tb-xtime-cancel-multi", 6, "act_at_ms", GIVES_BACK_UNDRAINED),
    differs("fw-rlf-block", 0, "retry_after_ms_min", NEVER_IS_NEVER),
    // Adapters
    differs("gcra-redis_rate-allow", 5, "retry_after_ms", NEVER_IS_NEVER),
    differs("gcra-redis_rate-at-most", 6, "retry_after_ms", NEVER_IS_NEVER),
    differs("gcra-redis-gcra-299-2", 1, "remaining", TOLD_AS_IT_IS),
    differs("gcra-redis-gcra-table", 7, "remaining", TOLD_AS_IT_IS),
    differs(
        "gubernator-drain",
        2,
        "remaining",
        "a denied request empties the bucket there, by choice; here it changes nothing",
    ),
    differs(
        "leaky-resty-uncommit",
        2,
        "delay_ms",
        "the very first request cannot be undone there, since the excess it leaves is 0; here it is given back in full",
    ),
    differs("sws-dotnet-zero", 3, "allowed", "cost 0 is denied there when nothing is left; here cost 0 looks"),
    differs(
        "tb-xtime-jump-backwards",
        1,
        "tokens_before",
        "a clock that steps back earns the same time twice there; here it earns nothing until it is where it was",
    ),
    not_here(
        "fw-rlf-bursty",
        "a second quota that is asked only when the first denies; here the quotas of a request must all hold",
    ),
    not_here("fw-gubernator-negative", "units given back that nobody took; here a receipt gives back what it took"),
    not_here("tb-bucket4j-force-add", "credit above what was taken, and above the capacity; here nothing gives any"),
    not_here("fw-envoy-metrics", OF_A_STORE),
    not_here("fw-envoy-local-cache", OF_A_STORE),
    not_here("fw-envoy-jitter", OF_A_STORE),
    // Properties
    not_here("gcra-redis-native-ttl-ceil", OF_A_STORE),
    not_here(
        "leaky-uber-per",
        "its two rows count the request at the edge in one case and not in the other, by the order of a mock clock",
    ),
    // Quirks
    differs(
        "fw-throttled-py",
        3,
        "count",
        "denied requests are counted beyond the limit there; here they are not counted",
    ),
    differs(
        "multi-symfony-compound",
        2,
        "remaining",
        "a request that one limit denies is charged to the others there; here all are taken or none, and a test of \
         its own replays what the source's calls then give",
    ),
];
