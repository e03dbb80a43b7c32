//! Tables with aligned columns, as text.

use crate::visible::visible_line;

/// Alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// Left-aligned, for text.
    Left,
    /// Right-aligned, for numbers.
    Right,
}

/// Rows of cells under a headline.
#[derive(Debug)]
pub struct Table {
    aligns: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Returns an empty table with these columns.
    pub fn new<const N: usize>(columns: [(&str, Align); N]) -> Self {
        Self {
            aligns: columns.iter().map(|(_, align)| *align).collect(),
            rows: vec![columns.iter().map(|(name, _)| (*name).to_owned()).collect()],
        }
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(N, self.aligns.len());
        let cells = cells.map(|cell| visible_line(&cell).into_owned());
        self.rows.push(cells.into());
    }

    /// Returns the text: columns two spaces apart, a newline after each row.
    pub fn render(&self) -> String {
        let width = |cell: &String| cell.chars().count();
        let widths: Vec<usize> = (0..self.aligns.len())
            .map(|column| {
                self.rows
                    .iter()
                    .map(|row| width(&row[column]))
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, align), widest) in row.iter().zip(&self.aligns).zip(&widths) {
                if !line.is_empty() {
                    line.push_str("  ");
                }
                match align {
                    Align::Left => line.push_str(&format!("{cell:<widest$}")),
                    Align::Right => line.push_str(&format!("{cell:>widest$}")),
                }
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// Formats `name  value` lines, the values aligned, under an optional title; empty values are left out.
pub fn facts(title: &str, facts: &[(&str, String)]) -> String {
    let shown = facts.iter().filter(|(_, value)| !value.is_empty());
    let widest = shown
        .clone()
        .map(|(name, _)| name.chars().count())
        .max()
        .unwrap_or(0);
    let mut text = String::new();
    if !title.is_empty() {
        text.push_str(title);
        text.push('\n');
    }
    let indent = if title.is_empty() { "" } else { "  " };
    for (name, value) in shown {
        let value = visible_line(value);
        text.push_str(&format!("{indent}{name:<widest$}  {value}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_and_lines_have_no_trailing_space() {
        let mut table = Table::new([
            ("NAME", Align::Left),
            ("SIZE", Align::Right),
            ("", Align::Left),
        ]);
        table.row(["a".to_owned(), "12 µs".to_owned(), String::new()]);
        table.row(["long-name".to_owned(), "7".to_owned(), "pinned".to_owned()]);
        assert_eq!(
            table.render(),
            "NAME        SIZE\na          12 µs\nlong-name      7  pinned\n"
        );
    }

    #[test]
    fn empty_facts_are_left_out() {
        assert_eq!(
            facts(
                "train@3",
                &[
                    ("id", "7".to_owned()),
                    ("parent", String::new()),
                    ("stored", "1 B".to_owned())
                ]
            ),
            "train@3\n  id      7\n  stored  1 B\n"
        );
    }
}
