//! The figure over the number of keys: the time of a check, and the memory in use. Both scales are logarithmic.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::build::Done;
use super::case::{Case, Row, figure};
use super::chart::{OURS, QUIET, TEXT};

const WIDTH: i32 = 940;
const HEIGHT: i32 = 380;
/// The plot of one quantity: its width, and the distance of its edges to those of the figure.
const PLOT: i32 = 330;
const LEFT: i32 = 60;
const TOP: i32 = 56;
const BOTTOM: i32 = 90;

const GOVERNOR: RGBColor = RGBColor(0xb0, 0x6a, 0x1e);

type Root<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

pub fn draw(file: &Path, cases: &[Case]) -> Done {
    let root = SVGBackend::new(file, (WIDTH as u32, HEIGHT as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    plot(&root, LEFT, "a check, ns", cases, &|row| Some(row.value))?;
    let megabytes = |row: &Row| Some((row.notes.get("resident kB")? / 1e3).max(0.01));
    plot(&root, WIDTH / 2 + LEFT, "resident memory, MB", cases, &megabytes)?;
    let names = cases.first().map(|case| case.rows.iter().map(|row| row.contender.as_str())).into_iter().flatten();
    let mut left = LEFT;
    for name in names {
        root.draw(&Rectangle::new([(left, HEIGHT - 30), (left + 22, HEIGHT - 26)], colour(name).filled()))?;
        root.draw(&Text::new(name.to_owned(), (left + 28, HEIGHT - 35), ("sans-serif", 13).into_font().color(&TEXT)))?;
        left += 60 + 8 * name.len() as i32;
    }
    root.present()?;
    Ok(())
}

fn colour(name: &str) -> RGBColor {
    if name == crate::contenders::NAME { OURS } else { GOVERNOR }
}

fn plot(root: &Root<'_>, left: i32, title: &str, cases: &[Case], value: &dyn Fn(&Row) -> Option<f64>) -> Done {
    let values = || cases.iter().flat_map(|case| &case.rows).filter_map(value);
    let low = values().fold(f64::MAX, f64::min).log10().floor();
    let high = values().fold(f64::MIN, f64::max).log10().ceil().max(low + 1.0);
    let height = HEIGHT - TOP - BOTTOM;
    let y = |value: f64| TOP + height - (f64::from(height) * (value.log10() - low) / (high - low)).round() as i32;
    let x = |case: usize| left + PLOT * case as i32 / (cases.len().max(2) - 1) as i32;
    let bold = ("sans-serif", 15).into_font().style(FontStyle::Bold).color(&TEXT);
    root.draw(&Text::new(title.to_owned(), (left, 14), bold))?;
    let quiet = ("sans-serif", 12).into_font().color(&QUIET);
    for decade in low as i32..=high as i32 {
        let value = 10_f64.powi(decade);
        root.draw(&PathElement::new([(left, y(value)), (left + PLOT, y(value))], THIN.stroke_width(1)))?;
        let at = (left - 8, y(value));
        root.draw(&Text::new(decimal(value), at, quiet.pos(Pos::new(HPos::Right, VPos::Center))))?;
    }
    for (at, case) in cases.iter().enumerate() {
        let size = case.name.split(' ').next().unwrap_or_default().to_owned();
        let place = (x(at), TOP + height + 8);
        root.draw(&Text::new(size, place, quiet.pos(Pos::new(HPos::Center, VPos::Top))))?;
    }
    let middle = Pos::new(HPos::Center, VPos::Top);
    root.draw(&Text::new("active keys", (left + PLOT / 2, TOP + height + 24), quiet.pos(middle)))?;
    let Some(first) = cases.first() else { return Ok(()) };
    // Ours are drawn last, so that they lie above.
    for row in first.rows.iter().rev() {
        let point = |(at, case): (usize, &Case)| Some((x(at), y(value(case.row(&row.contender)?)?)));
        let points: Vec<(i32, i32)> = cases.iter().enumerate().filter_map(point).collect();
        let colour = colour(&row.contender);
        points.iter().try_for_each(|point| root.draw(&Circle::new(*point, 3, colour.filled())))?;
        root.draw(&PathElement::new(points, colour.stroke_width(2)))?;
    }
    Ok(())
}

const THIN: RGBColor = RGBColor(0xdd, 0xe0, 0xe4);

fn decimal(value: f64) -> String {
    if value < 1.0 { format!("{value}") } else { figure(value) }
}
