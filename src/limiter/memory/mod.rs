//! stub
/// stub
#[derive(Clone, Debug)]
pub struct MemoryLimiter;
impl MemoryLimiter {
    /// s
    pub fn new() -> Self {
        Self
    }
}
