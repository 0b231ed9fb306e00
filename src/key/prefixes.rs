//! Prefixes, which say how many bits of an address make its key.

use crate::error::{ConfigError, ConfigErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Says how many leading bits of an IPv4 and of an IPv6 address make its key.
///
/// The default is all 32 bits of IPv4 and 64 bits of IPv6. A single customer has at least a /64 with
/// 2^64 addresses, so a limit for each IPv6 address would have no effect. Many customers have a /56 or
/// a /48. To limit such customers, add a second, larger quota with `Prefixes::default().ipv6(48)?` to
/// the layer.
///
/// Some IPv6 addresses stand for IPv4 addresses:
///
/// | address | is grouped as |
/// |---|---|
/// | IPv4-mapped, `::ffff:192.0.2.1` | the IPv4 address |
/// | NAT64 (RFC 6052), `64:ff9b::192.0.2.1` | the IPv4 address in it, but stays IPv6: whole by default, not by its /64, which is all of IPv4 |
/// | NAT64 with a prefix of your own, 6to4 (`2002::/16`), Teredo (`2001::/32`), `::192.0.2.1` | IPv6 |
///
/// The addresses in the last row are not unwrapped, because the sender may not own the IPv4 address in
/// them, or because the position of the IPv4 address is unknown. Clients that share a Teredo server or
/// a NAT64 of your own share a key.
///
/// With the feature `serde`, prefixes are read and written as `{ipv4: 32, ipv6: 64}`.
///
/// ```
/// use tower_ratelimit::key::Prefixes;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let prefixes = Prefixes::default();
/// assert_eq!(
///     prefixes.group("2001:db8:1:2:3::4".parse()?),
///     "2001:db8:1:2::".parse::<std::net::IpAddr>()?
/// );
/// assert_eq!(
///     prefixes.group("::ffff:192.0.2.1".parse()?),
///     "192.0.2.1".parse::<std::net::IpAddr>()?
/// );
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prefixes {
    pub(super) ipv4: u8,
    pub(super) ipv6: u8,
}

impl Prefixes {
    pub(super) const DEFAULT: Self = Self { ipv4: 32, ipv6: 64 };

    /// Counts every address separately, for networks in which each client has only one address.
    #[must_use]
    pub const fn exact() -> Self {
        Self { ipv4: 32, ipv6: 128 }
    }

    /// Sets the length of the prefix by which IPv4 addresses are grouped, in bits.
    ///
    /// # Errors
    /// Returns an error if `bits` is less than 8 or more than 32.
    pub fn ipv4(self, bits: u8) -> Result<Self, ConfigError> {
        Ok(Self { ipv4: within("IPv4", 8, bits, 32)?, ..self })
    }

    /// Sets the length of the prefix by which IPv6 addresses are grouped, in bits.
    ///
    /// # Errors
    /// Returns an error if `bits` is less than 32 (an Internet provider's whole network) or more than
    /// 128.
    pub fn ipv6(self, bits: u8) -> Result<Self, ConfigError> {
        Ok(Self { ipv6: within("IPv6", 32, bits, 128)?, ..self })
    }

    /// Returns the first address of the group to which `address` belongs. The first address of the
    /// group makes the key.
    #[inline] // a call would take longer than its answer
    #[must_use]
    pub fn group(&self, address: IpAddr) -> IpAddr {
        match canonical(address) {
            IpAddr::V4(address) => IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() & u32::MAX << (32 - self.ipv4))),
            IpAddr::V6(address) => {
                let bits = if embedded_ipv4(address).is_some() { 96 + self.ipv4 } else { self.ipv6 };
                IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & u128::MAX << (128 - bits)))
            }
        }
    }
}

fn within(family: &str, least: u8, bits: u8, most: u8) -> Result<u8, ConfigError> {
    if (least..=most).contains(&bits) {
        return Ok(bits);
    }
    let message = format!("an {family} prefix cannot have {bits} bits: use {least} to {most}");
    Err(ConfigError::new(ConfigErrorKind::Range, message))
}

/// Returns an IPv4 address that is mapped into IPv6 (`::ffff:0:0/96`, RFC 4291 section 2.5.5.2) as IPv4.
///
/// This function does the same as [`IpAddr::to_canonical`], but with integers. If the bytes were written one by one,
/// hashing the key would stall on store forwarding (`benches/instructions`, "layer, allowed, no header fields").
#[inline(always)]
pub(super) fn canonical(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V6(long) => last_word_behind(0xffff, long).map_or(address, IpAddr::V4),
        IpAddr::V4(_) => address,
    }
}

/// Returns the IPv4 address that a NAT64 with the well-known prefix `64:ff9b::/96` (RFC 6052)
/// translates.
fn embedded_ipv4(address: Ipv6Addr) -> Option<Ipv4Addr> {
    last_word_behind(0x64_ff9b << 64, address)
}

/// Returns the last 32 bits of an address whose first 96 bits are `prefix`.
#[inline]
fn last_word_behind(prefix: u128, address: Ipv6Addr) -> Option<Ipv4Addr> {
    let bits = address.to_bits();
    (bits >> 32 == prefix).then(|| Ipv4Addr::from_bits(bits as u32))
}

/// Returns the IPv4 address of a host behind a NAT64 with the well-known prefix. Returns `None` for an internal
/// address. A NAT64 must not translate internal addresses (RFC 6052 section 3.1), so no host behind a NAT64 has an
/// internal address.
pub(crate) fn translated_ipv4(address: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(address) = address else { return None };
    embedded_ipv4(address).filter(|address| {
        let [first, second, ..] = address.octets();
        let is_shared = first == 100 && (64..128).contains(&second);
        !(first == 0 || is_shared || address.is_private() || address.is_loopback() || address.is_link_local())
    })
}

