//! Rows under column titles, as wide as they are, or as narrow as a terminal: [`Grid`].
//!
//! In a pipe a row is one line, however long, so that a program can find it. On a terminal no line is longer than the terminal
//! is wide: columns come closer together, then texts go on below themselves, and what is too wide even so is shown a line a cell.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use super::{NONE, filled};

/// No column of text becomes narrower than this.
const NARROWEST: usize = 12;

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
    /// `columns` are the titles with bars between them, each behind `<` (text, aligned to the left) or `>`.
    pub(super) fn new(columns: &'a str, rows: Vec<Vec<String>>) -> Self {
        let column = |text: &'a str| {
            let (align, title) = text.split_at(1);
            let is_text = align == "<";
            Column { title, is_text }
        };
        let columns = columns.split('|').map(column).collect();
        Self { columns, rows }
    }

    /// Its lines, none wider than `width` where that is given, but for words of a table that is shown a line a cell.
    pub(super) fn lines(&self, width: Option<usize>) -> Vec<String> {
        let whole = self.layout(2, |title| title.to_owned(), &self.rows);
        let Some(width) = width.filter(|width| !fit(&whole, *width)) else {
            return whole;
        };
        self.narrow(width).unwrap_or_else(|| self.cells(width))
    }

    fn layout(
        &self,
        apart: u16,
        title: impl Fn(&str) -> String,
        rows: &[Vec<String>],
    ) -> Vec<String> {
        let mut table = Table::new();
        table
            .load_style(presets::NOTHING)
            .set_content_arrangement(ContentArrangement::Disabled)
            .add_rows(rows);
        if self.columns.iter().any(|column| !column.title.is_empty()) {
            table.set_header(self.columns.iter().map(|column| title(column.title)));
        }
        let columns = table.column_iter_mut().zip(&self.columns);
        for (index, (column, Column { is_text, .. })) in columns.enumerate() {
            column.set_padding((if index == 0 { 2 } else { apart }, 0));
            column.set_cell_alignment(match is_text {
                true => CellAlignment::Left,
                false => CellAlignment::Right,
            });
        }
        let lines = table.lines();
        lines.map(|line| line.trim_end().to_owned()).collect()
    }

    /// With columns close together, titles in several lines, and texts that go on below themselves. `None` where there is no
    /// room for that either.
    fn narrow(&self, width: usize) -> Option<Vec<String>> {
        let title = |title: &str| title.replace(' ', "\n");
        let close = self.layout(1, title, &self.rows);
        if fit(&close, width) {
            return Some(close);
        }
        let widest = |(index, column): (usize, &Column<'_>)| {
            let cells = self.rows.iter().filter_map(|row| row.get(index));
            let cells = cells.map(|cell| cell.chars().count());
            let words = column.title.split(' ').map(|word| word.chars().count());
            cells.chain(words).max().unwrap_or(0)
        };
        let mut widths: Vec<_> = self.columns.iter().enumerate().map(widest).collect();
        let mut beyond = (widths.iter().sum::<usize>() + widths.len() + 1).saturating_sub(width);
        while beyond > 0 {
            let columns = widths.iter_mut().zip(&self.columns);
            let texts = columns.filter(|(_, column)| column.is_text);
            let (widest, _) = texts.max_by_key(|(width, _)| **width)?;
            if *widest <= NARROWEST {
                return None;
            }
            (*widest, beyond) = (*widest - 1, beyond - 1);
        }
        let cell = |(cell, width): (&String, &usize)| broken(cell, *width);
        let row = |row: &Vec<String>| row.iter().zip(&widths).map(cell).collect();
        let rows: Vec<Vec<String>> = self.rows.iter().map(row).collect();
        let lines = self.layout(1, title, &rows);
        fit(&lines, width).then_some(lines)
    }

    /// A line for each cell, under the first of its row. One without a title follows the one before it.
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

/// In lines of `width` at most, also where a word is longer.
fn broken(text: &str, width: usize) -> String {
    let lines = filled("", text, 0, width);
    let lines = lines.lines().flat_map(|line| {
        let chars: Vec<_> = line.chars().collect();
        let parts = chars.chunks(width.max(1)).map(|part| part.iter().collect());
        parts.collect::<Vec<String>>()
    });
    lines.collect::<Vec<_>>().join("\n")
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
