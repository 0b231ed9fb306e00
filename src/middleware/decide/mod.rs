//! Decides the outcome of a charged request, which depends on the modes of its rules, linked policies, queues and
//! the overflow.

pub(crate) mod delay;
pub(crate) mod kind;
pub(crate) mod linked;
pub(crate) mod overflow;
pub(crate) mod step;
