//! A chart: for each case a bar for each contender, on a scale of its own.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::case::{Better, Case, Row, figure};

const WIDTH: i32 = 940;
const NAMES: i32 = 230;
const FIGURES: i32 = 140;
const LINE: i32 = 19;
const TITLE: i32 = 40;

/// The families' own colours: ours stand out.
pub const OURS: RGBColor = RGBColor(0x1f, 0x77, 0xb4);
const THEIRS: RGBColor = RGBColor(0xb8, 0xbd, 0xc4);
pub const TEXT: RGBColor = RGBColor(0x33, 0x38, 0x3f);
pub const QUIET: RGBColor = RGBColor(0x77, 0x7d, 0x86);

pub fn draw(file: &Path, cases: &[Case]) -> Result<(), Box<dyn std::error::Error>> {
    let height: i32 = cases.iter().map(|case| TITLE + LINE * case.rows.len() as i32).sum::<i32>() + 12;
    let root = SVGBackend::new(file, (WIDTH as u32, height as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut top = 0;
    for case in cases {
        let title = ("sans-serif", 15).into_font().style(FontStyle::Bold).color(&TEXT);
        root.draw(&Text::new(case.name.clone(), (12, top + 14), title))?;
        let unit = match case.better {
            Better::Lower => format!("{}, shorter is better", case.unit),
            Better::Higher => format!("{}, longer is better", case.unit),
        };
        let right = Pos::new(HPos::Right, VPos::Top);
        let quiet = ("sans-serif", 12).into_font().color(&QUIET);
        root.draw(&Text::new(unit, (WIDTH - 12, top + 16), quiet.pos(right)))?;
        top += TITLE;
        for row in &case.rows {
            draw_row(&root, case, row, top)?;
            top += LINE;
        }
    }
    root.present()?;
    Ok(())
}

fn draw_row(
    root: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    case: &Case,
    row: &Row,
    top: i32,
) -> Result<(), Box<dyn std::error::Error>> {
    let is_ours = row.contender.starts_with(crate::contenders::NAME);
    let font = ("sans-serif", 13).into_font();
    let right = Pos::new(HPos::Right, VPos::Top);
    root.draw(&Text::new(row.contender.clone(), (NAMES - 8, top + 2), font.clone().color(&TEXT).pos(right)))?;
    let length = length(case, row.value);
    let colour = if is_ours { OURS } else { THEIRS };
    root.draw(&Rectangle::new([(NAMES, top + 3), (NAMES + length, top + LINE - 3)], colour.filled()))?;
    let told = match row.ratio {
        Some(ratio) if row.contender != case.against => format!("{}  ({ratio:.2}x)", figure(row.value)),
        _ => figure(row.value),
    };
    root.draw(&Text::new(told, (NAMES + length + 6, top + 2), font.color(&TEXT)))?;
    Ok(())
}

/// In pixels; of what is next to nothing a line is seen.
fn length(case: &Case, value: f64) -> i32 {
    let room = f64::from(WIDTH - NAMES - FIGURES);
    let most = case.rows.iter().map(|row| row.value).fold(1.0, f64::max);
    (room * value / most).max(2.0) as i32
}
