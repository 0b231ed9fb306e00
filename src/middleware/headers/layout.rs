//! The fields of usual refusals, laid out once: each refusal gets a copy, in which the values that change are replaced.
//!
//! A copy of a map does not hash the names again, and takes its memory at once. It has no room to spare: where most responses
//! get another field later, as those that pass do, it would be dearer.

use http::header::RETRY_AFTER;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::time::Timestamp;

use super::prepared::{Prepared, Response, View, binding};
use super::text::integer;
use super::{Content, retry_after};

/// The fields of a refusal, in their places.
#[derive(Debug)]
pub(crate) struct Layout {
    fields: HeaderMap,
    /// What is in the places of `fields`, in their order.
    slots: Vec<Slot>,
}

#[derive(Clone, Copy, Debug)]
enum Slot {
    /// Always the same.
    Kept,
    RetryAfter,
    /// One of a format's lists.
    List {
        format: usize,
        list: usize,
    },
    Single(Content),
}

impl Prepared {
    /// Lays out a refusal of this status: `fields`, whose names are none of the prepared ones, and after them those that
    /// tell of the quotas. Nothing for redirects, which have fewer.
    pub(crate) fn lay_out_refusal(&self, fields: HeaderMap, status: StatusCode) -> Option<Layout> {
        if status.is_redirection() { None } else { self.lay_out(fields) }
    }

    fn lay_out(&self, mut fields: HeaderMap) -> Option<Layout> {
        let mut told: Vec<(&HeaderName, Slot)> = Vec::new();
        if self.retry_after {
            told.push((&RETRY_AFTER, Slot::RetryAfter));
        }
        for (at, format) in self.formats.iter().enumerate() {
            let lists = format.lists.iter().enumerate();
            told.extend(lists.map(|(list, prepared)| (&prepared.name, Slot::List { format: at, list })));
            told.extend(format.singles.iter().map(|field| (&field.name, Slot::Single(field.content))));
        }
        for (name, slot) in &told {
            let value = self.whole_of(*slot).cloned().unwrap_or_else(|| HeaderValue::from_static(""));
            fields.try_insert(*name, value).ok()?;
        }
        let slot = |name| told.iter().find(|(known, _)| *known == name).map_or(Slot::Kept, |(_, slot)| *slot);
        let slots = fields.keys().map(slot).collect();
        Some(Layout { fields, slots })
    }

    /// The fields of a response, as [`write`](Self::write) adds them to those it was laid out with. Nothing if some field has
    /// nothing to tell.
    pub(crate) fn fill(
        &self,
        layout: &Layout,
        views: &[View<'_>],
        seed: u64,
        wall_now: &dyn Fn() -> Timestamp,
    ) -> Option<HeaderMap> {
        if views.is_empty() {
            return None;
        }
        let response = Response { views, all_apply: self.all_apply(views), seed, wall_now };
        let mut fields = layout.fields.clone();
        for (value, slot) in fields.values_mut().zip(&layout.slots) {
            *value = match *slot {
                Slot::Kept => continue,
                Slot::List { .. } if response.all_apply && self.whole_of(*slot).is_some() => continue,
                Slot::RetryAfter => integer(self.told_seconds(retry_after::longest_wait(views)?, seed))?,
                Slot::List { format, list } => {
                    self.list_value(self.formats.get(format)?.lists.get(list)?, &response)?
                }
                Slot::Single(content) => self.single(content, binding(views)?, &response)?,
            };
        }
        Some(fields)
    }

    /// A list that is the same whenever all policies apply.
    fn whole_of(&self, slot: Slot) -> Option<&HeaderValue> {
        let Slot::List { format, list } = slot else { return None };
        self.formats.get(format)?.lists.get(list)?.whole.as_ref()
    }
}
