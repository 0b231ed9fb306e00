//! The map of a cluster: which server has which slot, according to the answer to `CLUSTER SLOTS`. This file
//! also computes the slots of keys.

use super::address::Address;
use super::transport::RedisReply;

/// The number of slots of a cluster.
pub(super) const SLOTS: usize = 16_384;

/// The maximum number of masters of a cluster. A map with more masters is not used. Redis advises against clusters of
/// more than 1,000 servers.
pub(super) const MASTERS: usize = 1_000;

/// The number of numbers for servers: enough for all masters, and for some that take the place of others.
pub(in crate::limiter::redis) const SERVERS: u16 = 1_024;

/// The maximum number of replicas that are remembered, in case no master answers. Further replicas are left out.
const REPLICAS: usize = 64;

/// Returns the slot of a key, which depends on the text between its first braces.
pub(in crate::limiter::redis) fn slot_of(key: &[u8]) -> u16 {
    let opens = key.iter().position(|byte| *byte == b'{').map(|at| at + 1);
    let tag = opens.and_then(|from| {
        let length = key.get(from..)?.iter().position(|byte| *byte == b'}')?;
        key.get(from..from + length).filter(|tag| !tag.is_empty())
    });
    let sum = tag.unwrap_or(key).iter().fold(0, |sum: u16, byte| {
        let at = usize::from(sum >> 8 ^ u16::from(*byte));
        sum << 8 ^ CRC.get(at).copied().unwrap_or(0) // there are 256
    });
    sum % SLOTS as u16
}

/// The remainders of all bytes for the CRC that clusters use: CRC-16/XMODEM.
const CRC: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut sum, mut bit) = ((byte as u16) << 8, 0);
        while bit < 8 {
            sum = if sum & 1 << 15 == 0 { sum << 1 } else { sum << 1 ^ 0x1021 };
            bit += 1;
        }
        table[byte] = sum;
        byte += 1;
    }
    table
};

/// A server's map of its cluster.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Slots {
    /// The first and the last slot of each range, and the index of its master.
    pub(super) ranges: Vec<(u16, u16, usize)>,
    pub(super) masters: Vec<Address>,
    pub(super) replicas: Vec<Address>,
}

impl Slots {
    /// Reads the answer of the server at the address `asked`. Returns `None` if the answer cannot be used.
    pub(super) fn parse(answer: &RedisReply, asked: &Address) -> Option<Self> {
        let RedisReply::Array(rows) = answer else { return None };
        let mut slots = Self { ranges: Vec::new(), masters: Vec::new(), replicas: Vec::new() };
        for row in rows.iter().take(SLOTS) {
            let RedisReply::Array(row) = row else { return None };
            let [first, last, master, replicas @ ..] = &**row else { return None };
            let (first, last) = (slot(first)?, slot(last)?);
            let master = address(master, asked)?;
            let at = match slots.masters.iter().position(|known| *known == master) {
                Some(at) => at,
                None if slots.masters.len() >= MASTERS => return None,
                None => {
                    slots.masters.push(master);
                    slots.masters.len() - 1
                }
            };
            slots.ranges.push((first, last, at));
            for replica in replicas.iter().filter_map(|replica| address(replica, asked)) {
                if slots.replicas.len() < REPLICAS && !slots.replicas.contains(&replica) {
                    slots.replicas.push(replica);
                }
            }
        }
        // A server that was reset reports no ranges.
        (!slots.ranges.is_empty()).then_some(slots)
    }
}

fn slot(value: &RedisReply) -> Option<u16> {
    let RedisReply::Integer(number) = value else { return None };
    u16::try_from(*number).ok().filter(|slot| usize::from(*slot) < SLOTS)
}

/// Reads an address. A server that does not know its own host has the host of the connection.
fn address(value: &RedisReply, asked: &Address) -> Option<Address> {
    let RedisReply::Array(parts) = value else { return None };
    let [host, RedisReply::Integer(port), ..] = &**parts else { return None };
    let host = match host {
        RedisReply::Bytes(host) if !host.is_empty() && **host != *b"?" => std::str::from_utf8(host).ok()?,
        _ => &asked.host,
    };
    Some(Address::new(host, u16::try_from(*port).ok().filter(|port| *port != 0)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(host: &'static str, port: i64) -> RedisReply {
        RedisReply::Array(vec![
            RedisReply::Bytes(host.into()),
            RedisReply::Integer(port),
            RedisReply::Bytes("0123456789abcdef".into()),
            RedisReply::Array(vec![]),
        ])
    }

    fn row(first: i64, last: i64, servers: &[RedisReply]) -> RedisReply {
        RedisReply::Array(
            [RedisReply::Integer(first), RedisReply::Integer(last)]
                .into_iter()
                .chain(servers.iter().cloned())
                .collect(),
        )
    }

    #[test]
    fn slot_depends_on_what_is_between_the_first_braces() {
        assert_eq!(slot_of(b"123456789"), 0x31c3, "the check value of this CRC");
        for (key, slot) in
            [("", 0), ("foo", 12_182), ("{foo}bar", 12_182), ("a{foo}{bar}", 12_182), ("a}{foo}", 12_182)]
        {
            assert_eq!(slot_of(key.as_bytes()), slot, "{key}");
        }
    }

    #[cfg(feature = "fred")]
    #[test]
    fn slot_is_that_which_fred_computes() {
        for key in ["{}{foo}", "{foo", "foo}", "a{b}c{d}", "\u{ff}{\u{100}}"] {
            assert_eq!(slot_of(key.as_bytes()), fred::util::redis_keyslot(key.as_bytes()), "{key}");
        }
    }

    #[test]
    fn each_range_names_its_master_once() {
        let answer = RedisReply::Array(vec![
            row(0, 99, &[server("a", 1), server("b", 2)]),
            row(100, 16_383, &[server("c", 3)]),
            row(50, 50, &[server("a", 1), server("b", 2)]),
        ]);
        let slots = Slots::parse(&answer, &Address::new("asked", 9)).unwrap();
        assert_eq!(slots.ranges, [(0, 99, 0), (100, 16_383, 1), (50, 50, 0)]);
        assert_eq!(slots.masters, [Address::new("a", 1), Address::new("c", 3)]);
        assert_eq!(slots.replicas, [Address::new("b", 2)]);
    }

    #[test]
    fn a_server_without_a_host_is_where_it_was_asked() {
        for host in ["", "?"] {
            let answer = RedisReply::Array(vec![row(0, 16_383, &[server(host, 7)])]);
            let slots = Slots::parse(&answer, &Address::new("asked", 9)).unwrap();
            assert_eq!(slots.masters, [Address::new("asked", 7)]);
        }
    }

    #[test]
    fn an_answer_that_makes_no_sense_is_none() {
        let asked = Address::new("asked", 9);
        for answer in [
            RedisReply::Other,
            RedisReply::Array(vec![]),
            RedisReply::Array(vec![RedisReply::Other]),
            RedisReply::Array(vec![row(0, 16_384, &[server("a", 1)])]),
            RedisReply::Array(vec![row(-1, 5, &[server("a", 1)])]),
            RedisReply::Array(vec![row(0, 5, &[])]),
            RedisReply::Array(vec![row(0, 5, &[server("a", 0)])]),
            RedisReply::Array(vec![row(0, 5, &[server("a", 65_536)])]),
        ] {
            assert_eq!(Slots::parse(&answer, &asked), None, "{answer:?}");
        }
        let many = (1..=1_001).map(|port| row(0, 0, &[server("a", port)])).collect();
        assert_eq!(Slots::parse(&RedisReply::Array(many), &asked), None, "more masters than there may be");
    }
}
