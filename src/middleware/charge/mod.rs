//! Charges a request, from its head to the limiter's answer: lists and preflight requests first, then the rules'
//! charges.

pub(crate) mod access;
mod bypass;
mod look;
pub(super) mod take;
