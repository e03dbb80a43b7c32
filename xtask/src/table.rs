//! Rendering of tables as plain text.

/// Aligns columns: the first to the left, the others to the right. The first row is the head.
pub(crate) fn render(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for (index, row) in rows.iter().enumerate() {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(column, (cell, &width))| {
                if column == 0 {
                    format!("{cell:<width$}")
                } else {
                    format!("{cell:>width$}")
                }
            })
            .collect();
        out += cells.join("  ").trim_end();
        out.push('\n');
        if index == 0 {
            out += &"-".repeat(widths.iter().sum::<usize>() + 2 * columns.saturating_sub(1));
            out.push('\n');
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [
            vec!["a".to_owned(), "size".to_owned()],
            vec!["long".to_owned(), "7".to_owned()],
        ];
        assert_eq!(render(&rows), "a     size\n----------\nlong     7\n");
    }
}
