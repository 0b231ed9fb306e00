//! What requests have in common that one lean script can do: the kinds of their states, and which share a value.
//!
//! A lean script is written out for its shape, so that it meets no table and no function that it does not need: each would
//! cost a call some 60 ns, and a charge among several more than its own arithmetic.

use std::fmt::Write;

use smallvec::SmallVec;

use super::form::Kind;

/// Charges of one request that a lean script can do: what it knows of each takes some twenty of Lua's 200 local variables.
const CHARGES_MAX: usize = 8;

/// The kind of each charge, and whether its state is in one value with that before it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape(SmallVec<[(Kind, bool); CHARGES_MAX]>);

/// How charges of a kind stand in a lean script.
struct Words {
    decide: &'static str,
    /// How many numbers a form has.
    numbers: usize,
    /// Of the state, and its layout.
    names: &'static [&'static str],
    layout: &'static str,
    /// Its instant stays the same while a window lasts.
    stays: bool,
}

fn words(kind: Kind) -> Words {
    let (layout, _) = kind.layout();
    let (decide, numbers, names): (_, _, &'static [&'static str]) = match kind {
        Kind::Whole => ("gcra", 4, &["at"]),
        Kind::Parts => ("gcra", 7, &["at", "n"]),
        Kind::StepBucket => ("step_bucket", 6, &["at", "n"]),
        Kind::FixedWindow => ("fixed_window", 7, &["at", "n"]),
        Kind::TwoCounters => ("sliding_window", 7, &["at", "n", "m"]),
        Kind::Narrow | Kind::Wide => ("trail", 10, &[]),
        Kind::Block => ("block", 9, &["at", "n", "m"]),
        Kind::Meter => ("meter", 4, &["at", "n"]),
    };
    let stays = matches!(kind, Kind::FixedWindow | Kind::TwoCounters);
    Words { decide, numbers, names, layout, stays }
}

/// The names of a list, each with what follows.
fn list(names: impl IntoIterator<Item = String>) -> String {
    names.into_iter().collect::<Vec<_>>().join(", ")
}

impl Shape {
    /// The shape of a request of these keys; nothing if no lean script can do it.
    pub(super) fn of<K: Iterator<Item = Kind>>(keys: impl Iterator<Item = K>) -> Option<Self> {
        let mut shape = SmallVec::new();
        for kinds in keys {
            for (number, kind) in kinds.enumerate() {
                if kind.is_trail() || shape.len() == CHARGES_MAX {
                    return None;
                }
                shape.push((kind, number > 0));
            }
        }
        Some(Self(shape))
    }

    /// The only kind, if there is one charge.
    pub(super) fn lone(&self) -> Option<Kind> {
        match self.0.as_slice() {
            [(kind, _)] => Some(*kind),
            _ => None,
        }
    }

    /// The functions that its script needs.
    pub(super) fn functions(&self) -> impl Iterator<Item = &'static str> {
        let mut functions: SmallVec<[&'static str; 4]> = self.0.iter().map(|(kind, _)| words(*kind).decide).collect();
        functions.sort_unstable();
        functions.dedup();
        functions.into_iter()
    }

    /// The number of each charge, from 1, by key.
    fn keys(&self) -> Vec<Vec<(usize, Words)>> {
        let mut keys: Vec<Vec<(usize, Words)>> = Vec::new();
        for (at, (kind, joins)) in self.0.iter().enumerate() {
            match keys.last_mut().filter(|_| *joins) {
                Some(key) => key.push((at + 1, words(*kind))),
                None => keys.push(vec![(at + 1, words(*kind))]),
            }
        }
        keys
    }

    /// How a lean script takes a form apart, whose number is in `form`.
    pub(super) fn form(&self) -> String {
        let mut form = Form::default();
        for (number, charges) in (1..).zip(&self.keys()) {
            form.key(number, charges);
        }
        format!("local {} = unpack('<{}', forms[form])", form.names.join(", "), form.layout)
    }

    /// What a lean script does with each request: `KEYS` from `key + 1` on, and what was in the form. It leaves the answer
    /// in `told`, and what is not as it should be in `bad`.
    pub(super) fn body(&self) -> String {
        let keys = self.keys();
        let (mut read, mut decide, mut write) = (String::new(), String::new(), String::new());
        let (mut answers, mut alone): (Vec<String>, String) = Default::default();
        for (number, charges) in (1..).zip(&keys) {
            read.push_str(&reads(number, charges));
            charges.iter().for_each(|charge| decide.push_str(&decides(charge)));
            write.push_str(&writes(number, charges, self.0.len() == 1));
            let layout: String = charges.iter().map(|(_, words)| words.layout).collect();
            let found = states(charges);
            if keys.len() == 1 {
                // A lone one has its whole reply from one call.
                alone = format!(
                    "if alone and not bad then return value1 and pack('<dB{layout}', now, 1, {found}) or pack('<dB', now, 0) end\n"
                );
            }
            answers.push(format!("(value{number} and pack('<B{layout}', 1, {found}) or '\\0')"));
        }
        let allowed: Vec<String> = (1..=self.0.len()).map(|at| format!("(ok{at} or mode{at} ~= 1)")).collect();
        let allowed =
            if self.0.len() == 1 { String::new() } else { format!("local allowed = {}\n", allowed.join(" and ")) };
        let answers = answers.join(" .. ");
        format!("local bad\n{read}{decide}{allowed}{write}{alone}local told = not bad and {answers}\n")
    }

