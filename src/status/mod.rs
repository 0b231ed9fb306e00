//! A page for operators that shows what layers do.
//!
//! * `page.rs` is the service.
//! * `request.rs` reads what a browser or a program asks for.
//! * `source.rs` is what the page knows of a layer.
//! * `view.rs` collects what is shown. `html.rs` writes it for people, with `chart.rs`, `keys.rs` and `text.rs`, and
//!   `json.rs` for programs.

mod chart;
mod html;
mod json;
mod keys;
mod page;
mod request;
mod source;
mod text;
mod view;

pub use page::{StatusBody, StatusPage};
