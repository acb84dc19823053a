//! Draws an address space over time, as SVG.

use super::run::Outcome;
use super::trace::{Addresses, Recorded, live_after};
use super::trace::{Device, Run};
use std::collections::BTreeMap;
use std::fmt;

const PAGE: u64 = 4096;
const WIDTH: u32 = 900;
const HEIGHT: u32 = 420;
/// The area of the cells.
const LEFT: u32 = 130;
const TOP: u32 = 60;
/// The number of columns and rows of cells, and the width and height of a cell in units.
const COLUMNS: usize = 185;
const ROWS: usize = 80;
const CELL: u32 = 4;
/// The number of shades of a cell.
const SHADES: u64 = 5;

/// The I/O addresses of a device over time: time to the right, addresses upward. A cell is the
/// darker, the more of its addresses were mapped at some moment of its time. The same mappings
/// always give the same text.
pub struct Picture<'t> {
    device: &'t Device,
    subject: &'t str,
    colour: &'static str,
    addresses: Box<dyn Addresses + 't>,
}

impl Device {
    /// Returns a picture of the addresses that the kernel chose.
    pub fn picture(&self) -> Picture<'_> {
        Picture {
            device: self,
            subject: "as recorded",
            colour: "#666666",
            addresses: Box::new(Recorded(self)),
        }
    }
}

impl Outcome {
    /// Returns a picture of the addresses that the policy chose for this device.
    pub fn picture<'t>(&'t self, device: &'t Device) -> Picture<'t> {
        let subject = self.policy.name();
        let colour = if subject.starts_with("pinfold") { "#1f5f99" } else { "#e08a2e" };
        Picture { device, subject, colour, addresses: Box::new(&self.addresses) }
    }
}

/// The cells: how many bytes of each were mapped.
struct Grid {
    low: u64,
    high: u64,
    /// The bytes of a row.
    row: u64,
    cells: BTreeMap<u64, Box<[u64; COLUMNS]>>,
}

impl Grid {
    fn of(device: &Device, addresses: &dyn Addresses) -> Self {
        let used =
            || device.operations.iter().flat_map(|operation| addresses.of(operation.mapping));
        let low = used().map(|run| run.start).min().unwrap_or(0);
        let high = used().map(|run| run.end()).max().unwrap_or(PAGE);
        let row = ((high - low) / PAGE).div_ceil(ROWS as u64).max(1) * PAGE;
        let mut grid = Self { low, high, row, cells: BTreeMap::new() };
        let columns = Columns::of(device);
        let mut since: BTreeMap<u32, usize> = BTreeMap::new();
        for (number, operation) in device.operations.iter().enumerate() {
            let column = columns.at(number, operation.time_ns);
            if operation.unmaps {
                let from = since.remove(&operation.mapping).unwrap_or(0);
                grid.add(addresses.of(operation.mapping), from, column);
            } else {
                since.insert(operation.mapping, column);
            }
        }
        for (mapping, from) in since {
            grid.add(addresses.of(mapping), from, COLUMNS - 1);
        }
        grid
    }

    /// Adds the bytes of `runs` to the cells from one column to another.
    fn add(&mut self, runs: &[Run], from: usize, to: usize) {
        for run in runs {
            let (first, last) =
                ((run.start - self.low) / self.row, (run.end() - 1 - self.low) / self.row);
            for row in first..=last {
                let start = run.start.max(self.low + row * self.row);
                let end = run.end().min(self.low + (row + 1) * self.row);
                let cells = self.cells.entry(row).or_insert_with(|| Box::new([0; COLUMNS]));
                for cell in cells.get_mut(from..=to).unwrap_or_default() {
                    *cell = cell.saturating_add(end - start);
                }
            }
        }
    }

    /// Returns 0 for a cell in which nothing was mapped, up to [`SHADES`].
    fn shade(&self, bytes: u64) -> u64 {
        bytes.min(self.row).saturating_mul(SHADES).div_ceil(self.row)
    }
}

/// The column that an operation is in: by time, or by number if the trace has no times.
struct Columns {
    first: u64,
    last: u64,
    by_time: bool,
}

impl Columns {
    fn of(device: &Device) -> Self {
        let first = device.operations.first().map_or(0, |operation| operation.time_ns);
        let last = device.operations.iter().map(|operation| operation.time_ns).max().unwrap_or(0);
        if last > first {
            return Self { first, last, by_time: true };
        }
        Self { first: 0, last: device.operations.len() as u64, by_time: false }
    }

    fn at(&self, number: usize, time_ns: u64) -> usize {
        let at = if self.by_time { time_ns } else { number as u64 };
        let (at, all) = (at.saturating_sub(self.first), (self.last - self.first).max(1));
        let column = u128::from(at) * (COLUMNS as u128) / u128::from(all);
        usize::try_from(column).unwrap_or(usize::MAX).min(COLUMNS - 1)
    }
}

