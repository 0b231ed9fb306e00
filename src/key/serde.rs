//! Trusted proxies and prefixes in configuration files (feature `serde`).

use std::fmt;

use ipnet::IpNet;
use serde_core::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_core::ser::{Serialize, SerializeMap, Serializer};

use super::prefixes::Prefixes;
use super::proxies::{ForwardingHeader, Trust, TrustedProxies};

const IPV4: &str = "ipv4";
const IPV6: &str = "ipv6";

const COUNT: &str = "count";
const NETWORKS: &str = "networks";
const FORWARDED: &str = "forwarded";
const SINGLE_HEADER: &str = "single-header";

/// Serializes prefixes as `{"ipv4": 32, "ipv6": 64}`.
impl Serialize for Prefixes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(2))?;
        map.serialize_entry(IPV4, &self.ipv4)?;
        map.serialize_entry(IPV6, &self.ipv6)?;
        map.end()
    }
}

/// Deserializes prefixes from `{"ipv4": 24, "ipv6": 48}`. A family that is omitted has its default.
impl<'de> Deserialize<'de> for Prefixes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PrefixesVisitor)
    }
}

struct PrefixesVisitor;

impl<'de> Visitor<'de> for PrefixesVisitor {
    type Value = Prefixes;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("prefixes, such as {ipv4: 32, ipv6: 64}")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Prefixes, A::Error> {
        let (mut ipv4, mut ipv6) = (None, None);
        while let Some(name) = map.next_key_seed(OneOf(&[IPV4, IPV6]))? {
            read_into(if name == IPV4 { &mut ipv4 } else { &mut ipv6 }, name, &mut map)?;
        }
        let prefixes = Prefixes::DEFAULT;
        let prefixes = prefixes.ipv4(ipv4.unwrap_or(prefixes.ipv4)).map_err(Error::custom)?;
        prefixes.ipv6(ipv6.unwrap_or(prefixes.ipv6)).map_err(Error::custom)
    }
}

/// Serializes trusted proxies with the fields from which they are deserialized.
impl Serialize for TrustedProxies {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map =
            serializer.serialize_map(Some(if self.field == ForwardingHeader::XForwardedFor { 1 } else { 2 }))?;
        match &self.trust {
            Trust::Count(count) => map.serialize_entry(COUNT, count)?,
            Trust::Networks(networks) => map.serialize_entry(NETWORKS, &Networks(networks))?,
        }
        match &self.field {
            ForwardingHeader::XForwardedFor => {}
            ForwardingHeader::Forwarded => map.serialize_entry(FORWARDED, &true)?,
            ForwardingHeader::Single(name) => map.serialize_entry(SINGLE_HEADER, name.as_str())?,
        }
        map.end()
    }
}

struct Networks<'a>(&'a [IpNet]);

impl Serialize for Networks<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(Network))
    }
}

struct Network<'a>(&'a IpNet);

impl Serialize for Network<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self.0)
    }
}

/// Deserializes trusted proxies from fields with the names of their constructors:
///
/// ```
/// use tower_ratelimit::key::TrustedProxies;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let one: TrustedProxies = serde_json::from_str(r#"{"count": 1}"#)?;
/// assert_eq!(one, TrustedProxies::count(1)?);
/// let known: TrustedProxies =
///     serde_json::from_str(r#"{"networks": ["10.0.0.0/8"], "forwarded": true}"#)?;
/// assert_eq!(known, TrustedProxies::networks(["10.0.0.0/8"])?.forwarded());
/// let cdn: TrustedProxies =
///     serde_json::from_str(r#"{"count": 1, "single-header": "cf-connecting-ip"}"#)?;
/// assert_eq!(cdn, TrustedProxies::count(1)?.single_header("cf-connecting-ip")?);
/// # Ok(()) }
/// ```
impl<'de> Deserialize<'de> for TrustedProxies {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ProxiesVisitor)
    }
}

struct ProxiesVisitor;

impl<'de> Visitor<'de> for ProxiesVisitor {
    type Value = TrustedProxies;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("trusted proxies, such as {count: 1} or {networks: [10.0.0.0/8]}")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<TrustedProxies, A::Error> {
        let (mut count, mut networks) = (None, None);
        let (mut forwarded, mut single_header) = (None, None);
        while let Some(name) = map.next_key_seed(OneOf(&[COUNT, NETWORKS, FORWARDED, SINGLE_HEADER]))? {
            match name {
                COUNT => read_into::<usize, _>(&mut count, name, &mut map)?,
                NETWORKS => read_into::<Texts, _>(&mut networks, name, &mut map)?,
                FORWARDED => read_into::<bool, _>(&mut forwarded, name, &mut map)?,
                _ => read_into::<OwnedText, _>(&mut single_header, name, &mut map)?,
            }
        }
        let proxies = match (count, networks) {
            (Some(count), None) => TrustedProxies::count(count),
            (None, Some(Texts(networks))) => TrustedProxies::networks(networks),
            (Some(_), Some(_)) => {
                return Err(Error::custom("`count` and `networks` exclude each other: leave one out"));
            }
            (None, None) => return Err(Error::custom("trusted proxies need either `count` or `networks`")),
        };
        let proxies = proxies.map_err(Error::custom)?;
        match (forwarded.unwrap_or(false), single_header) {
            (false, None) => Ok(proxies),
            (true, None) => Ok(proxies.forwarded()),
            (false, Some(OwnedText(name))) => proxies.single_header(&name).map_err(Error::custom),
            (true, Some(_)) => Err(Error::custom("`forwarded` and `single-header` exclude each other: leave one out")),
        }
    }
}

