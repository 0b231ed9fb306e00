//! Division by a number that is known in advance.

/// A divisor with its reciprocal. A division by this divisor takes two multiplications.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Divisor {
    by: u64,
    /// `⌊(2^64 − 1) / by⌋`.
    reciprocal: u64,
}

impl Divisor {
    /// Returns a divisor; 0 counts as 1.
    pub(crate) const fn new(by: u64) -> Self {
        let by = if by == 0 { 1 } else { by };
        Self { by, reciprocal: u64::MAX / by }
    }

    /// Returns the number itself.
    #[inline]
    pub(crate) const fn get(self) -> u64 {
        self.by
    }

    /// Returns `⌊n / by⌋`, for `n` below 2^63. The estimate is at most one too small, because `2^64 − by·reciprocal ≤
    /// by`, so the error is below `n / 2^64 < 1`.
    #[inline]
    pub(crate) const fn floor(self, n: u64) -> u64 {
        let estimate = ((n as u128 * self.reciprocal as u128) >> 64) as u64; // below 2^64
        estimate + (n - estimate * self.by >= self.by) as u64
    }

    /// Returns the largest multiple of the divisor that is at most `n`, for `n` below 2^63.
    #[inline]
    pub(crate) const fn round_down(self, n: u64) -> u64 {
        self.floor(n) * self.by
    }
}

#[cfg(test)]
mod tests {
    use super::Divisor;

    #[test]
    fn division_by_the_reciprocal_is_exact() {
        let mut x = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..200_000 {
            x = x.wrapping_mul(0xd129_0f59_6c1d_4b4d).wrapping_add(0x1b87_3593);
            let d = (x >> (x % 60)).max(1);
            let n = x.rotate_left(29) >> 1;
            for n in [n, n / d * d, (n / d * d).saturating_sub(1), 0, (1 << 63) - 1] {
                assert_eq!(Divisor::new(d).floor(n), n / d, "{n} / {d}");
            }
        }
    }
}