impl fmt::Display for Picture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let grid = Grid::of(self.device, &*self.addresses);
        let columns = Columns::of(self.device);
        let peak = live_after(&self.device.operations, self.device.peak_at, &*self.addresses);
        let (right, bottom) = (LEFT + width(COLUMNS), TOP + width(ROWS));
        writeln!(
            f,
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12" role="img">"#
        )?;
        let title = format!("I/O addresses of {}, {}", self.device.name, self.subject);
        writeln!(f, "<title>{}</title>", Escaped(&title))?;
        writeln!(f, r#"<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>"#)?;
        writeln!(f, r#"<text x="12" y="24" font-size="15">{}</text>"#, Escaped(&title))?;
        writeln!(
            f,
            r#"<text x="12" y="44" fill="dimgray">{} maps, at most {} at a time; {} extents when the most bytes are mapped; a row is {} KiB; darker: more of it is mapped</text>"#,
            self.device.counts.maps,
            self.device.counts.peak_mappings,
            peak.len(),
            grid.row / 1024
        )?;
        writeln!(
            f,
            r#"<rect x="{LEFT}" y="{TOP}" width="{}" height="{}" fill="none" stroke="dimgray"/>"#,
            right - LEFT,
            bottom - TOP
        )?;
        for (label, y) in [(grid.high, TOP + 10), (grid.low, bottom)] {
            writeln!(
                f,
                r#"<text x="{}" y="{y}" font-size="10" fill="dimgray" text-anchor="end">{label:#x}</text>"#,
                LEFT - 6
            )?;
        }
        for (x, anchor, at) in [(LEFT, "start", columns.first), (right, "end", columns.last)] {
            write!(
                f,
                r#"<text x="{x}" y="{}" font-size="10" fill="dimgray" text-anchor="{anchor}">"#,
                bottom + 14
            )?;
            if columns.by_time {
                writeln!(f, "{}.{:03} s</text>", at / 1_000_000_000, at / 1_000_000 % 1000)?;
            } else {
                writeln!(f, "operation {at}</text>")?;
            }
        }
        self.cells(f, &grid, bottom)?;
        f.write_str("</svg>\n")
    }
}

impl Picture<'_> {
    /// Draws the cells, those of a row that are equal and adjacent as one.
    fn cells(&self, f: &mut fmt::Formatter<'_>, grid: &Grid, bottom: u32) -> fmt::Result {
        writeln!(f, r#"<g fill="{}">"#, self.colour)?;
        for (row, cells) in &grid.cells {
            let y = bottom - width(usize::try_from(*row).unwrap_or(0) + 1);
            let mut x = LEFT;
            for same in cells.chunk_by(|a, b| grid.shade(*a) == grid.shade(*b)) {
                let shade = same.first().map_or(0, |bytes| grid.shade(*bytes));
                if shade > 0 {
                    writeln!(
                        f,
                        r#"<rect x="{x}" y="{y}" width="{}" height="{CELL}" fill-opacity="0.{}"/>"#,
                        width(same.len()),
                        if shade == SHADES { 99 } else { shade * 100 / SHADES }
                    )?;
                }
                x += width(same.len());
            }
        }
        writeln!(f, "</g>")
    }
}

/// Returns the width or height of `cells` cells.
fn width(cells: usize) -> u32 {
    // At most `COLUMNS`.
    u32::try_from(cells).unwrap_or(0) * CELL
}

/// Text with the characters that XML reserves replaced.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '&' => f.write_str("&amp;"),
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '"' => f.write_str("&quot;"),
            c => fmt::Write::write_char(f, c),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limits, Trace};

    /// Two mappings: one page for the whole time, and the page above for its second half.
    const TWO: &str = "\
 t-1 [0] ..... 1.000000: dma_map_page: d dir=NONE dma_addr=1000 size=8 phys_addr=9000 attrs=
 t-1 [0] ..... 2.000000: dma_map_page: d dir=NONE dma_addr=2000 size=8 phys_addr=9000 attrs=
 t-1 [0] ..... 3.000000: dma_unmap_page: d dir=NONE dma_addr=2000 size=8 attrs=
";

    fn trace(text: &str) -> Trace {
        Trace::read(text.as_bytes(), &Limits::default(), &|_| true).unwrap()
    }

    #[test]
    fn a_mapping_is_drawn_from_its_map_to_its_unmap() {
        let trace = trace(TWO);
        let picture = trace.devices[0].picture().to_string();
        let rects: Vec<&str> =
            picture.lines().filter(|line| line.contains("fill-opacity")).collect();
        let (half, bottom) = (LEFT + width(92), TOP + width(80));
        assert_eq!(
            rects,
            [
                format!(
                    r#"<rect x="{LEFT}" y="{}" width="740" height="4" fill-opacity="0.99"/>"#,
                    bottom - 4
                ),
                format!(
                    r#"<rect x="{half}" y="{}" width="372" height="4" fill-opacity="0.99"/>"#,
                    bottom - 8
                ),
            ]
        );
        for part in ["0.000 s</text>", "2.000 s</text>", ">0x1000<", ">0x3000<", "1 extents"] {
            assert!(picture.contains(part), "{part}: {picture}");
        }
        assert_eq!(picture, trace.devices[0].picture().to_string());
    }

    #[test]
    fn a_trace_without_times_is_drawn_by_numbers() {
        let trace = trace(
            &TWO.replace(" d ", " <a>&\" ")
                .replace("000000: ", ": ")
                .replace('.', "")
                .replace(":  ", ": "),
        );
        let picture = trace.devices[0].picture().to_string();
        assert!(
            picture.contains("&lt;a&gt;&amp;&quot;") && picture.contains("operation 3<"),
            "{picture}"
        );
    }
}
