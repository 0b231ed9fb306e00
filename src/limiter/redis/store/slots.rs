//! The map of a cluster: which server has which slot, by the answer to `CLUSTER SLOTS`.

use fred::types::Value;

use super::address::Address;

/// The number of slots of a cluster.
pub(super) const SLOTS: usize = 16_384;

/// The most masters of a cluster. A map with more is not used. Redis advises against clusters of
/// more than 1,000 servers.
pub(super) const MASTERS: usize = 1_000;

/// The most replicas that are remembered, in case no master answers. More are left out.
const REPLICAS: usize = 64;

/// A server's map of its cluster.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Slots {
    /// The first and the last slot of each range, and the place of its master.
    pub(super) ranges: Vec<(u16, u16, usize)>,
    pub(super) masters: Vec<Address>,
    pub(super) replicas: Vec<Address>,
}

impl Slots {
    /// Reads the answer of the server at the address `asked`. Returns `None` if it cannot be used.
    pub(super) fn parse(answer: &Value, asked: &Address) -> Option<Self> {
        let Value::Array(rows) = answer else { return None };
        let mut slots = Self { ranges: Vec::new(), masters: Vec::new(), replicas: Vec::new() };
        for row in rows.iter().take(SLOTS) {
            let Value::Array(row) = row else { return None };
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
        // A server that was reset knows no ranges.
        (!slots.ranges.is_empty()).then_some(slots)
    }
}

fn slot(value: &Value) -> Option<u16> {
    let Value::Integer(number) = value else { return None };
    u16::try_from(*number).ok().filter(|slot| usize::from(*slot) < SLOTS)
}

/// Reads an address. A server that does not know its own host has the host of the connection.
fn address(value: &Value, asked: &Address) -> Option<Address> {
    let Value::Array(parts) = value else { return None };
    let [host, Value::Integer(port), ..] = &**parts else { return None };
    let host = match host.as_bytes() {
        Some(host) if !host.is_empty() && host != b"?" => std::str::from_utf8(host).ok()?,
        _ => &asked.host,
    };
    Some(Address::new(host, u16::try_from(*port).ok().filter(|port| *port != 0)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(host: &'static str, port: i64) -> Value {
        Value::Array(vec![
            Value::from_static_str(host),
            Value::Integer(port),
            Value::from_static_str("0123456789abcdef"),
            Value::Array(vec![]),
        ])
    }

    fn row(first: i64, last: i64, servers: &[Value]) -> Value {
        Value::Array([Value::Integer(first), Value::Integer(last)].into_iter().chain(servers.iter().cloned()).collect())
    }

    #[test]
    fn each_range_names_its_master_once() {
        let answer = Value::Array(vec![
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
            let answer = Value::Array(vec![row(0, 16_383, &[server(host, 7)])]);
            let slots = Slots::parse(&answer, &Address::new("asked", 9)).unwrap();
            assert_eq!(slots.masters, [Address::new("asked", 7)]);
        }
    }

    #[test]
    fn an_answer_that_makes_no_sense_is_none() {
        let asked = Address::new("asked", 9);
        for answer in [
            Value::Null,
            Value::Array(vec![]),
            Value::Array(vec![Value::Null]),
            Value::Array(vec![row(0, 16_384, &[server("a", 1)])]),
            Value::Array(vec![row(-1, 5, &[server("a", 1)])]),
            Value::Array(vec![row(0, 5, &[])]),
            Value::Array(vec![row(0, 5, &[server("a", 0)])]),
            Value::Array(vec![row(0, 5, &[server("a", 65_536)])]),
        ] {
            assert_eq!(Slots::parse(&answer, &asked), None, "{answer:?}");
        }
        let many = (1..=1_001).map(|port| row(0, 0, &[server("a", port)])).collect();
        assert_eq!(Slots::parse(&Value::Array(many), &asked), None, "more masters than there may be");
    }
}
