//! The key of a rule.

use std::sync::Arc;

use super::super::names::Names;
use super::super::spec::{At, KeySpec};
use crate::base::head::Head;
use crate::key::{self, IntoKey, Key};
use crate::middleware::rule::{BoundRule, Read, Rule};

/// The reason why a part of a key cannot be made, and its position.
pub(super) type KeyError = At<&'static str>;

/// Gives a rule its key, which has one or more parts. A key that is only an address uses an extractor of this crate.
/// The extractor's type shows the layer where the address comes from.
pub(super) fn bound(rule: Rule, parts: &[At<KeySpec>], names: &Names) -> Result<BoundRule, KeyError> {
    if let [only] = parts {
        match (&only.value, &names.proxies) {
            (KeySpec::PeerIp, _) => return Ok(BoundRule::new(rule, key::peer_ip())),
            (KeySpec::ClientIp, Some(proxies)) => return Ok(BoundRule::new(rule, key::client_ip(proxies.clone()))),
            _ => {}
        }
    }
    let parts = parts.iter().map(|part| extractor(part, names)).collect::<Result<Vec<_>, _>>()?;
    Ok(BoundRule::new(rule, move |request: &Head<'_>| {
        let mut keys = parts.iter().map(|part| part(request));
        let first = keys.next()??;
        keys.try_fold(first, |key, next| (key, next?).into_key())
    }))
}

/// Makes the extractor of a part of a key.
pub(super) fn extractor(spec: &At<KeySpec>, names: &Names) -> Result<Read<Option<Key>>, KeyError> {
    fn read<K: IntoKey>(extract: impl Fn(&Head<'_>) -> K + Send + Sync + 'static) -> Read<Option<Key>> {
        Arc::new(move |head| extract(head).into_key())
    }

    let error = |message| KeyError { value: message, position: spec.position };
    Ok(match &spec.value {
        KeySpec::ClientIp => match &names.proxies {
            Some(proxies) => read(key::client_ip(proxies.clone())),
            None => {
                return Err(error(
                    "`client-ip` needs the proxies that you trust: name them with RulesBuilder::trusted_proxies, or \
                     write `peer-ip` if clients connect directly",
                ));
            }
        },
        KeySpec::PeerIp => read(key::peer_ip()),
        KeySpec::Path => read(key::original_path()),
        KeySpec::Host => read(key::host()),
        KeySpec::Method => read(key::method()),
        KeySpec::Global => read(key::global()),
        KeySpec::BearerToken => read(key::bearer_token()),
        KeySpec::Header(name) => read(key::header(name.as_str())),
        KeySpec::Cookie(name) => read(key::cookie(&**name)),
        KeySpec::Query(name) => read(key::query(&**name)),
        KeySpec::Registered(name) => {
            let registered = names.keys.get(&**name);
            debug_assert!(registered.is_some(), "the reader refuses a key that is not registered");
            Arc::clone(registered.ok_or_else(|| error("no key of this name is registered"))?)
        }
    })
}