impl Default for Prefixes {
    fn default() -> Self {
        Self::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use ipnet::IpNet;
    use proptest::prelude::*;

    use super::*;

    fn grouped(address: &str, ipv6: u8) -> String {
        Prefixes::default().ipv6(ipv6).unwrap().group(address.parse().unwrap()).to_string()
    }

    /// The cases of express-rate-limit's `ip-key-generator-test.ts`, where our convention is the
    /// same. It differs for `::1.2.3.4`, the deprecated IPv4-compatible form: there `1.2.3.4`, here
    /// the IPv6 address that it is, since its sender need not own that IPv4 address; and for NAT64.
    /// A prefix of 16 bits does not exist here, and `false` is 128.
    #[test]
    fn addresses_are_grouped_as_express_rate_limit_does() {
        for (address, bits, group) in [
            ("1.2.3.4", 56, "1.2.3.4"),
            ("1.2.3.4", 32, "1.2.3.4"),
            ("::ffff:1.2.3.4", 56, "1.2.3.4"),
            ("::1.2.3.4", 56, "::"),
            ("::ffff:102:304", 56, "1.2.3.4"),
            ("::ffff:102:304", 32, "1.2.3.4"),
            ("::ffff:102:304", 128, "1.2.3.4"),
            ("2001:db8:1234:5678::1.2.3.4", 56, "2001:db8:1234:5600::"),
            ("::1", 56, "::"),
            ("::", 56, "::"),
            ("0123:4567:89ab:cdef:0123:4567:89ab:cdef", 128, "123:4567:89ab:cdef:123:4567:89ab:cdef"),
            ("0123:4567:89ab:cdef:0123:4567:89ab:cdef", 56, "123:4567:89ab:cd00::"),
            ("0123:4567:89ab:cdef:0123:4567:89ab:cdef", 63, "123:4567:89ab:cdee::"),
            ("123:ABC::89", 56, "123:abc::"),
        ] {
            assert_eq!(grouped(address, bits), group, "{address}/{bits}");
        }
    }

    #[test]
    fn addresses_that_embed_ipv4_are_grouped_as_documented() {
        assert_eq!(grouped("64:ff9b::192.0.2.1", 64), "64:ff9b::c000:201");
        assert_ne!(grouped("64:ff9b::192.0.2.1", 64), grouped("64:ff9b::192.0.2.2", 64));
        let networks = Prefixes::default().ipv4(24).unwrap().ipv6(48).unwrap();
        let group = |address: &str| networks.group(address.parse().unwrap());
        assert_eq!(group("64:ff9b::192.0.2.1"), group("64:ff9b::192.0.2.99"));
        assert_ne!(group("64:ff9b::192.0.2.1"), group("64:ff9b::192.0.3.1"));
        for (other, network) in [
            ("64:ff9b:1::192.0.2.1", "64:ff9b:1::"),
            ("64:ff9b:0:0:1::192.0.2.1", "64:ff9b::"),
            ("2002:c000:201::1", "2002:c000:201::"),
            ("2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:0:4136:e378::"),
        ] {
            assert_eq!(grouped(other, 64), network, "{other}");
        }
    }

    proptest! {
        /// The oracle is `ipnet`, and the standard library for addresses that are mapped.
        #[test]
        fn group_is_the_network_of_the_address(
            low in any::<u128>(),
            high in prop_oneof![any::<u128>(), Just(0xffff_u128 << 32), Just(0x64_ff9b_u128 << 96), Just(0)],
            is_ipv4 in any::<bool>(),
            (ipv4, ipv6) in (8..=32_u8, 32..=128_u8),
        ) {
            let long = Ipv6Addr::from_bits(high & u128::MAX << 32 | low & 0xffff_ffff);
            let address = if is_ipv4 { IpAddr::V4(Ipv4Addr::from_bits(low as u32)) } else { IpAddr::V6(long) };
            let network = |bits| IpNet::new(address.to_canonical(), bits).unwrap().network();
            let expected = match address.to_canonical() {
                IpAddr::V4(_) => network(ipv4),
                IpAddr::V6(long) if long.segments()[..6] == [0x64, 0xff9b, 0, 0, 0, 0] => network(96 + ipv4),
                IpAddr::V6(_) => network(ipv6),
            };
            let prefixes = Prefixes::default().ipv4(ipv4).unwrap().ipv6(ipv6).unwrap();
            prop_assert_eq!(prefixes.group(address), expected);
            prop_assert_eq!(canonical(address), address.to_canonical());
        }
    }

    #[test]
    fn one_customers_addresses_are_one_group() {
        assert_eq!(grouped("2001:db8:1:2:aaaa::1", 64), grouped("2001:db8:1:2:bbbb::1", 64));
        assert_ne!(grouped("2001:db8:1:2::1", 64), grouped("2001:db8:1:3::1", 64));
    }

    #[test]
    fn bits_outside_the_range_are_refused() {
        assert!(Prefixes::default().ipv6(31).is_err());
        assert!(Prefixes::default().ipv6(129).is_err());
        assert!(Prefixes::default().ipv4(7).is_err());
        assert!(Prefixes::default().ipv4(33).is_err());
        let wide = Prefixes::default().ipv4(24).unwrap();
        assert_eq!(wide.group("192.0.2.77".parse().unwrap()).to_string(), "192.0.2.0");
    }
}