    /// How many keys a request has.
    pub(super) fn key_count(&self) -> usize {
        self.0.iter().filter(|(_, joins)| !joins).count()
    }
}

/// The names and the layout of a form.
#[derive(Default)]
struct Form {
    names: Vec<String>,
    layout: String,
}

impl Form {
    fn key(&mut self, number: usize, charges: &[(usize, Words)]) {
        self.layout.push_str("xI2c0I2c0I2");
        self.names.extend(["layout", "head", "size"].map(|name| format!("{name}{number}")));
        for (at, words) in charges {
            self.names.push(format!("mode{at}"));
            self.names.extend((1..=words.numbers).map(|number| format!("q{at}_{number}")));
            self.layout.push('B');
            self.layout.push_str(&"d".repeat(words.numbers));
        }
    }
}

/// The names of the states of a key.
fn states(charges: &[(usize, Words)]) -> String {
    list(charges.iter().map(|(at, words)| state(*at, words)))
}

/// The names of one charge's state.
fn state(at: usize, words: &Words) -> String {
    list(words.names.iter().map(|name| format!("{name}{at}")))
}

/// Reads a key's value. What is garbled is as nothing.
fn reads(number: usize, charges: &[(usize, Words)]) -> String {
    let names = states(charges);
    let zeros = list(names.split(", ").map(|_| "0".to_owned()));
    let is_sane = charges.iter().flat_map(|(at, words)| {
        // Counts are never negative.
        words
            .names
            .iter()
            .filter(|name| **name != "m")
            .map(move |name| format!("{name}{at} >= 0 and {name}{at} < MOST"))
    });
    let is_sane = is_sane.collect::<Vec<_>>().join(" and ");
    format!(
        "local name{number} = KEYS[key + {number}]\n\
         local value{number} = try('GET', name{number})\n\
         local {names} = {zeros}\n\
         if value{number} then\n\
         \x20 local head\n\
         \x20 if #value{number} == size{number} then head, {names} = unpack(layout{number}, value{number}) end\n\
         \x20 if head ~= head{number} then\n\
         \x20   bad, {names} = bad or value{number}, {zeros}\n\
         \x20 elseif not ({is_sane}) then\n\
         \x20   value{number}, {names} = false, {zeros}\n\
         \x20 end\n\
         end\n"
    )
}

fn decides((at, words): &(usize, Words)) -> String {
    let state: Vec<String> = ["at", "n", "m"]
        .iter()
        .map(|name| if words.names.contains(name) { format!("{name}{at}") } else { "0".to_owned() })
        .collect();
    let numbers = list((1..=words.numbers).map(|number| format!("q{at}_{number}")));
    format!("local ok{at}, to{at}, n_{at}, m_{at} = {}(now, {}, {numbers})\n", words.decide, state.join(", "))
}

/// Writes a key's value, if any of its states is to be written.
fn writes(number: usize, charges: &[(usize, Words)], lone: bool) -> String {
    let layout = format!("layout{number}, head{number}");
    let after = |at: &usize, words: &Words| {
        let names = words.names.iter().map(|name| match *name {
            "at" => format!("to{at}"),
            name => format!("{name}_{at}"),
        });
        list(names)
    };
    let writes = |at: &usize| match lone {
        true => format!("to{at} and mode{at} > 0"),
        // A refused charge that writes all the same counts its refusals.
        false => format!("to{at} and mode{at} > 0 and (allowed or mode{at} == 1 and not ok{at})"),
    };
    let put = |ends: &str, states: &str| {
        format!(
            "local left = {ends} - now\n\
             local done = try('PSETEX', name{number}, (left - left % 1000) / 1000 + longer, pack({layout}, {states}))\n\
             if done.err then bad = done end\n"
        )
    };
    let delete = format!("local done = try('DEL', name{number})\nif type(done) == 'table' then bad = done end\n");
    if let [(at, words)] = charges {
        let after = after(at, words);
        let mut put = put(&format!("to{at}"), &after);
        if words.stays {
            // It ends when it did: to tell Redis so once more costs as much as half of the rest.
            put = format!(
                "if to{at} == at{at} then\n\
                 local done = try('SET', name{number}, pack({layout}, {after}), 'KEEPTTL')\n\
                 if done.err then bad = done end\n\
                 else\n{put}end\n"
            );
        }
        let writes = writes(at);
        return format!(
            "if {writes} and not bad then\n\
             if to{at} >= 0 then\n{put}else\n{delete}end\nend\n"
        );
    }
    let mut text = String::new();
    for (at, words) in charges {
        let zeros = list(words.names.iter().map(|_| "0".to_owned()));
        let (after, before) = (after(at, words), state(*at, words));
        let _ = write!(
            text,
            "local writes{at} = {}\n\
             if not writes{at} then {after} = {before} elseif to{at} < 0 then {after} = {zeros} end\n",
            writes(at)
        ); // a string takes all
    }
    let any = charges.iter().map(|(at, _)| format!("writes{at}")).collect::<Vec<_>>().join(" or ");
    let all = list(charges.iter().map(|(at, words)| after(at, words)));
    let (first, others) = charges.split_at(1);
    let mut last = format!("local last = to{}\n", first.first().map_or(1, |(at, _)| *at));
    for (at, _) in others {
        let _ = writeln!(last, "if to{at} > last then last = to{at} end"); // a string takes all
    }
    let put = put("last", &all);
    format!("if not bad then\n{text}if {any} then\n{last}if last >= now then\n{put}else\n{delete}end\nend\nend\n")
}