/// Reads a field, which may occur only once.
fn read_into<'de, T: Deserialize<'de>, A: MapAccess<'de>>(
    to: &mut Option<T>,
    name: &'static str,
    map: &mut A,
) -> Result<(), A::Error> {
    if to.is_some() {
        return Err(Error::duplicate_field(name));
    }
    *to = Some(map.next_value()?);
    Ok(())
}

/// Reads the name of one of these fields.
struct OneOf(&'static [&'static str]);

impl<'de> DeserializeSeed<'de> for OneOf {
    type Value = &'static str;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<&'static str, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for OneOf {
    type Value = &'static str;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "one of the fields {}", self.0.join(", "))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<&'static str, E> {
        let found = self.0.iter().find(|name| **name == text);
        found.copied().ok_or_else(|| E::unknown_field(text, self.0))
    }
}

/// A text. `String` implements `Deserialize` only with a feature of serde's.
struct OwnedText(String);

impl<'de> Deserialize<'de> for OwnedText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(TextVisitor)
    }
}

struct TextVisitor;

impl Visitor<'_> for TextVisitor {
    type Value = OwnedText;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<OwnedText, E> {
        Ok(OwnedText(text.to_owned()))
    }
}

struct Texts(Vec<String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(TextsVisitor)
    }
}

struct TextsVisitor;

impl<'de> Visitor<'de> for TextsVisitor {
    type Value = Texts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of networks, such as [10.0.0.0/8]")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Texts, A::Error> {
        let mut texts = Vec::new();
        while let Some(OwnedText(text)) = list.next_element()? {
            texts.push(text);
        }
        Ok(Texts(texts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn round_trip<T: Serialize + for<'de> Deserialize<'de> + PartialEq + fmt::Debug>(value: &T, text: &str) {
        assert_eq!(serde_json::to_string(value).unwrap(), text);
        assert_eq!(serde_json::from_str::<T>(text).unwrap(), *value);
    }

    #[test]
    fn prefixes_are_written_and_read() {
        let some = Prefixes::default().ipv4(24).unwrap().ipv6(48).unwrap();
        round_trip(&some, r#"{"ipv4":24,"ipv6":48}"#);
        round_trip(&Prefixes::exact(), r#"{"ipv4":32,"ipv6":128}"#);
        let read = |text: &str| serde_json::from_str::<Prefixes>(text).unwrap();
        assert_eq!(read("{}"), Prefixes::default());
        assert_eq!(read(r#"{"ipv6": 56}"#), Prefixes::default().ipv6(56).unwrap());
    }

    #[test]
    fn trusted_proxies_are_written_and_read() {
        let networks = || TrustedProxies::networks(["10.0.0.0/8", "fd00::1", "::ffff:192.0.2.0/120"]).unwrap();
        let listed = r#"{"networks":["10.0.0.0/8","fd00::1/128","192.0.2.0/24"]"#;
        round_trip(&TrustedProxies::count(2).unwrap(), r#"{"count":2}"#);
        round_trip(&TrustedProxies::count(2).unwrap().forwarded(), r#"{"count":2,"forwarded":true}"#);
        round_trip(&networks(), &format!("{listed}}}"));
        // A header that usually has a list of addresses can be named as a header of one address,
        // too.
        for name in ["x-real-ip", "x-forwarded-for", "forwarded"] {
            let single = networks().single_header(name).unwrap();
            round_trip(&single, &format!(r#"{listed},"single-header":"{name}"}}"#));
        }
        let off: TrustedProxies = serde_json::from_str(r#"{"count": 1, "forwarded": false}"#).unwrap();
        assert_eq!(off, TrustedProxies::count(1).unwrap());
    }

    #[test]
    fn errors_name_what_is_allowed() {
        fn error<T: for<'de> Deserialize<'de> + fmt::Debug>(text: &str) -> String {
            serde_json::from_str::<T>(text).unwrap_err().to_string()
        }
        for (text, expected) in [
            (r#"{"ipv7": 1}"#, "unknown field `ipv7`, expected `ipv4` or `ipv6`"),
            (r#"{"ipv4": 7}"#, "use 8 to 32"),
            (r#"{"ipv6": 129}"#, "use 32 to 128"),
            (r#"{"ipv4": 24, "ipv4": 24}"#, "duplicate field `ipv4`"),
            ("[]", "expected prefixes, such as {ipv4: 32, ipv6: 64}"),
        ] {
            assert!(error::<Prefixes>(text).contains(expected), "{}", error::<Prefixes>(text));
        }
        let fields = "expected one of `count`, `networks`, `forwarded`, `single-header`";
        for (text, expected) in [
            (r#"{"header": "x"}"#, fields),
            (r#"{"count": 0}"#, "use 1 to 64"),
            (r#"{"networks": ["proxy.local"]}"#, "is neither an address such as 192.0.2.1 nor a network"),
            (r#"{"networks": []}"#, "no trusted networks"),
            (r#"{"networks": "10.0.0.0/8"}"#, "expected a list of networks, such as [10.0.0.0/8]"),
            (r#"{"count": 1, "networks": ["::1"]}"#, "exclude each other"),
            (r#"{"forwarded": true}"#, "need either `count` or `networks`"),
            (r#"{"count": 1, "forwarded": true, "single-header": "x-real-ip"}"#, "exclude each other"),
            (r#"{"count": 2, "single-header": "x-real-ip"}"#, "the count of proxies can only be 1"),
            (r#"{"count": 1, "single-header": "not a name"}"#, "cannot be a header's name"),
            ("1", "expected trusted proxies, such as {count: 1} or {networks: [10.0.0.0/8]}"),
        ] {
            assert!(error::<TrustedProxies>(text).contains(expected), "{}", error::<TrustedProxies>(text));
        }
    }
}
