//! Lines and cells of tables.

/// The cell of a figure that is not there.
pub const NONE: &str = "-";

/// The lines of a table.
pub fn lines(head: &[String], rows: impl Iterator<Item = Vec<String>>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    line(head) + &format!("|{}\n", "---|".repeat(head.len())) + &rows.map(|row| line(&row)).collect::<String>()
}

/// A ratio in bold if it is above `most`.
pub fn ratio(ratio: Option<f64>, most: f64) -> String {
    match ratio {
        None => NONE.to_owned(),
        // The sign of a difference that is lost in noise.
        Some(ratio) if !ratio.is_finite() || ratio < 0.0 => "(noise)".to_owned(),
        Some(ratio) => {
            let percent = (ratio * 100.0).round();
            let told = format!("{:.2}", percent / 100.0);
            if percent > (most * 100.0).round() { format!("**{told}**") } else { told }
        }
    }
}
