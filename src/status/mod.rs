//! A page for operators that shows what layers do.
//!
//! * `page.rs` is the service.
//! * `request.rs` reads what a browser or a program asks for.
//! * `source.rs` is a layer, as the page sees it.
//! * `target.rs` has the keys that are looked at. `operators.rs` knows who may act on them, and `action.rs` says what
//!   was done. `settings.rs` has what operators set for all processes, and `processes.rs` what these report.
//! * `view.rs` collects what is shown, with `sums.rs`. `html.rs` writes it for people, with `chart.rs`, `keys.rs`,
//!   `states.rs` and `text.rs`, and `json.rs` for programs.

mod action;
mod chart;
mod html;
mod json;
mod keys;
mod operators;
mod page;
#[cfg(feature = "tokio")]
mod processes;
mod request;
#[cfg(feature = "tokio")]
mod settings;
mod source;
mod states;
mod sums;
mod target;
mod text;
mod view;

pub use action::{ActionKind, OperatorAction};
pub use page::{StatusBody, StatusPage};
