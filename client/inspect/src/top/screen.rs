//! Draws a frame: on the terminal, or as text.

use std::io::{self, Read as _, Write as _};
use std::time::{Duration, Instant};

use permafrost_terminal::failure::{Code, Failure};
use permafrost_terminal::human;
use permafrost_terminal::interrupt::Interrupts;
use permafrost_terminal::visible::visible_line;
use ratatui::backend::TestBackend;
use ratatui::buffer::{Buffer, Cell};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Row, Table};
use ratatui::{Frame, Terminal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use super::TopView;
use super::view::NodeQueue;

/// Smallest terminal that a frame fits.
const COLUMNS: u16 = 60;
const LINES: u16 = 8;

/// Interval at which signals are noticed.
const NOTICE: Duration = Duration::from_millis(100);

/// Enters the alternate screen and hides the cursor (xterm's control sequences).
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[2J";

/// Shows the cursor and leaves the alternate screen.
const LEAVE: &str = "\x1b[0m\x1b[?25h\x1b[?1049l";

/// The terminal, until this is dropped: then it is as it was.
///
/// Frames are laid out by ratatui and written here: its backends bring an event loop of their own, of which nothing is
/// needed but a key.
pub(super) struct Screen {
    before: Termios,
}

impl Screen {
    pub(super) fn open() -> Result<Self, Failure> {
        let before = tcgetattr(io::stdin()).map_err(|error| failed(&error.into()))?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)
            .map_err(|error| failed(&error.into()))?;
        // From here on the terminal is put back, also if the rest fails.
        let screen = Self { before };
        put(ENTER.as_bytes())?;
        Ok(screen)
    }

    pub(super) fn draw(&mut self, view: &TopView) -> Result<(), Failure> {
        let size = tcgetwinsize(io::stdout()).map_err(|error| failed(&error.into()))?;
        let (columns, lines) = (size.ws_col.max(1), size.ws_row.max(1));
        put(painted(&rendered(view, columns, lines)).as_bytes())
    }

    /// Waits for keys until `next`. Returns true if the user leaves.
    pub(super) fn is_left(&self, next: Instant, interrupts: &Interrupts) -> Result<bool, Failure> {
        loop {
            interrupts.check()?;
            let left = next.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let stdin = io::stdin();
            let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
            let limit = Timespec::try_from(left.min(NOTICE)).unwrap_or_default();
            match poll(&mut fds, Some(&limit)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(failed(&error.into())),
            }
            let mut keys = [0; 64];
            let read = stdin
                .lock()
                .read(&mut keys)
                .map_err(|error| failed(&error))?;
            if leaves(&keys[..read]) {
                return Ok(true);
            }
        }
    }
}

/// Returns true for q, Ctrl-C, Ctrl-D and a lone Esc, and at the end of the input: other keys begin with Esc, too.
fn leaves(keys: &[u8]) -> bool {
    const CTRL_C: u8 = 3;
    const CTRL_D: u8 = 4;
    match keys {
        [] | [0x1b] => true,
        [0x1b, ..] => false,
        keys => keys
            .iter()
            .any(|key| [b'q', b'Q', CTRL_C, CTRL_D].contains(key)),
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Nothing more can be done about a terminal that is gone.
        let _ = put(LEAVE.as_bytes());
        let _ = tcsetattr(io::stdin(), OptionalActions::Flush, &self.before);
    }
}

fn put(bytes: &[u8]) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let written = out.write_all(bytes).and_then(|()| out.flush());
    written.map_err(|error| failed(&error))
}

fn failed(error: &io::Error) -> Failure {
    Failure::new(Code::Internal, format!("draw on the terminal: {error}"))
}

/// Lays a frame out.
fn rendered(view: &TopView, columns: u16, lines: u16) -> Buffer {
    let Ok(mut terminal) = Terminal::new(TestBackend::new(columns, lines));
    let Ok(_) = terminal.draw(|frame| draw(frame, view));
    terminal.backend().buffer().clone()
}

/// Returns the control sequences that paint a frame over the one before.
fn painted(buffer: &Buffer) -> String {
    let columns = usize::from(buffer.area.width).max(1);
    let mut text = String::from("\x1b[H");
    for (number, row) in buffer.content().chunks(columns).enumerate() {
        if number > 0 {
            text.push_str("\r\n");
        }
        let mut style = Modifier::empty();
        for cell in row {
            if cell.modifier != style {
                style = cell.modifier;
                text.push_str("\x1b[0m");
                if style.contains(Modifier::BOLD) {
                    text.push_str("\x1b[1m");
                }
                if style.contains(Modifier::REVERSED) {
                    text.push_str("\x1b[7m");
                }
            }
            text.push_str(cell.symbol());
        }
        text.push_str("\x1b[0m\x1b[K");
    }
    text
}

