//! Small charts of a policy's requests, as SVG.

use std::fmt::Write as _;

use crate::stats::RateBucket;

/// The buckets of a chart.
const BUCKETS: usize = 60;
/// The width of a bar and its gap, in units of the drawing: the bar is 3 units wide, and the gap 1
/// unit.
const BAR: usize = 4;
const HEIGHT: u64 = 40;

/// Writes a chart with a bar for each bucket. At the bottom of a bar are the allowed requests that were not near the
/// limit. In the middle are the allowed requests that were near the limit. On top are the requests over the limit,
/// hatched. `what` is the text for screen readers.
pub(super) fn write(html: &mut String, buckets: &[RateBucket], what: &str) {
    let all = |bucket: &RateBucket| bucket.allowed().saturating_add(bucket.over());
    let most = buckets.iter().map(all).max().unwrap_or(0).max(1);
    let _ = write!(
        html,
        "<svg viewBox=\"0 0 {} {HEIGHT}\" preserveAspectRatio=\"none\" role=\"img\" aria-label=\"{what}\">\
         <title>{what}</title>",
        BUCKETS * BAR
    );
    let height = |count: u64| -> u64 {
        // The height is rounded up, so that a single request is visible.
        (u128::from(count) * u128::from(HEIGHT)).div_ceil(u128::from(most)).try_into().unwrap_or(HEIGHT)
    };
    let empty = BUCKETS.saturating_sub(buckets.len());
    let (mut within, mut near, mut over) = (String::new(), String::new(), String::new());
    for (at, bucket) in buckets.iter().take(BUCKETS).enumerate() {
        let x = (empty + at) * BAR;
        let top = height(all(bucket));
        let above_near = height(bucket.allowed()).min(top);
        let above_within = height(bucket.allowed().saturating_sub(bucket.near())).min(above_near);
        for (path, from, to) in
            [(&mut within, 0, above_within), (&mut near, above_within, above_near), (&mut over, above_near, top)]
        {
            if to > from {
                let _ = write!(path, "M{x} {}h3v{}h-3z", HEIGHT - to, to - from); // to is at most the height
            }
        }
    }
    for (class, path) in [("within", within), ("near", near), ("over", over)] {
        if !path.is_empty() {
            let _ = write!(html, "<path class=\"{class}\" d=\"{path}\"/>");
        }
    }
    html.push_str("</svg>");
}
