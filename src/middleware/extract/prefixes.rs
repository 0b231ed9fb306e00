//! How many bits of an address make a key.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// How many leading bits of an address make its key, for each family.
///
/// By default all 32 of IPv4 and 64 of IPv6: a single customer is given a /64 at least and has all its 2^64 addresses, so
/// that whoever counts each address counts nothing. Many are given a /56 or a /48; a second, larger quota by
/// `Prefixes::default().ipv6(48)?` in the same layer covers these.
///
/// An IPv6 address that stands for an IPv4 one (`::ffff:192.0.2.1`) is that IPv4 address. No other embedding is unwrapped:
/// `::192.0.2.1` and `64:ff9b::192.0.2.1` are IPv6.
///
/// ```
/// use tower_ratelimit::key::Prefixes;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let prefixes = Prefixes::default();
/// assert_eq!(prefixes.group("2001:db8:1:2:3::4".parse()?), "2001:db8:1:2::".parse::<std::net::IpAddr>()?);
/// assert_eq!(prefixes.group("::ffff:192.0.2.1".parse()?), "192.0.2.1".parse::<std::net::IpAddr>()?);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prefixes {
    ipv4: u8,
    ipv6: u8,
}

impl Prefixes {
    /// Every address by itself, for networks where no client has more than one.
    #[must_use]
    pub const fn exact() -> Self {
        Self { ipv4: 32, ipv6: 128 }
    }

    /// Sets the bits of an IPv4 address that count.
    ///
    /// # Errors
    /// If they are fewer than 8 or more than 32.
    pub const fn ipv4(self, bits: u8) -> Result<Self, PrefixesError> {
        match bits {
            8..=32 => Ok(Self { ipv4: bits, ..self }),
            _ => Err(PrefixesError { bits, least: 8, most: 32 }),
        }
    }

    /// Sets the bits of an IPv6 address that count.
    ///
    /// # Errors
    /// If they are fewer than 32 (an Internet provider's whole network) or more than 128.
    pub const fn ipv6(self, bits: u8) -> Result<Self, PrefixesError> {
        match bits {
            32..=128 => Ok(Self { ipv6: bits, ..self }),
            _ => Err(PrefixesError { bits, least: 32, most: 128 }),
        }
    }

    /// The first address of the group that `address` belongs to: what is left of it is what makes the key.
    #[must_use]
    pub fn group(&self, address: IpAddr) -> IpAddr {
        match address.to_canonical() {
            IpAddr::V4(address) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.ipv4)).unwrap_or(0);
                IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() & mask))
            }
            IpAddr::V6(address) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.ipv6)).unwrap_or(0);
                IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & mask))
            }
        }
    }
}

impl Default for Prefixes {
    fn default() -> Self {
        Self { ipv4: 32, ipv6: 64 }
    }
}

/// The number of bits was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixesError {
    bits: u8,
    least: u8,
    most: u8,
}

/// Which number of bits was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PrefixesErrorKind {
    /// The prefix of IPv4 addresses.
    Ipv4,
    /// The prefix of IPv6 addresses.
    Ipv6,
}

impl PrefixesError {
    /// Which number of bits was refused.
    #[must_use]
    pub fn kind(&self) -> PrefixesErrorKind {
        if self.most == 32 { PrefixesErrorKind::Ipv4 } else { PrefixesErrorKind::Ipv6 }
    }
}

impl fmt::Display for PrefixesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = if self.most == 32 { "IPv4" } else { "IPv6" };
        write!(f, "an {family} prefix cannot have {} bits: use {} to {}", self.bits, self.least, self.most)
    }
}

impl std::error::Error for PrefixesError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn grouped(address: &str, ipv6: u8) -> String {
        Prefixes::default().ipv6(ipv6).unwrap().group(address.parse().unwrap()).to_string()
    }

    /// The cases of express-rate-limit's `ip-key-generator-test.ts`, where our convention is the same. It differs for
    /// `::1.2.3.4`, the deprecated IPv4-compatible form: there `1.2.3.4`, here the IPv6 address that it is, since its
    /// sender need not own that IPv4 address. A prefix of 16 bits does not exist here, and `false` is 128.
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
            ("64:ff9b::1.2.3.4", 56, "64:ff9b::"),
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
