//! Tables with column titles: [`Grid`].
//!
//! In a pipe each row is one line of any length, for grep and awk. On a terminal lines fit its
//! width: first the gaps between columns shrink, then text columns wrap, and as the last resort
//! each cell has a line of its own.

use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table, Width, presets};

use super::{NONE, filled};

/// Minimum width of a wrapped text column.
const MIN_TEXT_WIDTH: u16 = 12;

/// Titles and rows of a table.
pub(super) struct Grid<'a> {
    columns: Vec<Column<'a>>,
    rows: &'a [Vec<String>],
}

#[derive(Clone, Copy)]
struct Column<'a> {
    title: &'a str,
    is_text: bool,
}

impl<'a> Grid<'a> {
    /// `columns` has the titles, separated by `|`, each after `<` (text, aligned to the left) or
    /// `>`.
    pub(super) fn new(columns: &'a str, rows: &'a [Vec<String>]) -> Self {
        let column = |text: &'a str| {
            let (align, title) = text.split_at(1);
            let is_text = align == "<";
            Column { title, is_text }
        };
        let columns = columns.split('|').map(column).collect();
        Self { columns, rows }
    }

    /// Lines of the table, within `width` if given. Only a single long word may exceed it, in the
    /// layout of one line per cell.
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

    /// Lines with `gap` blanks between columns. Text columns wrap to fit `width` if given.
    fn layout(
        &self,
        gap: u16,
        title: impl Fn(&str) -> String,
        width: Option<usize>,
    ) -> Vec<String> {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).add_rows(self.rows);
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
            let left = if index == 0 { 2 } else { gap };
            column.set_padding((left, 0));
            column.set_cell_alignment(match is_text {
                true => CellAlignment::Left,
                false => CellAlignment::Right,
            });
            let min_width = if *is_text {
                widest.min(MIN_TEXT_WIDTH)
            } else {
                widest
            };
            column.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(
                min_width + left,
            )));
        }
        let lines = table.lines();
        lines.map(|line| line.trim_end().to_owned()).collect()
    }

    /// One line for each cell, below the first cell of its row. A cell without a title is appended
    /// to the cell before it.
    fn cells(&self, width: usize) -> Vec<String> {
        let titles = self
            .columns
            .iter()
            .map(|column| column.title.chars().count());
        let titles = titles.skip(1).max().unwrap_or(0);
        let mut lines = Vec::new();
        for row in self.rows {
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
    fn a_row_is_one_line_in_a_pipe_and_on_a_wide_terminal() {
        let text = "word ".repeat(30);
        let rows = rows(&[&["a", "1", text.trim()]]);
        let grid = Grid::new("<NAME|>HUGE PAGES|<WHY", &rows);
        let whole = grid.lines(None);
        assert_eq!(whole.len(), 2);
        assert_eq!(grid.lines(Some(200)), whole);
    }

    #[test]
    fn gaps_shrink_before_text_wraps() {
        let numbers = rows(&[&["a", "123456", "123456"]]);
        let grid = Grid::new("<NAME|>HUGE PAGES|>SMALL PAGES", &numbers);
        assert_eq!(
            grid.lines(Some(20)),
            [
                "  NAME   HUGE  SMALL",
                "        PAGES  PAGES",
                "  a    123456 123456"
            ]
        );
        let text = rows(&[&["a", "1", "one two three four five six"]]);
        let grid = Grid::new("<NAME|>N|<WHY", &text);
        assert_eq!(
            grid.lines(Some(24)),
            [
                "  NAME N WHY",
                "  a    1 one two three",
                "         four five six"
            ]
        );
        let path = rows(&[&["a", "1", "/a/very/long/path/to/a/library"]]);
        let lines = Grid::new("<NAME|>N|<PATH", &path).lines(Some(24));
        assert!(lines.len() == 3 && fit(&lines, 24), "{lines:?}");
    }

    #[test]
    fn a_table_that_is_too_wide_has_one_line_per_cell() {
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
        let rows = rows(&[row]);
        let grid = Grid::new("<what|<from|>|<to|>|>published|>ratio|<", &rows);
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
