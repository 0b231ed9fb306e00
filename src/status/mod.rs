//! A page for operators that shows what layers do.
//!
//! * `page.rs` is the service.
//! * `request.rs` reads the requests of browsers and programs.
//! * `source.rs` is a layer, as the page sees it.
//! * `target.rs` has the keys that an operator looks at. `operators.rs` decides who may act on keys, and `action.rs`
//!   describes an action. `settings.rs` has the settings that operators make for all processes, `pushed_rules.rs` what
//!   pushed rules change, and `processes.rs` the reports of all processes.
//! * `view.rs` collects the content of the page, with `sums.rs`. `html.rs` writes the page for people, with `chart.rs`,
//!   `keys.rs`, `states.rs` and `text.rs`. `json.rs` writes the page for programs.

mod action;
mod chart;
mod html;
mod json;
mod keys;
mod operators;
mod page;
#[cfg(feature = "fleet")]
mod processes;
#[cfg(all(feature = "fleet", feature = "rules"))]
mod pushed_rules;
mod request;
#[cfg(feature = "fleet")]
mod settings;
mod source;
mod states;
mod sums;
mod target;
mod text;
mod view;

pub use action::{ActionKind, OperatorAction};
pub use page::{StatusBody, StatusPage};
