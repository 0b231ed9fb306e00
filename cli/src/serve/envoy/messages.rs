//! The messages of `envoy/service/ratelimit/v3/rls.proto` and `envoy/extensions/common/ratelimit/v3/ratelimit.proto`,
//! without the fields that this service neither reads nor writes.

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct RateLimitRequest {
    #[prost(string, tag = "1")]
    pub(crate) domain: String,
    #[prost(message, repeated, tag = "2")]
    pub(crate) descriptors: Vec<RateLimitDescriptor>,
    #[prost(uint32, tag = "3")]
    pub(crate) hits_addend: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct RateLimitDescriptor {
    #[prost(message, repeated, tag = "1")]
    pub(crate) entries: Vec<Entry>,
    #[prost(message, optional, tag = "2")]
    pub(crate) limit: Option<RateLimitOverride>,
    #[prost(message, optional, tag = "3")]
    pub(crate) hits_addend: Option<UInt64Value>,
    #[prost(bool, tag = "4")]
    pub(crate) is_negative_hits: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Entry {
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    #[prost(string, tag = "2")]
    pub(crate) value: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct RateLimitOverride {
    #[prost(uint32, tag = "1")]
    pub(crate) requests_per_unit: u32,
    #[prost(int32, tag = "2")]
    pub(crate) unit: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct UInt64Value {
    #[prost(uint64, tag = "1")]
    pub(crate) value: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct RateLimitResponse {
    #[prost(int32, tag = "1")]
    pub(crate) overall_code: i32,
    #[prost(message, repeated, tag = "2")]
    pub(crate) statuses: Vec<DescriptorStatus>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) response_headers_to_add: Vec<HeaderValue>,
    /// The body of the response to a client that is over the limit.
    #[prost(bytes = "vec", tag = "5")]
    pub(crate) raw_body: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct DescriptorStatus {
    #[prost(int32, tag = "1")]
    pub(crate) code: i32,
    #[prost(message, optional, tag = "2")]
    pub(crate) current_limit: Option<RateLimit>,
    #[prost(uint32, tag = "3")]
    pub(crate) limit_remaining: u32,
    #[prost(message, optional, tag = "4")]
    pub(crate) duration_until_reset: Option<Duration>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct RateLimit {
    #[prost(uint32, tag = "1")]
    pub(crate) requests_per_unit: u32,
    #[prost(int32, tag = "2")]
    pub(crate) unit: i32,
    #[prost(string, tag = "3")]
    pub(crate) name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Duration {
    #[prost(int64, tag = "1")]
    pub(crate) seconds: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HeaderValue {
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    #[prost(string, tag = "2")]
    pub(crate) value: String,
}
