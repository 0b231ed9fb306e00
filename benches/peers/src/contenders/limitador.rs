//! limitador in memory: fixed windows, and conditions in an expression language.

use std::collections::HashMap;

use limitador::RateLimiter;
use limitador::limit::{Context, Limit, Namespace};

use crate::contender::{Check, Contender, PLENTY, Setup, check};

pub struct Limitador;

pub fn limit(denied: bool) -> Limit {
    let (most, seconds) = if denied { (1, 3_600) } else { (u64::from(PLENTY), 3_600) };
    let variables = vec!["client".try_into().expect("a variable's name")];
    Limit::new("bench", most, seconds, Vec::new(), variables)
}

pub fn context(key: &str) -> Context<'static> {
    Context::from(HashMap::from([("client".to_owned(), key.to_owned())]))
}

impl Contender for Limitador {
    fn name(&self) -> &'static str {
        "limitador"
    }

    fn by_text(&self, setup: &Setup) -> Option<Check<String>> {
        let limiter = RateLimiter::new(2 * setup.keys as u64);
        limiter.add_limit(limit(setup.denied));
        let namespace = Namespace::from("bench");
        check(move |key: &String| {
            let checked = limiter.check_rate_limited_and_update(&namespace, &context(key), 1);
            checked.is_ok_and(|result| !result.limited)
        })
    }
}