/// Returns a frame as text, as many lines long as it has to be.
pub(super) fn text(view: &TopView, columns: u16) -> String {
    let lines = sections(view).iter().map(Section::lines).sum::<usize>() + 2;
    let lines = u16::try_from(lines).unwrap_or(u16::MAX);
    let buffer = rendered(view, columns, lines.max(LINES));
    let mut text = String::new();
    for row in buffer.content().chunks(usize::from(columns)) {
        let line: String = row.iter().map(Cell::symbol).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    let end = text.trim_end().len();
    text.truncate(end);
    text.push('\n');
    text
}

/// A table with a title.
struct Section {
    header: Vec<&'static str>,
    rows: Vec<Vec<String>>,
    /// Said in place of rows.
    nothing: &'static str,
}

impl Section {
    /// Returns its height: header, rows, and an empty line.
    fn lines(&self) -> usize {
        self.rows.len().max(1) + 2
    }
}

fn draw(frame: &mut Frame<'_>, view: &TopView) {
    let area = frame.area();
    if area.width < COLUMNS || area.height < LINES {
        let text = format!("too small: {COLUMNS} columns and {LINES} lines are needed");
        let line = Paragraph::new(text).wrap(ratatui::widgets::Wrap { trim: true });
        return frame.render_widget(line, area);
    }
    let [title, body] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
    let mut text = format!("permafrost top  {}", human::date(view.at_unix_ms));
    if !view.answered_by.is_empty() {
        text.push_str(&format!("  node {}", visible_line(&view.answered_by)));
    }
    if let Some(problem) = &view.problem {
        text.push_str(&format!("  {}", visible_line(problem)));
    }
    frame.render_widget(
        Line::styled(text, Style::new().add_modifier(Modifier::BOLD)),
        title,
    );
    let mut top = body.y.saturating_add(1);
    for section in sections(view) {
        let left = body.bottom().saturating_sub(top);
        // A header without a row says nothing.
        if left < 2 {
            break;
        }
        let height = u16::try_from(section.lines()).unwrap_or(u16::MAX).min(left);
        let place = Rect {
            y: top,
            height,
            ..body
        };
        draw_section(frame, &section, place);
        top = top.saturating_add(height);
    }
}

fn draw_section(frame: &mut Frame<'_>, section: &Section, area: Rect) {
    let room = usize::from(area.height.saturating_sub(1));
    let mut rows: Vec<Vec<String>> = section.rows.clone();
    if rows.is_empty() {
        rows.push(vec![section.nothing.to_owned()]);
    } else if rows.len() > room {
        let hidden = rows.len() - room + 1;
        rows.truncate(room.saturating_sub(1));
        rows.push(vec![format!("and {hidden} more")]);
    }
    let widths = (0..section.header.len()).map(|column| {
        let cells = rows.iter().filter(|row| row.len() > 1);
        let widest = cells
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .chain([section.header[column].chars().count()])
            .max();
        let widest = u16::try_from(widest.unwrap_or(0)).unwrap_or(u16::MAX);
        // A row of one cell may be wider than its column.
        if column == 0 && rows.iter().any(|row| row.len() == 1) {
            return Constraint::Min(widest.max(24));
        }
        Constraint::Length(widest.min(40))
    });
    let widths: Vec<Constraint> = widths.collect();
    let header = Row::new(section.header.iter().copied())
        .style(Style::new().add_modifier(Modifier::REVERSED));
    let table = Table::new(rows.into_iter().map(Row::new), widths)
        .header(header)
        .column_spacing(2);
    frame.render_widget(table, area);
}

fn sections(view: &TopView) -> Vec<Section> {
    let rate = |rate: Option<f64>| {
        rate.map_or_else(
            || "-".to_owned(),
            |rate| format!("{}/s", human::bytes(human::whole(rate))),
        )
    };
    let time = |seconds: Option<f64>| seconds.map_or_else(|| "-".to_owned(), human::seconds);
    let clean = |text: &str| visible_line(text).into_owned();
    let queues = view.queues.iter().map(|queue| {
        vec![
            queue.what.to_owned(),
            format!("{} of {}", queue.running, queue.slots),
            queue.waiting.to_string(),
            queue.reserved.to_string(),
            human::bytes(queue.bytes),
            rate(queue.bytes_per_s),
            time(queue.left_s),
        ]
    });
    let transfers = view.transfers.iter().map(|transfer| {
        vec![
            transfer.what.to_owned(),
            human::percent(transfer.moved_bytes, transfer.expected_bytes),
            human::bytes(transfer.moved_bytes),
            human::bytes(transfer.expected_bytes),
            rate(transfer.bytes_per_s),
            time(transfer.left_s),
            human::age_s(transfer.age_s),
            if transfer.idle { "idle" } else { "" }.to_owned(),
        ]
    });
    let dumps = view.dumps.iter().map(|dump| {
        vec![
            if dump.job.is_empty() {
                "(no job yet)".to_owned()
            } else {
                clean(&dump.job)
            },
            clean(&dump.state),
            human::bytes(dump.received_bytes),
            human::age(dump.age_s),
        ]
    });
    let node_queue = |queue: &Option<NodeQueue>| match queue {
        None => "-".to_owned(),
        Some(queue) => {
            let mut text = format!("{} run, {} wait", queue.running, queue.waiting);
            if let Some(left) = queue.left_s.filter(|left| *left > 0.0) {
                text.push_str(&format!(", {}", human::seconds(left)));
            }
            text
        }
    };
    let nodes = view.nodes.iter().map(|node| {
        vec![
            clean(&node.name),
            node.state.to_owned(),
            human::bytes(node.free_bytes),
            human::bytes(node.capacity_bytes),
            rate(node.write_bytes_per_s),
            rate(node.read_bytes_per_s),
            node_queue(&node.dumps),
            node_queue(&node.restores),
        ]
    });
    let mut sections = Vec::new();
    if !view.queues.is_empty() {
        sections.push(Section {
            header: vec![
                "QUEUE", "RUNNING", "WAITING", "RESERVED", "TO MOVE", "RATE", "LEFT",
            ],
            rows: queues.collect(),
            nothing: "",
        });
        sections.push(Section {
            header: vec!["TRANSFER", "DONE", "MOVED", "OF", "RATE", "LEFT", "AGE", ""],
            rows: transfers.collect(),
            nothing: "no transfers run",
        });
    }
    if !view.dumps.is_empty() {
        sections.push(Section {
            header: vec!["DUMP", "STATE", "RECEIVED", "AGE"],
            rows: dumps.collect(),
            nothing: "",
        });
    }
    sections.push(Section {
        header: vec![
            "NODE", "STATE", "FREE", "SIZE", "WRITE", "READ", "DUMPS", "RESTORES",
        ],
        rows: nodes.collect(),
        nothing: "no nodes known",
    });
    sections
}

#[cfg(test)]
mod tests {
    use super::super::view::{DumpLine, NodeLine, QueueLine, TransferLine};
    use super::*;

    fn view(nodes: usize) -> TopView {
        TopView {
            answered_by: "n1".to_owned(),
            queues: vec![QueueLine {
                what: "dumps",
                running: 1,
                slots: 2,
                waiting: 3,
                reserved: 0,
                bytes: 5 << 30,
                bytes_per_s: Some(1e9),
                left_s: Some(5.4),
            }],
            transfers: vec![TransferLine {
                what: "dump",
                moved_bytes: 1 << 30,
                expected_bytes: 4 << 30,
                bytes_per_s: Some(f64::from(1 << 29)),
                left_s: Some(6.0),
                age_s: 2.0,
                idle: false,
            }],
            dumps: vec![DumpLine {
                job: "team/train\x1b[2J".to_owned(),
                state: "receiving".to_owned(),
                received_bytes: 1 << 30,
                age_s: 2,
            }],
            nodes: (0..nodes)
                .map(|number| NodeLine {
                    name: format!("n{number}"),
                    state: "up",
                    capacity_bytes: 4 << 30,
                    free_bytes: 1 << 30,
                    write_bytes_per_s: None,
                    read_bytes_per_s: None,
                    dumps: None,
                    restores: None,
                })
                .collect(),
            ..TopView::default()
        }
    }

    fn shown(frame: &Buffer) -> String {
        frame.content().iter().map(Cell::symbol).collect()
    }

    #[test]
    fn keys_that_leave_are_told_from_those_that_begin_like_them() {
        for keys in [&b"q"[..], b"xq", b"\x03", b"\x04", b"\x1b", b""] {
            assert!(leaves(keys), "{keys:?}");
        }
        for keys in [&b"x"[..], b"\x1b[A", b"\x1bq"] {
            assert!(!leaves(keys), "{keys:?}");
        }
    }

    #[test]
    fn a_frame_as_text_has_everything() {
        let text = text(&view(2), 120);
        for part in [
            "1 of 2",
            "25 %",
            "512.0 MiB/s",
            "6.00 s",
            "team/train",
            "n0",
            "n1",
            "1.0 GiB",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains('\x1b'), "{text}");
        assert!(text.lines().all(|line| line.len() == line.trim_end().len()));
    }

    #[test]
    fn a_thousand_nodes_are_all_in_a_text_and_cut_on_a_terminal() {
        let all = text(&view(1_000), 120);
        assert!(all.contains("n999"), "{}", &all[all.len() - 200..]);
        let shown = shown(&rendered(&view(1_000), 120, 30));
        assert!(shown.contains("more"), "{shown}");
    }

    #[test]
    fn a_terminal_of_any_size_gets_a_frame() {
        for (columns, lines) in [
            (1, 1),
            (10, 3),
            (59, 40),
            (60, 7),
            (60, 8),
            (200, 9),
            (300, 100),
        ] {
            let frame = rendered(&view(50), columns, lines);
            let shown = shown(&frame);
            let painted = painted(&frame);
            assert_eq!(painted.matches("\r\n").count(), usize::from(lines) - 1);
            let is_small = columns < COLUMNS || lines < LINES;
            if columns > 10 {
                assert_eq!(
                    shown.contains("too small"),
                    is_small,
                    "{columns} x {lines}: {shown}"
                );
            }
        }
    }
}
