//! Rows under column titles, as wide as they are, or as narrow as a terminal: [`Grid`].
//!
//! In a pipe a row is one line, however long, so that a program can find it. On a terminal no line
//! is longer than the terminal is wide: columns come closer together, then texts go on below
//! themselves, and what is too wide even so is shown a line a cell.

use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table, Width, presets};

use super::{NONE, filled};

/// No column of text becomes narrower than this.
const NARROWEST: u16 = 12;

/// A table to be.
pub(super) struct Grid<'a> {
    columns: Vec<Column<'a>>,
    rows: Vec<Vec<String>>,
}

#[derive(Clone, Copy)]
struct Column<'a> {
    title: &'a str,
    is_text: bool,
}

impl<'a> Grid<'a> {
    /// `columns` are the titles with bars between them, each behind `<` (text, aligned to the left)
    /// or `>`.
    pub(super) fn new(columns: &'a str, rows: Vec<Vec<String>>) -> Self {
        let column = |text: &'a str| {
            let (align, title) = text.split_at(1);
            let is_text = align == "<";
            Column { title, is_text }
        };
        let columns = columns.split('|').map(column).collect();
        Self { columns, rows }
    }

    /// Its lines, none wider than `width` where that is given, but for words of a table that is
    /// shown a line a cell.
    pub(super) fn lines(&self, width: Option<usize>) -> Vec<String> {
        let whole = self.layout(2, str::to_owned, None);
        let Some(width) = width.filter(|width| !fit(&whole, *width)) else {
            return whole;
        };
        let title = |title: &str| title.replace(' ', "\n");
        let close = self.layout(1, title, None);
        if fit(&close, width) {
            return close;
        }
        let narrow = self.layout(1, title, Some(width));
        match fit(&narrow, width) {
            true => narrow,
            false => self.cells(width),
        }
    }

    /// The columns `apart`. Within a `width`, texts go on below themselves.
    fn layout(
        &self,
        apart: u16,
        title: impl Fn(&str) -> String,
        width: Option<usize>,
    ) -> Vec<String> {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).add_rows(&self.rows);
        table.set_content_arrangement(ContentArrangement::Disabled);
        if let Some(width) = width {
            table.set_content_arrangement(ContentArrangement::Dynamic);
            table.set_width(u16::try_from(width).unwrap_or(u16::MAX));
        }
        if self.columns.iter().any(|column| !column.title.is_empty()) {
            table.set_header(self.columns.iter().map(|column| title(column.title)));
        }
        let widths = table.column_max_content_widths();
        let columns = table.column_iter_mut().zip(&self.columns).zip(widths);
        for (index, ((column, Column { is_text, .. }), widest)) in columns.enumerate() {
            let left = if index == 0 { 2 } else { apart };
            column.set_padding((left, 0));
            column.set_cell_alignment(match is_text {
                true => CellAlignment::Left,
                false => CellAlignment::Right,
            });
            let narrowest = if *is_text {
                widest.min(NARROWEST)
            } else {
                widest
            };
            column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(
                narrowest + left,
            )));
        }
        let lines = table.lines();
        lines.map(|line| line.trim_end().to_owned()).collect()
    }

    /// A line for each cell, under the first of its row. One without a title follows the one before
    /// it.
    fn cells(&self, width: usize) -> Vec<String> {
        let titles = self
            .columns
            .iter()
            .map(|column| column.title.chars().count());
        let titles = titles.skip(1).max().unwrap_or(0);
        let mut lines = Vec::new();
        for row in &self.rows {
            let mut shown: Vec<(String, String)> = Vec::new();
            for (column, cell) in self.columns.iter().zip(row) {
                match shown.last_mut() {
                    _ if cell.is_empty() || cell == NONE => {}
                    None => shown.push(("  ".to_owned(), cell.clone())),
                    Some((_, text)) if column.title.is_empty() => *text = format!("{text}  {cell}"),
                    Some(_) => {
                        shown.push((format!("    {:<titles$}  ", column.title), cell.clone()));
                    }
                }
            }
            for (title, text) in shown {
                let text = filled(&title, &text, title.chars().count(), width);
                lines.extend(text.lines().map(str::to_owned));
            }
        }
        lines
    }
}

fn fit(lines: &[String], width: usize) -> bool {
    lines.iter().all(|line| line.chars().count() <= width)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(rows: &[&[&str]]) -> Vec<Vec<String>> {
        let row = |row: &&[&str]| row.iter().map(|cell| (*cell).to_owned()).collect();
        rows.iter().map(row).collect()
    }

    #[test]
    fn a_row_is_one_line_in_a_pipe_and_where_there_is_room() {
        let text = "word ".repeat(30);
        let grid = Grid::new("<NAME|>HUGE PAGES|<WHY", rows(&[&["a", "1", text.trim()]]));
        let whole = grid.lines(None);
        assert_eq!(whole.len(), 2);
        assert_eq!(grid.lines(Some(200)), whole);
    }

    #[test]
    fn columns_come_closer_before_texts_go_on_below_themselves() {
        let numbers = rows(&[&["a", "123456", "123456"]]);
        let grid = Grid::new("<NAME|>HUGE PAGES|>SMALL PAGES", numbers);
        assert_eq!(
            grid.lines(Some(20)),
            [
                "  NAME   HUGE  SMALL",
                "        PAGES  PAGES",
                "  a    123456 123456"
            ]
        );
        let text = rows(&[&["a", "1", "one two three four five six"]]);
        let grid = Grid::new("<NAME|>N|<WHY", text);
        assert_eq!(
            grid.lines(Some(24)),
            [
                "  NAME N WHY",
                "  a    1 one two three",
                "         four five six"
            ]
        );
        let path = rows(&[&["a", "1", "/a/very/long/path/to/a/library"]]);
        let lines = Grid::new("<NAME|>N|<PATH", path).lines(Some(24));
        assert!(lines.len() == 3 && fit(&lines, 24), "{lines:?}");
    }

    #[test]
    fn what_is_too_wide_is_shown_a_line_a_cell() {
        let spread = "1.00 ms [1.00 to 1.00]";
        let row: &[&str] = &[
            "start",
            "plain",
            spread,
            "jumbo run",
            spread,
            "-",
            "3.00x [2.90 to 3.10]",
            "ahead",
        ];
        let grid = Grid::new("<what|<from|>|<to|>|>published|>ratio|<", rows(&[row]));
        assert_eq!(
            grid.lines(Some(50)),
            [
                "  start",
                "    from       plain  1.00 ms [1.00 to 1.00]",
                "    to         jumbo run  1.00 ms [1.00 to 1.00]",
                "    ratio      3.00x [2.90 to 3.10]  ahead",
            ]
        );
    }
}
