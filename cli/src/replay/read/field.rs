//! The meanings of a log line's fields, and the fields of one line.

use std::borrow::Cow;
use std::hash::{BuildHasher, Hash, Hasher};

use foldhash::quality::FixedState;
use http::HeaderName;
use smallvec::SmallVec;

/// The meaning of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    /// The client's address, with or without a port.
    Client,
    /// The address at the other end of the connection, for logs without a client's address.
    Peer,
    User,
    /// The name by RFC 1413, which hardly any client has. An address there shows that the line has another format.
    Ident,
    /// A request line, such as `GET / HTTP/1.1`.
    RequestLine,
    Method,
    /// A path with its query, or a URL.
    Target,
    Host,
    /// The name of a virtual host, which may have a port.
    VirtualHost,
    Status,
    /// The time at which the response was complete.
    End,
    /// The time at which the request arrived.
    Start,
    Duration(Unit),
    /// The header of this index in the format's list.
    Header(usize),
    /// A number of bytes. Only its digits are looked at, because other formats have more fields behind it.
    Size,
    /// Fields that nobody named. If one is a list of addresses in quotes, it is the header of this index.
    Unnamed(usize),
    /// The name of the logger that wrote the line. Those of access logs have names of their own.
    Logger,
    /// Skipped.
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Seconds,
    Millis,
    Micros,
    Nanos,
}

/// The headers that a format has. Fields refer to them by their indices.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeaderNames(pub(crate) Vec<HeaderName>);

impl HeaderNames {
    /// Returns the field of a header, which is added if it is new. Returns `None` if no header can have this name.
    pub(crate) fn field(&mut self, name: &str) -> Option<Field> {
        let name = HeaderName::try_from(name).ok()?;
        let at = self.0.iter().position(|known| *known == name).unwrap_or_else(|| {
            self.0.push(name);
            self.0.len() - 1
        });
        Some(Field::Header(at))
    }

    /// Returns the field of a header, which is added if it is new and there are fewer than `most`.
    pub(crate) fn field_within(&mut self, name: &str, most: usize) -> Option<Field> {
        let is_known = self.0.iter().any(|known| known == name);
        if is_known || self.0.len() < most { self.field(name) } else { None }
    }
}

/// The longest duration of a request that is believed, in microseconds: a year.
const DURATION_MAX_US: u64 = 366 * 86_400_000_000;

/// The fields of one line, in the order of the line. An empty one, and `-`, are left out.
#[derive(Debug, Default)]
pub(crate) struct Fields<'a>(SmallVec<[(Field, Cow<'a, [u8]>); 10]>);

impl<'a> Fields<'a> {
    pub(crate) fn add(&mut self, field: Field, value: Cow<'a, [u8]>) {
        if !matches!(&*value, b"" | b"-") {
            self.0.push((field, value));
        }
    }

    pub(crate) fn get(&self, field: Field) -> Option<&[u8]> {
        self.all(field).next()
    }

    /// Returns all values of a field. JSON may have several, under different names.
    pub(crate) fn all(&self, field: Field) -> impl Iterator<Item = &[u8]> {
        self.0.iter().filter(move |(of, _)| *of == field).map(|(_, value)| &**value)
    }

    /// Returns a hash of all values but the logger's name, which is that of the same request in another logger.
    pub(crate) fn hash(&self) -> u64 {
        let mut hasher = FixedState::default().build_hasher();
        for (field, value) in self.0.iter().filter(|(field, _)| *field != Field::Logger) {
            std::mem::discriminant(field).hash(&mut hasher);
            value.hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Returns the request's duration in microseconds, rounded down. Some servers write it in parts. One of more than a
    /// year is none: the request would have begun before the log.
    pub(crate) fn duration(&self) -> Option<u64> {
        let parts = self.0.iter().filter_map(|(field, value)| {
            let Field::Duration(unit) = field else { return None };
            // HAProxy writes the whole behind its parts, as in `0/0/1/12/13`.
            let text = std::str::from_utf8(value).ok()?.rsplit('/').next()?;
            // GCP and Traefik write the unit behind the number.
            let (text, unit) = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
                (Some(number), _) => (number, Unit::Millis),
                (None, Some(number)) => (number, Unit::Seconds),
                (None, None) => (text, *unit),
            };
            let number: f64 = text.parse().ok()?;
            super::date::seconds(match unit {
                Unit::Seconds => number,
                Unit::Millis => number / 1e3,
                Unit::Micros => number / 1e6,
                Unit::Nanos => number / 1e9,
            })
        });
        parts.reduce(u64::saturating_add).filter(|duration_us| *duration_us <= DURATION_MAX_US)
    }
}
